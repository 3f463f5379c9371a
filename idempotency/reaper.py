"""The reaper: deletes keys whose retention is over, and marks overdue unfinished keys as stuck.

It deletes through the ORM, in small transactions, because what a user's foreign key to a key wants (SET_NULL and the others)
lives in Python. Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" (the reaper).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import chain

from django.db import IntegrityError, connections, router, transaction
from django.db.models import CharField, Exists, OuterRef, ProtectedError, Q, QuerySet, RestrictedError, Value
from django.db.models.functions import Cast, Now, Replace

from idempotency import conf
from idempotency.abandonment import settle
from idempotency.inbox import STAGED_JOBS
from idempotency.models import IdempotencyKey, IdempotencyKeyQuerySet, ProcessedMessage, StagedJob

#: How long a second delivery of a message is recognised; longer than any sender tries.
MESSAGE_RETENTION = timedelta(days=30)
#: After a batch the reaper rests so many times as long as the batch took, so that requests seldom meet it at work: a
#: twentieth of the time is enough for forty million keys a day. ``python -m benchmarks.reaper`` measures what claims feel of
#: it.
RESTS_FOR_A_BATCH = 19
#: How often a rest asks whether to stop: whoever sent SIGTERM does not wait for long.
_ASK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ReapPass:
    """What one pass did: keys and messages deleted, keys that others protect; unfinished keys settled, and marked stuck."""

    deleted: int = 0
    protected: int = 0
    settled: int = 0
    stuck: int = 0
    messages: int = 0


def reap_once(
    *,
    batch_size: int = 1000,
    older_than_hours: float | None = None,
    dry_run: bool = False,
    using: str | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[ReapPass], None] = lambda so_far: None,
) -> ReapPass:
    """Delete what is past its retention, a batch in a transaction, with a rest after each; several may run at once.

    Deleted are finished and refused keys that have expired, and messages of the inbox after 30 days, but not the message of a
    job that is still staged. Foreign keys to a deleted key are honoured; one that a row of the user protects is kept. Other
    unfinished keys past the retention, counted from their creation or from when a person gave them back to the completer, are
    settled by the ``on_abandon`` of their view, or marked stuck, unless a run holds them.

    ``older_than_hours`` replaces RETENTION_HOURS for the finished and refused keys of this pass, and for nothing else: a retry
    that comes after its key was deleted runs anew. ``stop`` is asked before each batch and during the rests, ``progress`` is
    told the counts after each batch. ``dry_run`` only counts.
    """
    alias = using or router.db_for_write(IdempotencyKey)
    hours = conf.get().RETENTION_HOURS if older_than_hours is None else older_than_hours
    expired = partial(_expired, alias, timedelta(hours=hours))
    if dry_run:
        return ReapPass(deleted=expired().count(), stuck=_overdue(alias).count(), messages=_old_messages(alias).count())
    counts: Counter[str] = Counter()
    batches = chain(
        _timed(_reap_expired(alias, expired, batch_size)),
        ((batch, 0.0) for batch in _settle_overdue(alias, batch_size)),
        _timed(_reap_messages(alias, batch_size)),
    )
    while not stop() and (reaped := next(batches, None)) is not None:
        batch, took = reaped
        counts.update(batch)
        progress(ReapPass(**counts))
        _rest(RESTS_FOR_A_BATCH * took, stop)
    return ReapPass(**counts)


def _timed(batches: Iterator[dict[str, int]]) -> Iterator[tuple[dict[str, int], float]]:
    """Yield each batch with the seconds that it took."""
    while True:
        start = time.monotonic()
        if (batch := next(batches, None)) is None:
            return
        yield batch, time.monotonic() - start


def _rest(seconds: float, stop: Callable[[], bool]) -> None:
    rested = time.monotonic() + seconds
    while (left := rested - time.monotonic()) > 0 and not stop():
        time.sleep(min(left, _ASK_SECONDS))


def _expired(alias: str, retention: timedelta) -> IdempotencyKeyQuerySet:
    # A finished key is not locked; should one be, its request is at work at this moment, whatever the clock said.
    recently = Now() - timedelta(seconds=conf.get().LOCK_TIMEOUT_SECONDS)
    return IdempotencyKeyQuerySet(IdempotencyKey, using=alias).expired(retention).exclude(locked_at__gte=recently)


def _overdue(alias: str) -> IdempotencyKeyQuerySet:
    return IdempotencyKeyQuerySet(IdempotencyKey, using=alias).overdue()


def _old_messages(alias: str) -> QuerySet[ProcessedMessage]:
    old = ProcessedMessage.objects.using(alias).filter(processed_at__lt=Now() - MESSAGE_RETENTION)
    # A job that is still staged may be handed over again: its message must be known then, however old it is.
    digits = partial(Replace, text=Value("-"))  # SQLite keeps a UUID without them.
    job = StagedJob.objects.using(alias).annotate(digits=digits(Cast("pk", CharField())))
    return old.exclude(Q(source=STAGED_JOBS) & Exists(job.filter(digits=digits(OuterRef("message_id")))))


def _reap_expired(alias: str, expired: Callable[[], IdempotencyKeyQuerySet], batch_size: int) -> Iterator[dict[str, int]]:
    last = None
    while True:
        with transaction.atomic(using=alias, durable=True):
            page = _page(expired().select_for_update(skip_locked=True), last, batch_size)
            deleted = _delete(alias, [pk for _, pk in page])
        if not page:
            return
        last = page[-1]
        yield {"deleted": deleted, "protected": len(page) - deleted}


def _settle_overdue(alias: str, batch_size: int) -> Iterator[dict[str, int]]:
    last = None
    while page := _page(_overdue(alias), last, batch_size):
        last = page[-1]
        for _, pk in page:
            # A person may have given it back while those before it were settled.
            if _overdue(alias).filter(pk=pk).exists() and (settled := settle(pk, using=alias)) is not None:
                yield {"settled" if settled else "stuck": 1}


def _reap_messages(alias: str, batch_size: int) -> Iterator[dict[str, int]]:
    while True:
        with transaction.atomic(using=alias, durable=True):
            oldest = _old_messages(alias).select_for_update(skip_locked=True).order_by("processed_at")
            page = list(oldest.values_list("pk", flat=True)[:batch_size])
            ProcessedMessage.objects.using(alias).filter(pk__in=page).delete()
        if not page:
            return
        yield {"messages": len(page)}


def _page(keys: IdempotencyKeyQuerySet, last: tuple[datetime, int] | None, size: int) -> list[tuple[datetime, int]]:
    """Return the next ``size`` keys by creation, which is the order of the index. What was passed over is not met again."""
    if last is not None:
        created_at, pk = last
        keys = keys.filter(Q(created_at__gt=created_at) | Q(created_at=created_at, pk__gt=pk), created_at__gte=created_at)
    return list(keys.order_by("created_at", "pk").values_list("created_at", "pk")[:size])


def _delete(alias: str, pks: list[int]) -> int:
    """Delete these keys and return how many; when some are protected, halve the list until they stand alone, and keep them."""
    if not pks:
        return 0
    try:
        with transaction.atomic(using=alias):
            # Bodies may be large, and the deletion needs none of the columns.
            _, by_model = IdempotencyKey.objects.using(alias).filter(pk__in=pks).only("pk").delete()
            if connections[alias].vendor == "postgresql":
                connections[alias].check_constraints()  # now, not at COMMIT: a constraint of DO_NOTHING fails its key alone
        return by_model.get(IdempotencyKey._meta.label, 0)
    except (ProtectedError, RestrictedError, IntegrityError):
        if len(pks) == 1:
            return 0
        half = len(pks) // 2
        return _delete(alias, pks[:half]) + _delete(alias, pks[half:])
