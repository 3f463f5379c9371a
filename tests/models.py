"""Small tables for the tests to write to."""

from django.db import models

from idempotency.models import IdempotencyKey


class Entry(models.Model):
    """What a view under test has done."""

    name = models.CharField(max_length=100)
    idempotency_key = models.OneToOneField(
        IdempotencyKey, null=True, on_delete=models.SET_NULL, related_name="+"
    )

    class Meta:
        app_label = "tests"

    def __str__(self) -> str:
        return self.name


class Account(models.Model):
    """Something to read, and to change."""

    name = models.CharField(max_length=100, unique=True)
    balance = models.IntegerField(default=0)

    class Meta:
        app_label = "tests"

    def __str__(self) -> str:
        return self.name
