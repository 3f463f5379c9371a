"""The rows that a request creates."""

from django.db import models


class Order(models.Model):
    """An order that a request creates."""

    name = models.CharField(max_length=100)
    idempotency_key = models.OneToOneField(
        "idempotency.IdempotencyKey", null=True, on_delete=models.SET_NULL
    )

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return self.name
