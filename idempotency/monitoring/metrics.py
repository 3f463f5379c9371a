"""The metrics of all exporters, measured from the signals of this process and from the tables."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from django.db import Error, connections, router

from idempotency import signals
from idempotency._engine.events import COUNTED
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.monitoring import measures

OUTCOMES_TEXT = (
    "Outcomes of claims: claimed, replayed, conflict (by error code), finished, stuck (by stuck"
    " code)."
)
PHASE_SECONDS_TEXT = (
    "Time from the claim or the previous phase to the COMMIT of a phase, including downstream"
    " calls, by the recovery point at its start."
)
PHASE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 90)


class Counting:
    """The receivers of the signals for one exporter: ``count`` gets each outcome with its code, and
    ``observe`` the recovery point and the seconds of each phase."""

    def __init__(
        self, count: Callable[[str, str], object], observe: Callable[[str, float], object]
    ) -> None:
        self._count, self._observe = count, observe
        #: The key that runs in this context, its recovery point, and the monotonic time when the
        #: run reached that point.
        self._standing: ContextVar[tuple[Any, str, float] | None] = ContextVar(
            "idempotency_metrics_standing", default=None
        )
        self._receivers = {
            signals.key_claimed: self._claimed,
            signals.phase_committed: self._committed,
            signals.key_replayed: self._counter("replayed"),
            signals.key_conflict: self._counter("conflict"),
            signals.key_finished: self._counter("finished"),
            signals.key_stuck: self._stuck,
        }

    def connect(self) -> None:
        """Start to count."""
        for signal, receiver in self._receivers.items():
            COUNTED[signal].connect(receiver, weak=False)

    def disconnect(self) -> None:
        """Stop to count."""
        for signal, receiver in self._receivers.items():
            COUNTED[signal].disconnect(receiver)

    def _claimed(self, key: IdempotencyKey, **kwargs: Any) -> None:
        self._count("claimed", "")
        self._standing.set((key.pk, key.recovery_point, time.monotonic()))

    def _committed(self, key: IdempotencyKey, **kwargs: Any) -> None:
        now, standing = time.monotonic(), self._standing.get()
        # A thread serves several requests: ignore the time of another key.
        if standing is not None and standing[0] == key.pk:
            self._observe(standing[1], now - standing[2])
        self._standing.set((key.pk, key.recovery_point, now))

    def _counter(self, outcome: str) -> Callable[..., None]:
        # A partial has no __qualname__, which send_robust() logs if a receiver fails.
        def count(code: str = "", **kwargs: Any) -> None:
            self._count(outcome, code)

        return count

    def _stuck(self, key: IdempotencyKey | None, **kwargs: Any) -> None:
        self._count("stuck", (key.stuck_code if key is not None else "") or "unknown")


#: The gauges, with their descriptions.
GAUGES = {
    "database_up": "Whether the database of the keys answered this scrape.",
    "unfinished_keys": "Keys without a response. Stuck keys count, refused keys do not.",
    "stuck_keys": (
        "Stuck keys, by stuck code. Keys with refused_when_rebuilt wait for their clients."
    ),
    "oldest_unfinished_seconds": (
        "Age of the oldest unfinished key. A stuck key counts only with the code"
        " unknown_recovery_point, operation_missing or arguments_changed."
    ),
    "due_jobs": "Staged jobs that are due.",
    "failed_jobs": "Staged jobs that have failed.",
    "oldest_job_seconds": "Time for which the oldest staged job has been due.",
    "process_lag_seconds": "Age of the youngest heartbeat of the loops of this name.",
}


@dataclass(frozen=True, slots=True)
class Gauge:
    """A gauge: its values by the value of its label. A gauge without a label has one value, under
    an empty string."""

    name: str
    values: Mapping[str, float]
    label: str = ""

    @property
    def text(self) -> str:
        return GAUGES[self.name]


def database_gauges(using: str | None) -> Iterator[Gauge]:
    """Yield the state of the tables as gauges. If the database cannot be reached, yield only
    ``database_up`` with the value 0."""
    alias = using or router.db_for_write(IdempotencyKey)
    # Django does not close the connection of a scrape outside a request.
    opened_here = connections[alias].connection is None
    try:
        gauges, up = [*_gauges(alias)], 1
    except Error:
        gauges, up = [], 0
    finally:
        if opened_here and not connections[alias].in_atomic_block:
            connections[alias].close()
    yield _gauge("database_up", up)
    yield from gauges


def _gauges(using: str) -> Iterator[Gauge]:
    keys = measures.unfinished_keys(IdempotencyKey.objects.using(using))
    jobs = measures.staged_jobs(StagedJob.objects.using(using))
    yield _gauge("unfinished_keys", keys.count)
    yield Gauge("stuck_keys", keys.stuck_by_code, "code")
    yield _gauge("oldest_unfinished_seconds", keys.oldest)
    yield _gauge("due_jobs", jobs.due)
    yield _gauge("failed_jobs", jobs.failed_by_name.total())
    yield _gauge("oldest_job_seconds", jobs.oldest)
    yield Gauge("process_lag_seconds", measures.lags(measures.processes(using)), "name")


def _gauge(name: str, value: float) -> Gauge:
    return Gauge(name, {"": value})
