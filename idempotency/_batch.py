"""One batch of the enqueuer: its transaction, its jobs, and its limits of time and memory."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DateTimeField, F, Func, JSONField, Q, QuerySet, TextField
from django.db.models.functions import Cast, Now

from idempotency import backends, conf
from idempotency._engine import limits
from idempotency._engine.transactions import First
from idempotency._groups import IN_TURN
from idempotency._hidden import Hidden
from idempotency.models import StagedJob

#: The condition of jobs that are due, if no earlier job of their group holds them.
DUE = Q(failed_at__isnull=True, run_at__lte=Now())
#: The arguments of the jobs of a batch, as JSON. A batch has at least one job, whatever its size.
BATCH_BYTES = 16 * 1024 * 1024
#: The enqueuer hands jobs over for this part of a time limit of its transaction. The rest is for
#: the last hand-over and COMMIT.
_PART_OF_LIMIT = 0.5
#: The longest time for which the jobs of a lease are handed over before those of other queues.
TURN_SECONDS = 5
#: The number of jobs of a claim, if the last turn of the queue had no result, and of the first one.
#: Other claims have as many as a turn took.
FIRST_CLAIM = 10
LONGEST_LEASE_SECONDS = 86_400

#: By database and queue: the number of jobs of the next claim; 0 after a turn without a result.
claim_sizes: dict[tuple[str, str], int] = {}


@dataclass(slots=True)
class Batch:
    """The jobs of one transaction, and the results of their hand-overs."""

    alias: str
    deadline: float = 0.0
    jobs: list[StagedJob] = field(default_factory=list)
    #: The number of rows that were read and locked. Those that are not in ``jobs`` would exceed
    #: BATCH_BYTES.
    locked: int = 0
    #: The number of jobs that stay due for a later claim.
    left_to_claims: int = 0
    results: backends.Results = field(default_factory=dict)
    #: The results that hold even if the transaction is rolled back.
    lasting: backends.Results = field(default_factory=dict)
    #: The jobs that were given to a backend, in this batch or before.
    offered: list[StagedJob] = field(default_factory=list)
    #: Whether ``lasting`` has a refusal of the job whose hand-over broke the transaction.
    culprit_is_known: bool = False
    #: The jobs that are handed over after COMMIT.
    claim: "Claim | None" = None

    def time_is_up(self) -> bool:
        return time.monotonic() > self.deadline


@dataclass(frozen=True, slots=True)
class Release:
    """The job was claimed and not offered. It is due since ``run_at``, as before the claim."""

    run_at: datetime


Outcome: TypeAlias = tuple[StagedJob, backends.HandOverResult | Release | None]


@dataclass(slots=True)
class Claim(Batch):
    """Jobs of one queue that a process holds by a lease, without a transaction: no process hands
    them over before the end of the lease, which is their ``run_at``.

    The end is also the fencing token. A claim needs a ``run_at`` in the past and writes a later
    one, so a process whose ``run_at`` is no longer that of the row has lost the job.
    """

    queue: str = ""
    lease_seconds: float = 0.0
    #: The times since which the jobs were due.
    due_since: dict[UUID, datetime] = field(default_factory=dict)
    #: Whether jobs of the queue had a result in its last turn.
    was_available: bool = False

    def begin(self, begun: float) -> None:
        """Read the ends of the leases, which were written after ``begun``, a value of
        time.monotonic()."""
        rows = StagedJob.objects.using(self.alias).filter(pk__in=list(self.due_since))
        ends = dict(rows.values_list("pk", "run_at"))
        for job in self.jobs:
            job.run_at = ends[job.pk]
        self.deadline = begun + min(TURN_SECONDS, self.lease_seconds * _PART_OF_LIMIT)

    def outcomes(self) -> list[Outcome]:
        """Return the results. The next claim of the queue has as many jobs as were offered now; if
        these were all, twice as many, or half as many after the end of the turn.

        If the turn ended after one job, for which the broker was unavailable, no other job can tell
        whether the job is the cause. The job is then refused if the turn before had results.
        """
        outcomes: list[Outcome] = []
        unavailable: list[tuple[StagedJob, backends.BrokerUnavailable]] = []
        for job in self.jobs:
            match result := self.lasting.get(job.pk, backends.NotOffered()):
                case backends.NotOffered(0) | backends.BrokerUnavailable():
                    outcomes.append((job, Release(self.due_since[job.pk])))
                    if isinstance(result, backends.BrokerUnavailable):
                        unavailable.append((job, result))
                case _:
                    outcomes.append((job, result))
        size = sum(not isinstance(result, Release) for _, result in outcomes)
        if not size and len(unavailable) == 1 and self.was_available:
            ((job, error),) = unavailable
            outcomes[self.jobs.index(job)] = job, backends.Refusal(error)
        elif size == len(outcomes):
            size = max(1, size // 2) if self.time_is_up() else 2 * size
        claim_sizes[self.alias, self.queue] = size
        return outcomes


def claim(batch: Batch, queue: str, jobs: Sequence[StagedJob], seconds: Any) -> None:
    """Claim jobs by a lease, which the results of the batch write. A batch has the claim of one
    queue, whose turn then comes; the jobs of other such queues stay due."""
    if not isinstance(seconds, int | float) or not 1 <= seconds <= LONGEST_LEASE_SECONDS:
        range_ = f"a number of seconds from 1 to {LONGEST_LEASE_SECONDS}"
        wrong = ValueError(f"lease_seconds of the backend must be {range_}, not {seconds!r}.")
        batch.results |= dict.fromkeys((job.pk for job in jobs), wrong)
        return
    batch.left_to_claims += len(jobs)
    if batch.claim is None:
        if size := claim_sizes.get((batch.alias, queue), 0):
            claimed = list(jobs[:size])
        else:
            # The first jobs may be those for which the broker is unavailable.
            claimed = random.sample(jobs, min(FIRST_CLAIM, len(jobs)))  # nosec B311  # no secret
        batch.left_to_claims -= len(claimed)
        since = {job.pk: job.run_at for job in claimed}
        batch.claim = Claim(
            batch.alias,
            jobs=claimed,
            queue=queue,
            lease_seconds=seconds,
            due_since=since,
            was_available=bool(size),
        )
        batch.results |= dict.fromkeys(since, backends.NotOffered(seconds))


def due(alias: str) -> QuerySet[StagedJob]:
    """Return the jobs that are due, the oldest first."""
    return StagedJob.objects.using(alias).filter(DUE, IN_TURN).order_by("run_at", "pk")


def first_statement() -> First:
    """Return the first statement of the transaction of a batch on PostgreSQL. It limits the waits
    for locks, and returns the seconds that the transaction may last, or NULL."""
    wait = limits.lowered(limits.LOCK, f"{backends.BROKER_TIMEOUT_SECONDS}s")
    seconds = "extract(epoch FROM current_setting('transaction_timeout', true)::interval)"
    return First(f"SELECT {wait}, NULLIF({seconds}, 0)::double precision", Hidden({}))


def seconds_of_batch(alias: str, first: First) -> float:
    """Return the seconds for which the transaction, just begun, may hand jobs over: at most
    BATCH_SECONDS, and less if the project or the role limits the time of transactions. On SQLite,
    take the write lock."""
    connection = connections[alias]
    if connection.vendor != "postgresql":
        # An UPDATE without rows locks the file. Other enqueuers read the jobs after this
        # transaction has deleted its own.
        StagedJob.objects.using(alias).filter(job_name="").update(refusals=F("refusals"))
        return backends.BATCH_SECONDS
    if not first.ran:
        with connection.cursor() as cursor:
            cursor.execute(first.text)
            first.row = cursor.fetchone()
    whole: float | None = first.row[1] if first.row is not None else None
    found = (whole, limits.found_seconds(limits.IDLE, alias), conf.get().LOCK_TIMEOUT_SECONDS)
    return min(backends.BATCH_SECONDS, min(limit for limit in found if limit) * _PART_OF_LIMIT)


def read(batch: Batch, jobs: QuerySet[StagedJob], size: int) -> None:
    """Lock the first ``size`` of ``jobs``, and read those whose arguments fit into BATCH_BYTES
    together. Jobs that another enqueuer has locked are skipped."""
    size = min(size, BATCH_BYTES // 1024)
    fields = StagedJob._meta.concrete_fields
    names, columns = [field.attname for field in fields], [_column(field) for field in fields]
    columns[names.index("job_args")] = _SmallArguments("job_args", most=BATCH_BYTES // size)
    # Receivers of signals run here, so no variable has the rows.
    job_of = partial(StagedJob.from_db, batch.alias, names)
    rows = jobs.select_for_update(skip_locked=True).values_list(*columns)
    locked = list(map(job_of, rows[:size]))
    batch.locked, large_bytes = len(locked), 0
    for job in locked:
        if large_bytes >= BATCH_BYTES:
            break
        if job.job_args is None:
            row = StagedJob.objects.using(batch.alias).filter(pk=job.id)
            text = row.values_list(Cast("job_args", TextField()), flat=True).get()
            job.job_args = json.loads(text)
            large_bytes += len(text)
        batch.jobs.append(job)


def _column(field: Any) -> Any:
    return Cast(field.attname, _TextOfTime()) if isinstance(field, DateTimeField) else field.attname


class _TextOfTime(TextField):  # type: ignore[type-arg]
    """A time that is read as text. Django's loader of times takes longer than all other columns."""

    def from_db_value(
        self, value: str | None, expression: object, connection: BaseDatabaseWrapper
    ) -> datetime | None:
        if value is None:
            return None
        return datetime.fromisoformat(value).replace(tzinfo=connection.timezone)


class _SmallArguments(Func):
    """The arguments of a job, or NULL if they are longer than ``most`` bytes as JSON. The size in
    the table is compared first, because large arguments would have to be decompressed to measure
    them."""

    template = (
        "CASE WHEN pg_column_size(%(expressions)s) <= %(most)s AND"
        " octet_length(%(expressions)s::text) <= %(most)s THEN %(expressions)s END"
    )
    output_field = JSONField()

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = (
            "CASE WHEN length(CAST(%(expressions)s AS BLOB)) <= %(most)s THEN %(expressions)s END"
        )
        return self.as_sql(compiler, connection, template=template, **context)
