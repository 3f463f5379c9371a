"""The results of hand-overs that are written in transactions of their own: those of claims, and
those of a transaction that was lost.

Results that cannot be written stay in memory. Before they are written, the process hands no job of
their database over. If only the row of a job is locked, the process leaves out this job alone.
"""

import time
from collections import Counter
from uuid import UUID

from django.db import Error

from idempotency._batch import Batch, Claim, Outcome, Release, first_statement, seconds_of_batch
from idempotency._boundary import TransactionBroken, drop_unusable_connections
from idempotency._engine.errors import connection_lost, sqlstate_of
from idempotency._engine.transactions import durable_transaction
from idempotency._outcomes import Log, write
from idempotency._text import error_text
from idempotency.backends import NotDeleted, NotOffered, OfferAgain, Refusal, TookEffect
from idempotency.models import StagedJob

#: The time for which the end of a pass waits for rows that other transactions have locked.
LOCKED_SECONDS = 1
#: The SQLSTATEs of the time limits that end a transaction.
_TIME_LIMITS = ("25P03", "25P04")

#: By database: results that could not be written yet.
_left: dict[str, list[Outcome]] = {}


def write_after_rollback(batch: Batch, error: BaseException, log: Log) -> Counter[str]:
    """Write what is still true after the transaction of a batch was rolled back. At least one of
    the jobs that may be handed over again is refused, so that no job is handed over without end."""
    error = error.__cause__ or error if isinstance(error, TransactionBroken) else error
    outcomes: list[Outcome] = [
        (job, batch.lasting[job.pk]) for job in batch.offered if job.pk in batch.lasting
    ]
    undone = [job for job in batch.offered if job.pk not in batch.lasting]
    if undone and not batch.culprit_is_known:
        outcomes.append((undone.pop(0), Refusal(error)))
    text = (
        "a transaction was rolled back after the hand-over of its staged jobs, %d of which are"
        " handed over again: %s"
    )
    log.add("rolled back", type(error).__name__, text, len(undone), error_text(error))
    return _write_apart(batch.alias, outcomes, log)


def write_claim(claim: Claim, log: Log) -> Counter[str]:
    """Write the results of a claim."""
    drop_unusable_connections()  # The server may have ended the idle session meanwhile.
    return _write_apart(claim.alias, claim.outcomes(), log)


def _write_apart(alias: str, outcomes: list[Outcome], log: Log) -> Counter[str]:
    _left[alias] = _left.pop(alias, []) + outcomes
    return write_left(alias, log)


def write_left(alias: str, log: Log) -> Counter[str]:
    """Write the results that could not be written before, in transactions of their own. Those of
    rows that are locked stay in memory.

    Raises the error of the database if that is not possible; the results then stay in memory.
    """
    counts: Counter[str] = Counter()
    left, locked = _left.pop(alias, []), list[Outcome]()
    size = len(left)
    try:
        while left:
            try:
                written, of_locked = _write_own(alias, left[:size], log)
                counts, locked, left = counts + written, locked + of_locked, left[size:]
            except Error as error:
                if connection_lost(error, alias) and sqlstate_of(error) not in _TIME_LIMITS:
                    raise
                if size > 1:
                    size = len(left[:size]) // 2 or 1
                    continue
                job, result = left[0]
                match result:
                    case BaseException() | Refusal():
                        raise
                    case OfferAgain():
                        left[0] = job, Refusal(error)
                    case NotOffered() | Release():
                        del left[0]  # The broker does not have the job, which will be due.
                    case None | TookEffect():
                        left[0] = job, NotDeleted.by(error)
    finally:
        if left or locked:
            _left[alias] = left + locked + _left.pop(alias, [])
        log.write()
    return counts


def write_locked(alias: str, log: Log) -> Counter[str]:
    """Write the results that are left. Wait LOCKED_SECONDS for rows that are locked."""
    counts, until = write_left(alias, log), time.monotonic() + LOCKED_SECONDS
    while alias in _left and time.monotonic() < until:
        time.sleep(0.05)
        counts += write_left(alias, log)
    return counts


def unwritten(alias: str) -> list[UUID]:
    """Return the ids of the jobs whose results are not written yet."""
    return [job.pk for job, _ in _left.get(alias, [])]


def _write_own(alias: str, outcomes: list[Outcome], log: Log) -> tuple[Counter[str], list[Outcome]]:
    """Write results in a transaction, without those of jobs that another enqueuer has claimed or
    written meanwhile: each of these writes changes ``run_at``. Return also the results that must be
    written later, because their rows are locked."""
    first, begun = first_statement(), time.monotonic()
    with durable_transaction("read committed", using=alias, first=first):
        deadline = begun + seconds_of_batch(alias, first)
        rows = StagedJob.objects.using(alias).filter(
            pk__in=[job.pk for job, _ in outcomes], failed_at__isnull=True
        )
        found = dict(rows.select_for_update(skip_locked=True).values_list("pk", "run_at"))
        own = [(job, result) for job, result in outcomes if found.get(job.pk) == job.run_at]
        missing = [(job, result) for job, result in outcomes if job.pk not in found]
        held = dict(rows.values_list("pk", "run_at")) if missing else {}
        locked = [(job, result) for job, result in missing if held.get(job.pk) == job.run_at]
        if lost := len(outcomes) - len(own) - len(locked):
            text = (
                "%d results of hand-overs are not written, because their jobs were claimed, changed"
                " or deleted meanwhile"
            )
            log.add("lost", alias, text, lost)
        return write(alias, own, deadline, log), locked
