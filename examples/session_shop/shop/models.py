import uuid

from django.db import models


class Order(models.Model):
    number = models.UUIDField(primary_key=True, default=uuid.uuid4)
    email = models.EmailField()
    items = models.JSONField()
