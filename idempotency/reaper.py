"""The reaper: deletes keys after their retention, and settles overdue unfinished keys or marks them
as stuck.

It deletes through the ORM, because Django implements SET_NULL and the other actions of a project's
foreign keys.
Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" (the reaper).
"""

import logging
import time
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

from django.db import connections, models, router, transaction
from django.db.models import Case, Exists, OuterRef, Q, QuerySet, UUIDField, Value, When
from django.db.models.functions import Cast, Now, Replace
from django.db.utils import Error, IntegrityError, InterfaceError, OperationalError

from idempotency._abandonment import settle
from idempotency._engine.aliases import fields_elsewhere
from idempotency._engine.caught_errors import checked_atomic, refuse_rollback
from idempotency._engine.errors import missing_migration, sqlstate_of
from idempotency._engine.outer_transactions import require_no_transaction
from idempotency._engine.transactions import durable_transaction
from idempotency._groups import JobGroup
from idempotency._states import held
from idempotency._text import error_text, summary
from idempotency.exceptions import NotReplicated
from idempotency.inbox import STAGED_JOBS, took_effect
from idempotency.models import BulkWork, IdempotencyKey, ProcessedMessage, StagedJob, TrafficCount

logger = logging.getLogger("idempotency")

#: The time for which a second delivery of a message is recognised. Senders stop retrying earlier.
MESSAGE_RETENTION = timedelta(days=30)
#: The time for which a group without jobs keeps its last position.
GROUP_RETENTION = timedelta(days=1)
#: The dashboard shows the traffic of seven days.
TRAFFIC_RETENTION_MINUTES = 8 * 24 * 60
#: The time for which the admin shows bulk work that is finished, or can resume stopped work.
BULK_WORK_RETENTION = timedelta(days=8)
#: After a batch the reaper sleeps for this multiple of its duration, to limit the load on claims.
#: It can still delete forty million keys a day; see ``python -m benchmarks.reaper``.
RESTS_FOR_A_BATCH = 19
#: The SQLSTATEs of a missing table and of a missing column.
_MISSING = ("42P01", "42703")
#: The refusal of each key, because rows of a foreign key are in another database.
_ELSEWHERE = "rows elsewhere"
#: The SQLSTATEs of ``lock_timeout`` and of ``statement_timeout``. They may concern single keys, for
#: which a trigger is slow, or every key, while a table is locked.
_TIME_LIMITS = ("55P03", "57014")
#: The number of keys of a batch that may meet a time limit. The batch is then searched no further,
#: because each attempt waits as long again, and all keys that were to be deleted together are kept.
_MOST_WAITS = 3
#: A batch may have waited for locks, which is no load.
_LONGEST_REST_SECONDS = 60.0
#: The interval at which a sleeping reaper checks for SIGTERM.
_ASK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ReapPass:
    """The counts of one pass.

    Keys and messages that were deleted, expired keys that could not be deleted (protected), and
    overdue keys that were settled or became stuck.
    """

    deleted: int = 0
    protected: int = 0
    settled: int = 0
    stuck: int = 0
    messages: int = 0


def reap_once(
    *,
    batch_size: int = 1000,
    dry_run: bool = False,
    using: str | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[ReapPass], None] = lambda so_far: None,
) -> ReapPass:
    """Delete expired rows and settle overdue keys. Several reapers may run concurrently.

    Each batch is deleted in one transaction, followed by a pause. A pass deletes finished and
    refused keys after the retention, messages of the inbox after 30 days, counts of requests and
    bulk work after 8 days, and groups without jobs after a day. It keeps the message of a job that
    is still staged, and deletes a failed job that took effect later. The ``on_delete`` action of
    each foreign key to IdempotencyKey is applied. A key that cannot be deleted is kept, for example
    because a row or a trigger protects it; the reason is logged. If time limits prevent the
    deletion of a whole batch, another transaction probably locks a table: the pass ends, and the
    next pass deletes the later keys.

    Unfinished keys that are not refused are overdue after RETENTION_HOURS, which count from their
    creation or from the last hand-back. If no run holds an overdue key, ``on_abandon`` of its view
    settles the key. If the view has no ``on_abandon``, or if it fails, the key becomes stuck.

    - ``dry_run``: only count.
    - ``stop``: called before each batch and during the pauses; True ends the pass.
    - ``progress``: called with the counts after each batch.

    Raises RuntimeError in a transaction, and if autocommit is off.
    """
    alias = using or router.db_for_write(IdempotencyKey)
    keys = IdempotencyKey.objects.using(alias)
    if dry_run:
        deleted, messages = keys.expired().exclude(held()).count(), _old_messages(alias).count()
        return ReapPass(deleted=deleted, stuck=keys.overdue().count(), messages=messages)
    require_no_transaction(alias)  # Its rollback would forget that ``on_abandon`` was begun.
    counts: Counter[str] = Counter()
    # First the keys that clients wait for.
    batches = chain(
        _settle_overdue(alias, batch_size),
        _reap_expired(alias, batch_size),
        _purge(_old_messages(alias), batch_size, "processed_at", "messages"),
        _delete_done_jobs(alias, batch_size),
        _purge(_unused_groups(alias), batch_size, "pk"),
    )
    while not stop():
        start = time.monotonic()
        if (batch := next(batches, None)) is None:
            break
        took = time.monotonic() - start
        counts.update(batch)
        progress(ReapPass(**counts))
        if not batch.keys() & {"settled", "stuck"}:
            _rest(min(RESTS_FOR_A_BATCH * took, _LONGEST_REST_SECONDS), stop, alias)
    if not stop():  # At most some thirty rows a minute: one statement deletes them.
        minute = time.time() // 60 - TRAFFIC_RETENTION_MINUTES
        TrafficCount.objects.using(alias).filter(minute__lt=minute).delete()
        old = Q(finished_at__lt=(at := Now() - BULK_WORK_RETENTION)) | Q(stopped_at__lt=at)
        BulkWork.objects.using(alias).filter(old).delete()
    return ReapPass(**counts)


def _rest(seconds: float, stop: Callable[[], bool], alias: str) -> None:
    rested = time.monotonic() + seconds
    while (left := rested - time.monotonic()) > 0 and not stop():
        time.sleep(min(left, _ASK_SECONDS))
    if seconds > _ASK_SECONDS and not connections[alias].in_atomic_block:
        connections[alias].close()  # The server may have ended a session that was idle for long.


def _old_messages(alias: str) -> QuerySet[ProcessedMessage]:
    old = ProcessedMessage.objects.using(alias).filter(processed_at__lt=Now() - MESSAGE_RETENTION)
    # A staged job may be handed over again, so its message must not be forgotten. Its primary key
    # is compared: without an index, each message would read all staged jobs.
    pk = Cast(Replace("message_id", Value("-")), UUIDField())  # SQLite has UUIDs without hyphens.
    jobs = StagedJob.objects.using(alias).filter(pk=OuterRef("idempotency_job"))
    job = Case(When(message_id__regex="^([0-9a-f]-?){32}$", then=pk))
    return old.annotate(idempotency_job=job).exclude(Exists(jobs), source=STAGED_JOBS)


def _unused_groups(alias: str) -> QuerySet[JobGroup]:
    """Return the groups without jobs, except those that were used lately. A transaction that stages
    a job holds the lock of its group. If it ends while the group is being locked, it has changed
    ``used_at``, which is then read again."""
    staged = StagedJob.objects.filter(group=OuterRef("name"))
    groups = JobGroup.objects.using(alias)
    return groups.filter(~Exists(staged), used_at__lt=Now() - GROUP_RETENTION)


def _reap_expired(alias: str, batch_size: int) -> Iterator[dict[str, int]]:
    refusals: Counter[object] = Counter()
    expired = IdempotencyKey.objects.using(alias).expired()
    for page in _pages(expired, batch_size, by="expires_at"):
        refusals[_TIME_LIMITS] = 0
        counts = _delete(page, refusals, alias)
        yield counts
        waited = not counts["deleted"] and refusals[_TIME_LIMITS] >= _MOST_WAITS
        if waited or refusals[_ELSEWHERE]:
            # A table seems to be locked, or is in another database. Other batches would fail too.
            return


def _settle_overdue(alias: str, batch_size: int) -> Iterator[dict[str, int]]:
    overdue = IdempotencyKey.objects.using(alias).overdue()
    for page in _pages(overdue, batch_size, by="created_at"):
        for pk in page:
            # It may have been handed back meanwhile.
            if overdue.filter(pk=pk).exists() and (settled := settle(pk, using=alias)) is not None:
                yield {"settled" if settled else "stuck": 1}


def _purge(rows: QuerySet[Any], size: int, by: str, name: str = "") -> Iterator[dict[str, int]]:
    """Delete ``rows`` and count them as ``name``. Locked rows are skipped."""
    for page in _pages(rows, size, by):
        with checked_atomic(rows.db, durable=True):
            locked = rows.filter(pk__in=page).select_for_update(skip_locked=True)
            ids = list(locked.values_list("pk", flat=True))
            _, by_model = rows.model._base_manager.using(rows.db).filter(pk__in=ids).delete()
        yield {name: by_model.get(rows.model._meta.label, 0)} if name else {}


def _delete_done_jobs(alias: str, batch_size: int) -> Iterator[dict[str, int]]:
    """Delete the failed jobs that took effect later, for example because no worker ran for days."""
    failed = StagedJob.objects.using(alias).filter(failed_at__isnull=False)
    for page in _pages(failed, batch_size, by="failed_at"):
        if done := took_effect(STAGED_JOBS, list(map(str, page)), using=alias):
            with checked_atomic(alias):
                failed.filter(pk__in=done).delete()
            text = "%d staged jobs that had failed took effect later, and are deleted"
            logger.info(text, len(done))
        yield {}


def _pages(rows: QuerySet[Any], size: int, by: str) -> Iterator[list[Any]]:
    """Yield the primary keys of ``rows`` in the order of the index of ``by``, ``size`` at once."""
    later, before = rows, list[Any]()
    # SQLite compares times as texts, so the last row may come again.
    while (page := list(later.order_by(by, "pk").values_list(by, "pk")[:size])) and page != before:
        yield [pk for _, pk in page]
        before = page
        at, last = page[-1]
        behind = Q(**{f"{by}__gt": at}) | Q(**{by: at, "pk__gt": last})
        later = rows.filter(behind, **{f"{by}__gte": at})


def _delete(pks: list[int], refusals: Counter[object], alias: str) -> Counter[str]:
    """Delete the expired keys of ``pks`` in one transaction, and count them. If a key cannot be
    deleted, halve the list until this key is found, and keep the key. A trigger or a signal
    receiver of the project may raise any error."""
    keys, locked = IdempotencyKey.objects.using(alias), False
    committed: list[bool] = []
    try:
        with durable_transaction(None, using=alias):
            transaction.on_commit(partial(committed.append, True), using=alias)  # the first hook
            # If an expired key has a lock, its request is running, even if its times are old.
            expired = keys.expired().exclude(held()).select_for_update(skip_locked=True)
            pks, locked = list(expired.filter(pk__in=pks).values_list("pk", flat=True)), True
            # Load no other column, because bodies may be large.
            _, by_model = keys.filter(pk__in=pks).only("pk").delete()
            refuse_rollback(alias)
            if connections[alias].vendor == "postgresql":
                # A transaction of a TestCase has no COMMIT that would do it.
                connections[alias].check_constraints()
            return Counter(deleted=by_model.get(IdempotencyKey._meta.label, 0))
    except (Exception, CancelledError) as error:
        if committed or not locked:
            raise
        if _concerns_rows_elsewhere(error, alias):
            refusals[_ELSEWHERE] += 1
            return Counter(protected=len(pks))
        if _concerns_all(error):
            raise
        waited = _sqlstate(error) in _TIME_LIMITS
        if len(pks) > 1 and not (waited and refusals[_TIME_LIMITS] >= _MOST_WAITS):
            half = len(pks) // 2
            return _delete(pks[:half], refusals, alias) + _delete(pks[half:], refusals, alias)
        if pks:
            refusals[_TIME_LIMITS] += waited
            _log_refusal(pks[0], error, refusals)
        # With no key left, the error belongs to the caller's transaction.
        return Counter(protected=len(pks))


def _concerns_rows_elsewhere(error: BaseException, alias: str) -> bool:
    """Return whether the deletion failed because the router keeps the rows of a table in another
    database, and the table is missing here. If so, log it."""
    is_missing = isinstance(error, Error) and missing_migration(error, alias) is not None
    fields = fields_elsewhere(alias) if is_missing else []
    if fields:
        logger.warning(
            "no key can be deleted from the database %r, because the rows of %s are in another"
            " database: %s",
            *(alias, ", ".join(map(str, fields)), summary(error_text(error))),
        )
    return bool(fields)


def _log_refusal(pk: int, error: BaseException, refusals: Counter[object]) -> None:
    """Log the first refusal of its kind in a pass."""
    kind = _sqlstate(error) or type(error)
    refusals[kind] += 1
    if refusals[kind] == 1:
        protection = models.ProtectedError | models.RestrictedError | IntegrityError
        by_design = isinstance(error, protection)
        level = logging.INFO if by_design else logging.WARNING
        trace = not by_design and not isinstance(error, Error)
        text = "the key with the id %s cannot be deleted: %s"
        logger.log(level, text, pk, summary(error_text(error)), exc_info=trace)


def _concerns_all(error: BaseException) -> bool:
    """Return whether the deletion of every key would fail with this error: the database is lost, or
    a table or column is missing."""
    state = _sqlstate(error)
    lost = isinstance(error, OperationalError | InterfaceError | NotReplicated)
    return (lost and state not in _TIME_LIMITS) or state in _MISSING


def _sqlstate(error: BaseException) -> str | None:
    return sqlstate_of(error) if isinstance(error, Error) else None
