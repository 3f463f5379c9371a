"""Bulk work: an action of a person on many keys or jobs, which the completers do.

``begin`` stores the work with its rows. ``work_off`` processes the rows in chunks. A chunk is one
transaction: it locks its work, changes rows, writes the log of the admin, deletes the rows from the
work, and counts them. If the process dies, its chunk is rolled back. Other processes skip the work.
"""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core.exceptions import EmptyResultSet
from django.db import IntegrityError, ProgrammingError, connections
from django.db.models import F, Model, Q, QuerySet, TextField, UUIDField, Value
from django.db.models.expressions import RawSQL
from django.db.models.functions import Cast, Now
from django.utils.translation import gettext_noop

from idempotency import interventions, signals
from idempotency._async import FAILURES
from idempotency._bulk_answers import prepare
from idempotency._engine import decisions, events
from idempotency._engine import rows as engine_rows
from idempotency._engine.caught_errors import checked_atomic
from idempotency._engine.errors import connection_lost, exceeded_time_limit
from idempotency._engine.fence import StoredResponse
from idempotency._engine.transactions import durable_transaction
from idempotency._states import KeyState
from idempotency._text import error_text, storable
from idempotency.exceptions import NotReplicated
from idempotency.models import BulkRow, BulkWork, IdempotencyKey, StagedJob

logger = logging.getLogger("idempotency")

#: A chunk ends at the first of these limits. Its keys are locked for that time.
CHUNK_ROWS = 500
CHUNK_SECONDS = 1.0
#: The time of one turn of a completer, and the time after which it looks for new work.
TURN_SECONDS = 1.0
#: The work that a process may continue.
OPEN = Q(finished_at__isnull=True, stopped_at__isnull=True)
#: The reasons why a row is not changed, in English. Pages translate them.
RUNNING, FINISHED = gettext_noop("running now"), gettext_noop("finished")
CHANGED = gettext_noop("changed after the confirmation was shown")
JOB_CHANGED = gettext_noop("running now, or changed after the confirmation was shown")
FAILED = gettext_noop("refused by the database: see the log")

_OF_JOBS: dict[str, Callable[..., int]] = {
    "retry": interventions.retry_jobs,
    "discard": interventions.discard_jobs,
}


def begin(work: BulkWork, rows: QuerySet[Any]) -> bool:
    """Store the work with ``rows``, the keys or jobs that it changes, in their database and order.
    Return whether this call did it: if the work exists, nothing changes."""
    alias, are_keys = rows.db, rows.model is IdempotencyKey
    columns = {
        "work_id": Value(work.pk, UUIDField()),
        "row": Cast("pk", TextField()),
        "seen": F("claim_token") if are_keys else Cast(Value(None), UUIDField()),
        "at": F("recovery_point") if are_keys else Value(""),
        "calls": _calls(alias) if work.answer is not None else Value(""),
    }
    chosen = rows.values_list(*columns.values())
    try:
        with checked_atomic(alias):
            work.save(using=alias, force_insert=True)
            missing = work.expected - work.visited - _insert(chosen, tuple(columns), alias)
            if missing > 0:
                work.unchanged = Counter(work.unchanged) + Counter({CHANGED: missing})
                work.save(using=alias, update_fields=["unchanged"])
    except IntegrityError:
        if BulkWork.objects.using(alias).filter(pk=work.pk).exists():
            return False  # The form was sent twice.
        raise
    return True


def _insert(chosen: QuerySet[Any], columns: tuple[str, ...], alias: str) -> int:
    """Insert the rows of a work; return their number."""
    try:
        sql, parameters = chosen.query.get_compiler(alias).as_sql()
    except EmptyResultSet:
        return 0
    quote_name = connections[alias].ops.quote_name
    names, table = ", ".join(map(quote_name, columns)), quote_name(BulkRow._meta.db_table)
    with connections[alias].cursor() as cursor:
        cursor.execute(f"INSERT INTO {table} ({names}) {sql}", parameters)
        return int(cursor.rowcount)


def _calls(alias: str) -> RawSQL:
    text = decisions.calls_expression(alias, IdempotencyKey._meta.db_table)
    return RawSQL(text, (), output_field=TextField())  # nosec B611  # names and constants


class Turns:
    """The turns of bulk work between the keys that a completer runs."""

    def __init__(self, alias: str) -> None:
        self._alias, self._more, self._due = alias, False, 0.0

    def take(self, stop: Callable[[], bool]) -> bool:
        """Work for TURN_SECONDS, if there is work; return whether more of it is left."""
        if self._more or time.monotonic() >= self._due:
            try:
                self._more = work_off(self._alias, stop=stop)
            except ProgrammingError as error:  # The role lacks a privilege, and completes keys.
                self._more = False
                logger.error("bulk work cannot be done: %s", error)
            self._due = time.monotonic() + TURN_SECONDS
        return self._more


def work_off(
    alias: str, only: uuid.UUID | None = None, *, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Process chunks of all work, or of one, for TURN_SECONDS; return whether this process may
    continue with more. The works take turns."""
    until = time.monotonic() + TURN_SECONDS
    chosen = OPEN if only is None else OPEN & Q(pk=only)
    works = BulkWork.objects.using(alias).filter(chosen).order_by("created_at")
    while sum(_process(pk, alias) for pk in list(works.values_list("pk", flat=True))):
        if stop() or time.monotonic() > until:
            return True
    return False


def _process(pk: uuid.UUID, alias: str) -> bool:
    """Process a chunk; return whether rows were processed. If the chunk fails, stop the work."""
    try:
        return _chunk(pk, alias)
    except FAILURES as error:
        lost, limit = connection_lost(error, alias), exceeded_time_limit(error)
        # With this limit each chunk could fail, and the completer would run no key.
        if (lost and limit != "transaction_timeout") or isinstance(error, NotReplicated):
            raise
        text = storable(error_text(error))
        logger.warning("a chunk of the bulk work %s failed: %s", pk, text)
        _stop(pk, alias, text)
        return False


def _stop(pk: uuid.UUID, alias: str, error: str) -> None:
    BulkWork.objects.using(alias).filter(OPEN, pk=pk).update(stopped_at=Now(), error=error)


def _chunk(pk: uuid.UUID, alias: str) -> bool:
    answers = _prepared(pk, alias)
    with durable_transaction("read committed", using=alias):
        work = _locked(pk, alias)
        if work is None or (work.answer is not None and answers is None):
            return False
        rows = list(BulkRow.objects.using(alias).filter(work=pk).order_by("pk")[:CHUNK_ROWS])
        if answers is not None:  # Another process may have done these rows.
            rows = [row for row in rows if row.row in answers]
        decided = _decide(work, rows, answers or {}, alias)
        changed = [target for _, target, reason in decided if not reason]
        _log(work, changed)
        visited = [row.pk for row, _, _ in decided]
        BulkRow.objects.using(alias).filter(pk__in=visited).delete()
        done = not BulkRow.objects.using(alias).filter(work=pk).exists()
        left = Counter(work.unchanged) + Counter(reason for _, _, reason in decided if reason)
        progress = {"done": work.done + len(changed), "unchanged": left, "worked_at": Now()}
        works = BulkWork.objects.using(alias).filter(pk=pk)
        works.update(**progress, finished_at=Now() if done else None)
    for key in changed if answers is not None else ():
        events.emit(signals.key_finished, engine_rows.read(key.pk, using=alias), None)
    if done:
        text = "bulk work %s (%s, by %s) is finished: %d of %d rows changed"
        logger.warning(text, pk, work.action, work.by, progress["done"], work.expected)
    return bool(visited)


def _decide(
    work: BulkWork, rows: list[BulkRow], answers: dict[str, StoredResponse | str], alias: str
) -> list[tuple[BulkRow, Any, str]]:
    """Change the keys or jobs of these rows for CHUNK_SECONDS. Return each row that was processed,
    its key or job, and the reason why that was not changed. Rows whose key another transaction has
    locked are left for a later chunk."""
    targets, decided = _targets(work, rows, alias), []
    until = time.monotonic() + CHUNK_SECONDS
    for row in rows:
        if (target := targets.get(row.row)) is None:
            continue
        decided.append((row, target, _act(work, row, answers.get(row.row, ""), alias)))
        if time.monotonic() > until:
            break
    return decided


def _locked(pk: uuid.UUID, alias: str) -> BulkWork | None:
    """Lock the row of the work. Return None if another process has it, or if the work is over."""
    works = BulkWork.objects.using(alias).filter(OPEN, pk=pk)
    if connections[alias].vendor != "postgresql":
        works.update(worked_at=Now())  # takes the write lock
    return works.select_for_update(skip_locked=True).first()


def _targets(work: BulkWork, rows: list[BulkRow], alias: str) -> dict[str, Any]:
    """Lock the keys or jobs of ``rows``; return them by id. Those that another transaction has
    locked are missing. A deleted one is an empty text."""
    model: type[Model] = StagedJob if work.action in _OF_JOBS else IdempotencyKey
    ids = {model._meta.pk.to_python(row.row): row.row for row in rows}
    found = model._base_manager.using(alias).filter(pk__in=ids)
    locked = found.select_for_update(skip_locked=True).order_by("pk")
    locked = locked.only("pk") if model is IdempotencyKey else locked
    targets: dict[str, Any] = {ids[target.pk]: target for target in locked}
    if len(targets) < len(ids):
        there = {ids[pk] for pk in found.values_list("pk", flat=True)}
        targets |= dict.fromkeys(set(ids.values()) - there, "")
    return targets


def _prepared(pk: uuid.UUID, alias: str) -> dict[str, StoredResponse | str] | None:
    """Return the answers of the next rows, or why they get none; None for another action."""
    works = BulkWork.objects.using(alias).filter(OPEN, pk=pk, answer__isnull=False)
    if (work := works.first()) is None or work.answer is None:
        return None
    rows = list(BulkRow.objects.using(alias).filter(work=pk).order_by("pk")[:CHUNK_ROWS])
    return prepare(work.answer, rows, alias, CHUNK_SECONDS, CHANGED, partial(_stop, pk, alias))


def _act(work: BulkWork, row: BulkRow, answer: StoredResponse | str, alias: str) -> str:
    """Change a row if it is as it was at the confirmation. Return "", or why it was not changed. If
    the database refuses the row, the other rows are changed without it."""
    try:
        with checked_atomic(alias):
            changed, reason = _change(work, row, answer, alias)
    except FAILURES as error:
        if connection_lost(error, alias):
            raise
        text = "the bulk work %s left row %s out: %s"
        said = partial(logger.warning, text, work.pk, row.row, error_text(error))
        events.log_committed(said, using=alias)
        return FAILED
    return "" if changed else reason or _why_not(row, alias)


def _change(
    work: BulkWork, row: BulkRow, answer: StoredResponse | str, alias: str
) -> tuple[bool, str]:
    """Change a row; return whether it was changed, and the reason if it is not that of its key."""
    if work.action in _OF_JOBS:
        failed = StagedJob.objects.using(alias).filter(pk=row.row, failed_at__lte=work.created_at)
        act = _OF_JOBS[work.action]
        return failed.exists() and bool(act([uuid.UUID(row.row)], using=alias)), JOB_CHANGED
    if isinstance(answer, str) and answer:
        return False, answer
    decision = decisions.Decision(int(row.row), row.seen, row.at, work.by, work.note, alias)
    if isinstance(answer, StoredResponse):
        return decisions.answer(decision, answer, calls=row.calls), ""
    return decisions.decide(work.action, decision), ""


def _why_not(row: BulkRow, alias: str) -> str:
    keys: Any = IdempotencyKey.objects.using(alias).filter(pk=row.row)
    now = keys.with_state().values_list("state", flat=True).first()
    return {KeyState.IN_FLIGHT: RUNNING, KeyState.FINISHED: FINISHED}.get(now, CHANGED)


def _log(work: BulkWork, changed: list[Any]) -> None:
    """Write an entry of the admin log for each changed row, if the person still exists."""
    if not changed or not apps.is_installed("django.contrib.admin"):
        return
    entries: Any = apps.get_model("admin", "LogEntry").objects
    if get_user_model()._base_manager.using(entries.db).filter(pk=work.user_id).exists():
        entries.log_actions(work.user_id, changed, work.log_flag, work.log_message)
