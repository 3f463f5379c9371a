"""The measurements that the dashboard, the doctor and the metrics share. Nothing is written.

The database counts, so each number is exact. A count of keys reads the rows of one partial index,
and a count of waiting jobs may read the whole table of jobs. The cost depends on the numbers of
unfinished keys and of staged jobs, and not on the number of finished keys. Ages and
lags are seconds.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

from django.db.models import Case, Count, F, Func, Min, Q, Value, When
from django.db.models.functions import Coalesce, Greatest, Now

from idempotency._groups import IN_TURN
from idempotency._states import NOT_GIVEN_UP, KeyState, before_now, due_at
from idempotency.backends import NotDeleted
from idempotency.exceptions import StuckCode
from idempotency.models import IdempotencyKey, ProcessHeartbeat
from idempotency.monitoring.heartbeats import SILENT_SECONDS

#: The maximum number of heartbeats that are read, the youngest first.
MAX_HEARTBEATS = 10_000
#: The ages in seconds at which the spans of an age begin. A span is the index of its begin; the
#: span of a negative age is -1.
SPANS = (0, 300, 3600, 86400)
#: The stuck codes of keys that need no manual review: they wait for a retry of their clients.
NOT_FOR_REVIEW = (StuckCode.REFUSED_WHEN_REBUILT,)
#: The condition of waiting jobs that the broker has, but whose rows could not be deleted.
NOT_DELETED = Q(last_error__startswith=f"{NotDeleted.__name__}:")


@dataclass(frozen=True, slots=True)
class UnfinishedKeys:
    """The unfinished keys. ``oldest`` and ``completer_lag`` cover keys that the completer may still
    run. ``stuck_for`` covers stuck keys that need manual review. ``rows`` are the counted groups of
    keys."""

    count: int
    by_state: Counter[str]
    stuck_by_code: Counter[str]
    spans_by_point: dict[str, Counter[int]]
    oldest: float
    completer_lag: float
    stuck_for: float
    rows: list[Any]

    @property
    def for_review(self) -> int:
        """The number of stuck keys that need manual review."""
        return self.stuck_by_code.total() - self.for_clients

    @property
    def for_clients(self) -> int:
        """The number of stuck keys that wait for a retry of their clients."""
        return sum(self.stuck_by_code[code] for code in NOT_FOR_REVIEW)


@dataclass(frozen=True, slots=True)
class StagedJobs:
    """The staged jobs. ``waiting`` has the number of jobs in each span of the time for which they
    have been due, without failed jobs, and without the ``held`` jobs, which wait for an earlier job
    of their group. ``oldest`` is the longest of these times, or 0. ``not_deleted`` is the number of
    waiting jobs that the broker has, but whose rows could not be deleted."""

    waiting: Counter[int]
    held: int
    due: int
    oldest: float
    not_deleted: int
    failed_by_name: Counter[str]


@dataclass(frozen=True, slots=True)
class Process:
    """A loop of a process and the age of its heartbeat. ``silent`` depends only on the youngest
    heartbeat of this name."""

    name: str
    host: str
    pid: int
    age: float
    silent: bool


def unfinished_keys(every: Any, *columns: str, **aggregates: Any) -> UnfinishedKeys:
    """Return the measurements of the unfinished keys among ``every``, a queryset, from one query.
    The rows also have the ``columns`` and the ``aggregates``."""
    now = Now()
    keys: Any = every.unfinished().with_state().annotate(span=_span())
    # A person may have handed an old key back a moment ago.
    since = Greatest(due_at(), Coalesce("handed_back_at", "created_at"))
    groups = list(
        counted(
            keys, "state", "stuck_code", "recovery_point", "span", *columns,
            stuck_for=now - Min("stuck_at"),
            age=now - Min("created_at", filter=NOT_GIVEN_UP),
            lag=now - Min(since, filter=NOT_GIVEN_UP),
            **aggregates,
        )
    )  # fmt: skip
    spans: dict[str, Counter[int]] = {}
    for row in groups:
        spans.setdefault(row.recovery_point, Counter())[row.span] += row.number
    # Groups of keys that have been given up have neither an age nor a lag.
    of_completer = [row for row in groups if row.age is not None]
    stuck = [row for row in groups if row.state == KeyState.STUCK]
    return UnfinishedKeys(
        sum(row.number for row in groups),
        _totals((row.state, row.number) for row in groups),
        _totals((row.stuck_code, row.number) for row in stuck),
        spans,
        _longest(row.age for row in of_completer),
        _longest(row.lag for row in of_completer if row.state != KeyState.IN_FLIGHT),
        _longest(row.stuck_for for row in stuck if row.stuck_code not in NOT_FOR_REVIEW),
        groups,
    )


class _Once(Func):
    """A time that the database computes once for a statement, and not once for each row."""

    template = "(SELECT %(expressions)s)"


def _span() -> Case:
    """Return the expression for the span of the age of a key."""
    whens = [
        When(created_at__gt=_Once(before_now(begin)), then=Value(index - 1))
        for index, begin in enumerate(SPANS)
    ]
    return Case(*whens, default=Value(len(SPANS) - 1))


def counted(rows: Any, *columns: str, **aggregates: Any) -> Any:
    """Return a row for each group of ``rows`` with equal ``columns``: these columns, the
    ``number`` of its rows, and the ``aggregates``."""
    groups = rows.order_by().values(*columns).annotate(number=Count("pk"), **aggregates)
    return groups.values_list(*columns, "number", *aggregates, named=True)


def _totals(numbers: Iterable[tuple[Any, int]]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for name, number in numbers:
        found[name] += number
    return found


def _longest(times: Iterable[timedelta]) -> float:
    return max(map(seconds_of, times), default=0.0)


def keys_to_reap(using: str, late_seconds: int) -> int:
    """Return the number of keys that should have been deleted ``late_seconds`` ago."""
    return IdempotencyKey.objects.using(using).expired(late_seconds=late_seconds).count()


def staged_jobs(jobs: Any) -> StagedJobs:
    """Return the measurements of the staged jobs among ``jobs``, a queryset, from four queries."""
    # Counts with a filter: PostgreSQL would sort all jobs to group them by span.
    after = {
        f"after_{begin}": Count("pk", filter=Q(run_at__gt=_Once(before_now(begin))))
        for begin in SPANS
    }
    columns = {"number": Count("pk"), "kept": Count("pk", filter=NOT_DELETED), **after}
    # Apart, because a look-up of the earlier jobs of its group is planned for each job otherwise.
    parts = [
        jobs.filter(part, failed_at__isnull=True).aggregate(age=Now() - Min("run_at"), **columns)
        for part in (Q(group__isnull=True), Q(IN_TURN, group__isnull=False))
    ]
    waiting = {name: sum(part[name] for part in parts) for name in columns}
    counts = [0, *(waiting[name] for name in after), waiting["number"]]
    spans = Counter({n: count - less for n, (less, count) in enumerate(pairwise(counts), -1)})
    failed = counted(jobs.filter(failed_at__isnull=False), "job_name")
    grouped = jobs.filter(failed_at__isnull=True, group__isnull=False).count()
    return StagedJobs(
        spans,
        max(grouped - parts[1]["number"], 0),  # A job may have been staged meanwhile.
        spans.total() - spans[-1],
        _longest(part["age"] for part in parts if part["age"]),
        waiting["kept"],
        Counter({row.job_name: row.number for row in failed}),
    )


def processes(using: str) -> list[Process]:
    """Return a process for each heartbeat, the youngest first."""
    beats = ProcessHeartbeat.objects.using(using).order_by("-beat_at")
    youngest: dict[str, float] = {}
    found = []
    for beat in beats.annotate(age=Now() - F("beat_at"))[:MAX_HEARTBEATS]:
        age = seconds_of(beat.age)
        silent = youngest.setdefault(beat.name, age) > SILENT_SECONDS
        found.append(Process(beat.name, beat.host, beat.pid, age, silent))
    return found


def lags(found: list[Process]) -> dict[str, float]:
    """Return the age of the youngest heartbeat of each loop."""
    return {process.name: process.age for process in reversed(found)}


def seconds_of(age: timedelta) -> float:
    return max(0.0, age.total_seconds())
