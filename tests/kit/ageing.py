"""Make keys older without waiting."""

from datetime import datetime, timedelta
from typing import Any

from django.db.models.functions import Now
from django.utils import timezone

from idempotency import conf
from idempotency.models import IdempotencyKey
from tests.factories import IdempotencyKeyFactory


def ago(**span: float) -> datetime:
    """Return the time ``timedelta(**span)`` ago."""
    return timezone.now() - timedelta(**span)


def lock_end(seconds_ago: float = 0) -> datetime:
    """Return the end of a lock that a run has renewed ``seconds_ago``, with the lease of the
    settings."""
    return ago(seconds=seconds_ago - conf.get().LOCK_TIMEOUT_SECONDS)


def make_older(seconds: float, *fields: str) -> None:
    """Move ``fields`` of each key ``seconds`` into the past. The end of the retention moves with
    the end of the key."""
    if {"finished_at", "refused_at"} & {*fields}:
        fields += ("expires_at",)
    # Citus accepts no column in the expression of the new time.
    for pk, *times in IdempotencyKey.objects.values_list("pk", *fields):
        older = {
            name: at and at - timedelta(seconds=seconds)
            for name, at in zip(fields, times, strict=True)
        }
        IdempotencyKey.objects.filter(pk=pk).update(**older)


def expire_lock(seconds: float = 226) -> None:
    """Make the lock of each key ``seconds`` old. By default it has expired for clients (90 s) and
    the completer (225 s)."""
    IdempotencyKey.objects.update(
        locked_until=Now() + timedelta(seconds=conf.get().LOCK_TIMEOUT_SECONDS - seconds)
    )


def abandon(times: int = 1, *, using: str = "default") -> None:
    """Make the age and the idle time of each unfinished key one second longer than ``times`` times
    300 and 60 seconds."""
    old, idle = (Now() - timedelta(seconds=times * limit + 1) for limit in (300, 60))
    unfinished = IdempotencyKey.objects.using(using).filter(finished_at=None)
    unfinished.update(created_at=old, last_run_at=idle, next_run_at=None)


def past_the_retention(*, using: str = "default") -> None:
    """Make each key 74 hours old, and its last run and its end 73 hours; the retention is 72
    hours."""
    keys, end = IdempotencyKey.objects.using(using), Now() - timedelta(hours=73)
    keys.update(created_at=Now() - timedelta(hours=74), last_run_at=end)
    keys.finished().update(finished_at=end, expires_at=Now() - timedelta(hours=1))


def _expired() -> dict[str, datetime]:
    return {"created_at": ago(hours=74), "finished_at": ago(hours=73)}


def expired_key(**values: Any) -> IdempotencyKey:
    """Create and return a finished key that is past its retention."""
    key: IdempotencyKey = IdempotencyKeyFactory(finished=True, **{**_expired(), **values})
    return key


def expired_keys(count: int) -> list[IdempotencyKey]:
    """Create and return ``count`` finished keys past their retention."""
    return IdempotencyKey.objects.bulk_create(
        IdempotencyKeyFactory.build_batch(count, finished=True, **_expired())
    )
