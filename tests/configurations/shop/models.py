"""Orders."""

import os

from django.db import models

HISTORY = os.environ.get("CONFIGURATION_HISTORY", "")


class Order(models.Model):
    """What a view has done."""

    name = models.CharField(max_length=100, unique=True)
    idempotency_key = models.OneToOneField(
        "idempotency.IdempotencyKey", null=True, on_delete=models.SET_NULL, related_name="+"
    )

    def __str__(self) -> str:
        return self.name


class Elsewhere(models.Model):
    """A row that the router sends to the second database."""

    name = models.CharField(max_length=100)

    def __str__(self) -> str:
        return self.name


if HISTORY == "pghistory":
    import pghistory

    pghistory.track()(Order)
elif HISTORY == "pgtrigger":
    import pgtrigger

    pgtrigger.register(pgtrigger.Protect(name="no_deletes", operation=pgtrigger.Delete))(Order)
elif HISTORY == "simple_history":
    from simple_history import register

    register(Order, app=__package__)
elif HISTORY == "auditlog":
    from auditlog.registry import auditlog

    auditlog.register(Order)
elif HISTORY == "reversion":
    import reversion

    reversion.register(Order)
