"""Write the results of hand-overs: delete the jobs that were taken, and postpone the others with
their errors.

A result that is not written would make the next pass hand the job over again. Therefore a job whose
row cannot be deleted gets the error NotDeleted, and is not handed over again.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import DatabaseError, connections
from django.db.models import BooleanField, Case, DateTimeField, F, Func, QuerySet, Value, When
from django.db.models.functions import Now

from idempotency._batch import Outcome, Release
from idempotency._engine.caught_errors import checked_atomic
from idempotency._text import error_text, storable
from idempotency.backends import (
    MAX_ATTEMPTS,
    BrokerUnavailable,
    NoEffect,
    NotDeleted,
    NotOffered,
    OfferAgain,
    Refusal,
    TookEffect,
)
from idempotency.exceptions import JobNotAllowed
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")

#: The wait after the first refusal. It doubles with each refusal, up to an hour; ten refusals take
#: 1.4 hours.
BACKOFF_SECONDS = 10
#: The limit for a job refused with JobNotAllowed. These refusals take three days, so that a Monday
#: deploy can add the function.
NAME_MAX_ATTEMPTS = 81


class Log:
    """The lines of one pass, each once. They are logged when no transaction is open. A handler of
    the log may write to this database, and an error that it hides would roll back the results."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], tuple[int, str, tuple[object, ...]]] = {}
        self._logged: set[tuple[str, str]] = set()

    def add(
        self, kind: str, about: str, text: str, *values: object, level: int = logging.WARNING
    ) -> None:
        if (kind, about) not in self._logged:
            self._lines.setdefault((kind, about), (level, text, values))

    def write(self) -> None:
        lines, self._lines = self._lines, {}
        self._logged.update(lines)
        for level, text, values in lines.values():
            # A handler that raises, perhaps because the database is lost, changes nothing.
            with suppress(Exception):
                logger.log(level, text, *values)


def was_handed_over(job: StagedJob) -> bool:
    """Return whether the broker has the job, so that only its row must be deleted."""
    return job.last_error.startswith(f"{NotDeleted.__name__}:")


def write(alias: str, outcomes: Sequence[Outcome], deadline: float, log: Log) -> Counter[str]:
    """Write the results in the open transaction. Return the counts of EnqueuePass."""
    counts: Counter[str] = Counter()
    taken: list[StagedJob] = []
    refused: list[tuple[StagedJob, BaseException]] = []
    later: dict[tuple[float, bool], list[StagedJob]] = defaultdict(list)
    without_effect: dict[float, list[StagedJob]] = defaultdict(list)
    released: dict[UUID, datetime] = {}
    for job, result in outcomes:
        match result:
            case None:
                taken.append(job)
                counts["handed_over"] += 1
            case TookEffect():
                taken.append(job)
            case OfferAgain(seconds):
                # The first check for the effect of a job of a group is a second later.
                later[1 if job.group else seconds, bool(job.group)].append(job)
                counts["handed_over"] += 1
            case NotOffered(0) | BrokerUnavailable():
                pass  # It is still due.
            case Release(run_at):
                released[job.id] = run_at
            case NotOffered(seconds):
                without_effect[seconds].append(job)
            case Refusal(error):
                refused.append((job, error))
            case error:
                refused.append((job, error))
    refused += _delete(alias, taken, deadline)
    for (seconds, of_group), jobs in later.items():
        again: dict[str, Any] = {"handed_over_at": Now()} if of_group else {}
        again |= {"hand_overs": F("hand_overs") + 1, "refusals": 0, "last_error": ""}
        _update(alias, jobs, **again, run_at=Now() + timedelta(seconds=seconds))
    for seconds, jobs in without_effect.items():
        _update(alias, jobs, run_at=Now() + timedelta(seconds=seconds))
    if released:
        jobs = [job for job, _ in outcomes if job.id in released]
        times = (When(pk=pk, then=Value(run_at)) for pk, run_at in released.items())
        _update(alias, jobs, run_at=Case(*times, output_field=DateTimeField()))
    return counts + _refuse(alias, refused, log)


def _delete(
    alias: str, jobs: list[StagedJob], deadline: float
) -> list[tuple[StagedJob, BaseException]]:
    """Delete the rows of jobs. Return those that could not be deleted, each with an error. A row
    whose deletion has failed before is deleted separately; after the deadline it stays due."""
    failed = _delete_together(alias, [job for job in jobs if not was_handed_over(job)])
    for job in jobs:
        if was_handed_over(job) and time.monotonic() <= deadline:
            failed += _delete_together(alias, [job])
    return failed


def _delete_together(alias: str, jobs: list[StagedJob]) -> list[tuple[StagedJob, BaseException]]:
    if not jobs:
        return []
    try:
        with checked_atomic(alias):
            deleted = _rows(alias, jobs).delete()[1].get(StagedJob._meta.label, 0)
            _require_all_rows(deleted, len(jobs), "deleted")
    except Exception as error:  # also from a receiver of a signal
        if connections[alias].needs_rollback:
            raise
        return [(job, NotDeleted.by(error)) for job in jobs]
    return []


def _rows(alias: str, jobs: Iterable[StagedJob]) -> QuerySet[StagedJob]:
    ids = [job.id for job in jobs]
    rows = StagedJob.objects.using(alias)
    if connections[alias].vendor != "postgresql":
        return rows.filter(pk__in=ids)
    return rows.filter(_OneOf("id", Value(ids)))


class _OneOf(Func):
    """Whether a column has a value of an array, which is faster than a thousand parameters."""

    template = "%(expressions)s)"
    arg_joiner = " = ANY("
    output_field = BooleanField()


def _refuse(alias: str, refused: list[tuple[StagedJob, BaseException]], log: Log) -> Counter[str]:
    """Write refusals: postpone each job, or mark it as failed. Return their counts."""
    counts: Counter[str] = Counter()
    groups: dict[tuple[str, int, bool], list[StagedJob]] = defaultdict(list)
    for job, error in refused:
        refusals = _refusals(job, error)
        most = NAME_MAX_ATTEMPTS if isinstance(error, JobNotAllowed) else MAX_ATTEMPTS
        groups[
            storable(error_text(error)), refusals, refusals >= most or isinstance(error, NoEffect)
        ].append(job)
    for (text, refusals, failed), jobs in groups.items():
        wait = min(BACKOFF_SECONDS * 2 ** max(0, refusals - 1), 3600)
        change = {"failed_at": Now()} if failed else {"run_at": Now() + timedelta(seconds=wait)}
        _update(alias, jobs, refusals=refusals, last_error=text, **change)
        counts["failed" if failed else "refused"] += len(jobs)
        for job in jobs:
            if failed:
                line = "staged job %s (%s) has failed: %s"
                values = job.id, job.label, text
                log.add("failed", str(job.id), line, *values, level=logging.ERROR)
            elif refusals == 1:
                # The job leaves the backlog for hours or days. One error may concern many jobs.
                about = f"{job.label}: {text.partition(chr(10))[0]}"
                warning = "staged job %s (%s) was refused, and is offered again in %d s: %s"
                log.add("refused", about, warning, job.id, job.label, wait, text)
    return counts


def _update(alias: str, jobs: list[StagedJob], **change: Any) -> None:
    changed = _rows(alias, jobs).update(**change)
    _require_all_rows(changed, len(jobs), "changed")


def _require_all_rows(changed: int, expected: int, done: str) -> None:
    """Raise DatabaseError if a statement has silently left rows out, which would be handed over
    again."""
    if changed < expected:
        raise DatabaseError(
            f"{expected - changed} of {expected} rows were not {done}. Row-level security, a rule"
            " or a trigger may prevent it."
        )


def _refusals(job: StagedJob, error: BaseException) -> int:
    """Return the number of refusals of a job, with this one."""
    if isinstance(error, NoEffect):
        return job.refusals
    if not isinstance(error, JobNotAllowed) and job.last_error.startswith(
        f"{JobNotAllowed.__name__}:"
    ):
        return 1  # The refusals before had a higher limit.
    return job.refusals + 1
