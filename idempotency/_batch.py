"""One batch of the enqueuer: its transaction, its jobs, and its limits of time and memory."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

from django.db import connections
from django.db.models import F, Func, JSONField, Q, QuerySet, TextField
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


@dataclass(slots=True)
class Batch:
    """The jobs of one transaction, and the results of their hand-overs."""

    alias: str
    deadline: float = 0.0
    jobs: list[StagedJob] = field(default_factory=list)
    #: The number of rows that were read and locked. Those that are not in ``jobs`` would exceed
    #: BATCH_BYTES.
    locked: int = 0
    results: backends.Results = field(default_factory=dict)
    #: The results that hold even if the transaction is rolled back.
    lasting: backends.Results = field(default_factory=dict)
    #: The jobs that were given to a backend, in this batch or before.
    offered: list[StagedJob] = field(default_factory=list)
    #: Whether ``lasting`` has a refusal of the job whose hand-over broke the transaction.
    culprit_is_known: bool = False

    def time_is_up(self) -> bool:
        return time.monotonic() > self.deadline


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
    most = BATCH_BYTES // size
    small = jobs.defer("job_args").annotate(small_args=_SmallArguments("job_args", most=most))
    locked = list(small.select_for_update(skip_locked=True)[:size])
    batch.locked, large_bytes = len(locked), 0
    for job in locked:
        if large_bytes >= BATCH_BYTES:
            break
        if (arguments := vars(job).pop("small_args")) is None:
            row = StagedJob.objects.using(batch.alias).filter(pk=job.pk)
            text = row.values_list(Cast("job_args", TextField()), flat=True).get()
            job.job_args = json.loads(text)
            large_bytes += len(text)
        else:
            job.job_args = arguments
        batch.jobs.append(job)


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
