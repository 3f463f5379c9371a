"""Users with a UUID, and users with a text."""

import uuid

from django.contrib.auth.models import AbstractUser
from django.db import models


class UuidUser(AbstractUser):
    """A user with a UUID."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    groups = models.ManyToManyField("auth.Group", related_name="+", blank=True)
    user_permissions = models.ManyToManyField("auth.Permission", related_name="+", blank=True)


def text_key() -> str:
    """Return a new primary key."""
    return f"user/{uuid.uuid4()}"


class TextUser(AbstractUser):
    """A user whose primary key is a text."""

    id = models.CharField(primary_key=True, max_length=60, default=text_key)
    groups = models.ManyToManyField("auth.Group", related_name="+", blank=True)
    user_permissions = models.ManyToManyField("auth.Permission", related_name="+", blank=True)
