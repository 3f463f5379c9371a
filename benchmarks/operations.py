"""The operations that are measured. Each inserts one row, in its only transaction."""

from django.contrib.auth.models import Group

from benchmarks import views
from idempotency.operations import keyed, operation


def bare(*, name: str) -> dict[str, int]:
    """Insert a row with the ORM."""
    return {"id": Group.objects.create(name=name).pk}


def charge(key: str, *, name: str) -> str:
    """Stand in for a call of a service, which does nothing."""
    return name


@operation("benchmarks.plain")
def plain(*, name: str) -> dict[str, int]:
    """Insert a row with the ORM in a plain operation."""
    return bare(name=name)


@operation("benchmarks.call", call=keyed(charge, valid_hours=23), retention_hours=72)
def call(charged: str, /, *, name: str) -> dict[str, int]:
    """Insert a row with the ORM after a call."""
    return bare(name=charged)


@operation("benchmarks.plain_work")
def plain_work() -> dict[str, int]:
    """Do the work of the views in a plain operation."""
    return {"id": views.work()}


def charge_nothing(key: str) -> None:
    """Stand in for a call of a service, as in the ride."""
    views.charge()


@operation("benchmarks.call_work", call=keyed(charge_nothing, valid_hours=23), retention_hours=72)
def call_work(charged: None, /) -> dict[str, int]:
    """Do the work of the views after a call."""
    return {"id": views.work()}
