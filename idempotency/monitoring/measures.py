"""The measurements that the dashboard, the doctor and the metrics share. Nothing is written.

Each one reads a bounded number of rows through a partial index, the oldest first, so its cost does
not depend on the size of a table. A count that equals the limit means "at least this number". Ages
and lags are seconds.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.models import BooleanField, ExpressionWrapper, F, Q
from django.db.models.functions import Now

from idempotency._states import NOT_GIVEN_UP, KeyState, due_at
from idempotency.backends import NotDeleted
from idempotency.exceptions import StuckCode
from idempotency.models import IdempotencyKey, ProcessHeartbeat
from idempotency.monitoring.heartbeats import SILENT_SECONDS

#: The maximum number of rows of a kind that are read. Larger numbers would not change the required
#: action.
COUNT_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class UnfinishedKeys:
    """The unfinished keys. ``oldest`` and ``completer_lag`` cover keys that the completer may still
    run. ``stuck_for`` covers stuck keys that need manual review."""

    count: int
    by_state: Counter[str]
    stuck_by_code: Counter[str]
    ages_by_point: dict[str, list[float]]
    oldest: float
    completer_lag: float
    stuck_for: float

    @property
    def for_review(self) -> int:
        """The number of stuck keys that need manual review."""
        return sum(count for code, count in self.stuck_by_code.items() if _is_for_review(code))


@dataclass(frozen=True, slots=True)
class StagedJobs:
    """The staged jobs. ``waiting`` has the seconds since each job was due (negative for a job that
    is not due yet), without failed jobs. ``oldest`` is the largest of these values, or 0.
    ``not_deleted`` is the number of waiting jobs that the broker has, but whose rows could not be
    deleted."""

    waiting: list[float]
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


def _is_for_review(code: str) -> bool:
    """Return whether a key with this stuck code needs manual review. A key that is refused when
    rebuilt waits for a retry of its client."""
    return code != StuckCode.REFUSED_WHEN_REBUILT


def stuck_kinds(stuck: Any) -> tuple[Any, Any]:
    """Return the stuck keys that need manual review, and the other stuck keys."""
    is_of_client = Q(stuck_code=StuckCode.REFUSED_WHEN_REBUILT)
    return stuck.exclude(is_of_client), stuck.filter(is_of_client)


def unfinished_keys(every: Any, limit: int = COUNT_LIMIT) -> UnfinishedKeys:
    """Return the measurements of the unfinished keys among ``every``, a queryset, from one query.
    If that query returns ``limit`` rows, use one query for each kind of key, so that each kind is
    measured."""
    keys: Any = every.unfinished().with_state().order_by("created_at")
    open_to_completer = ExpressionWrapper(NOT_GIVEN_UP, output_field=BooleanField())
    keys = keys.annotate(age=Now() - F("created_at"), lag=Now() - due_at(), open=open_to_completer)
    keys = keys.annotate(stuck_for=Now() - F("stuck_at"))
    columns = ("state", "stuck_code", "recovery_point", "age", "lag", "open", "stuck_for")
    keys = keys.values_list(*columns, named=True)
    rows = list(keys[:limit])
    if len(rows) == limit:
        others = (KeyState.IN_FLIGHT, KeyState.ACKNOWLEDGED, KeyState.ABANDONED, KeyState.WAITING)
        kinds = [
            *stuck_kinds(keys.filter(state=KeyState.STUCK)),
            *(keys.filter(state=state) for state in others),
        ]
        rows = [row for kind in kinds for row in kind[:limit]]
    ages: dict[str, list[float]] = {}
    for row in rows:
        ages.setdefault(row.recovery_point, []).append(seconds_of(row.age))
    open_rows = [row for row in rows if row.open]
    stuck = [row for row in rows if row.state == KeyState.STUCK]
    return UnfinishedKeys(
        min(len(rows), limit),
        Counter(row.state for row in rows),
        Counter(row.stuck_code for row in stuck),
        ages,
        _longest(row.age for row in open_rows),
        _longest(row.lag for row in open_rows if row.state != KeyState.IN_FLIGHT),
        _longest(row.stuck_for for row in stuck if _is_for_review(row.stuck_code)),
    )


def _longest(times: Iterable[timedelta]) -> float:
    return max(map(seconds_of, times), default=0.0)


def keys_to_reap(using: str, late_seconds: int) -> int:
    """Return the number of keys that should have been deleted ``late_seconds`` ago."""
    keys = IdempotencyKey.objects.using(using).expired(late_seconds=late_seconds)
    return keys[:COUNT_LIMIT].count()


def staged_jobs(jobs: Any, limit: int = COUNT_LIMIT) -> StagedJobs:
    """Return the measurements of the staged jobs among ``jobs``, a queryset, from two queries."""
    is_not_deleted = Q(last_error__startswith=f"{NotDeleted.__name__}:")
    not_deleted = ExpressionWrapper(is_not_deleted, output_field=BooleanField())
    ages = jobs.filter(failed_at__isnull=True).order_by("run_at")
    rows = list(ages.values_list(Now() - F("run_at"), not_deleted)[:limit])
    failed = jobs.filter(failed_at__isnull=False).order_by("failed_at")
    names = Counter(failed.values_list("job_name", flat=True)[:limit])
    waiting, kept = [age.total_seconds() for age, _ in rows], sum(row[1] for row in rows)
    due = sum(age >= 0 for age in waiting)
    return StagedJobs(waiting, due, max([0.0, *waiting]), kept, names)


def processes(using: str) -> list[Process]:
    """Return a process for each heartbeat, the youngest first."""
    beats = ProcessHeartbeat.objects.using(using).order_by("-beat_at")
    youngest: dict[str, float] = {}
    found = []
    for beat in beats.annotate(age=Now() - F("beat_at"))[:COUNT_LIMIT]:
        age = seconds_of(beat.age)
        silent = youngest.setdefault(beat.name, age) > SILENT_SECONDS
        found.append(Process(beat.name, beat.host, beat.pid, age, silent))
    return found


def lags(found: list[Process]) -> dict[str, float]:
    """Return the age of the youngest heartbeat of each loop."""
    return {process.name: process.age for process in reversed(found)}


def seconds_of(age: timedelta) -> float:
    return max(0.0, age.total_seconds())
