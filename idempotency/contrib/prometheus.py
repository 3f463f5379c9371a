"""Metrics for Prometheus: counters from the signals of this process, and gauges from the database
at scrape time.

An import of this module starts the counters. Register the gauges in only one scraped process,
because all processes share the tables: ``REGISTRY.register(DatabaseCollector())``. Alert rules are
in docs/how-to/metrics-and-alerts.md.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from django.db import Error, connections, router
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from idempotency import signals
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.monitoring import measures

OUTCOMES = Counter(
    "idempotency_outcomes_total",
    "Outcomes of claims: claimed, replayed, conflict (by error code), finished, stuck (by stuck"
    " code).",
    ["outcome", "code"],
)
PHASE_SECONDS = Histogram(
    "idempotency_phase_seconds",
    "Time from the claim or the previous phase to the COMMIT of a phase, including downstream"
    " calls, by the recovery point at its start.",
    ["recovery_point"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 90),
)
# The series must exist from the start for alerts on a value of 0.
for _outcome in ("claimed", "replayed", "finished"):
    OUTCOMES.labels(_outcome, "")

#: The key that runs in this context, its recovery point, and the monotonic time when the run
#: reached that point.
_standing: ContextVar[tuple[Any, str, float] | None] = ContextVar(
    "idempotency_metrics_standing", default=None
)


def _count_claim(key: IdempotencyKey, **kwargs: Any) -> None:
    OUTCOMES.labels("claimed", "").inc()
    _standing.set((key.pk, key.recovery_point, time.monotonic()))


def _time_phase(key: IdempotencyKey, **kwargs: Any) -> None:
    now, standing = time.monotonic(), _standing.get()
    # A thread serves several requests: ignore the time of another key.
    if standing is not None and standing[0] == key.pk:
        PHASE_SECONDS.labels(standing[1]).observe(now - standing[2])
    _standing.set((key.pk, key.recovery_point, now))


def _counter(outcome: str) -> Callable[..., None]:
    # A partial has no __qualname__, which send_robust() logs if a receiver fails.
    def count(code: str = "", **kwargs: Any) -> None:
        OUTCOMES.labels(outcome, code).inc()

    return count


def _count_stuck(key: IdempotencyKey | None, **kwargs: Any) -> None:
    OUTCOMES.labels("stuck", (key.stuck_code if key is not None else "") or "unknown").inc()


_RECEIVERS = (
    (signals.key_claimed, _count_claim),
    (signals.phase_committed, _time_phase),
    (signals.key_replayed, _counter("replayed")),
    (signals.key_conflict, _counter("conflict")),
    (signals.key_finished, _counter("finished")),
    (signals.key_stuck, _count_stuck),
)
for _signal, _receiver in _RECEIVERS:
    _signal.connect(_receiver, dispatch_uid=__name__)


class DatabaseCollector(Collector):
    """The state of the tables as gauges. Each scrape counts all unfinished keys, through a partial
    index, and all staged jobs.

    Nothing is written. If the database cannot be reached, the only gauge is
    ``idempotency_database_up`` with the value 0.
    """

    def __init__(self, *, using: str | None = None) -> None:
        self._using = using

    def describe(self) -> list[GaugeMetricFamily]:
        """Return nothing, so that registration does not query the database."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        alias = self._using or router.db_for_write(IdempotencyKey)
        # Django does not close the connection of a scrape outside a request.
        opened_here = connections[alias].connection is None
        try:
            gauges, up = [*_gauges(alias)], 1
        except Error:
            gauges, up = [], 0
        finally:
            if opened_here and not connections[alias].in_atomic_block:
                connections[alias].close()
        yield _gauge("database_up", "Whether the database of the keys answered this scrape.", up)
        yield from gauges


def _gauges(using: str) -> Iterator[GaugeMetricFamily]:
    keys = measures.unfinished_keys(IdempotencyKey.objects.using(using))
    jobs = measures.staged_jobs(StagedJob.objects.using(using))
    yield _gauge(
        "unfinished_keys",
        "Keys without a response, stuck ones included, refused ones not.",
        keys.count,
    )
    yield _by(
        "stuck_keys",
        "Stuck keys, by stuck code. Those with refused_when_rebuilt wait for their clients.",
        "code",
        keys.stuck_by_code,
    )
    oldest = (
        "Age of the oldest unfinished key that is not marked as stuck, or is stuck with"
        " unknown_recovery_point, operation_missing or arguments_changed."
    )
    yield _gauge("oldest_unfinished_seconds", oldest, keys.oldest)
    yield _gauge("due_jobs", "Staged jobs that are due.", jobs.due)
    yield _gauge("failed_jobs", "Staged jobs that have failed.", jobs.failed_by_name.total())
    yield _gauge("oldest_job_seconds", "How long the oldest staged job has been due.", jobs.oldest)
    lags = measures.lags(measures.processes(using))
    yield _by(
        "process_lag_seconds",
        "Age of the youngest heartbeat of the loops of this name.",
        "name",
        lags,
    )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"idempotency_{name}", text, value=value)


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"idempotency_{name}", text, labels=[label])
    for value, number in values.items():
        gauge.add_metric([value], number)
    return gauge
