"""Metrics for Prometheus: counts from the signals, of this process; the state of the tables, from the database at scrape time.

Importing this module counts. The state comes from a collector that one scraped process registers, since the tables are the same
for all: ``REGISTRY.register(DatabaseCollector())``. Alert rules are in docs/how-to/metrics-and-alerts.md.
"""

import time
from collections import Counter as Counts
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from django.db import Error, connections, router
from django.db.models import F, QuerySet
from django.db.models.functions import Now
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from idempotency import signals
from idempotency.models import UNKNOWN_RECOVERY_POINT, IdempotencyKey, ProcessHeartbeat, StagedJob

#: A scrape reads at most so many rows of each kind; a gauge that stands here means "so many or more".
COUNT_LIMIT = 10_000

OUTCOMES = Counter(
    "idempotency_outcomes_total",
    "What became of claims: claimed, replayed, conflict (by error code), finished, stuck (by stuck code).",
    ["outcome", "code"],
)
PHASE_SECONDS = Histogram(
    "idempotency_phase_seconds",
    "From the claim, or the phase before, to the COMMIT of a phase, with the foreign calls in between, by the recovery point "
    "that it started from.",
    ["recovery_point"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 90),
)
# A series that does not exist cannot be 0: the alert for a service without replays needs it from the start.
for _outcome in ("claimed", "replayed", "finished"):
    OUTCOMES.labels(_outcome, "")

#: The key whose run is under way here, the recovery point where it stands, and since when it does on the monotonic clock.
_standing: ContextVar[tuple[Any, str, float] | None] = ContextVar("idempotency_metrics_standing", default=None)


def _count_claim(key: IdempotencyKey, **kwargs: Any) -> None:
    OUTCOMES.labels("claimed", "").inc()
    _standing.set((key.pk, key.recovery_point, time.monotonic()))


def _time_phase(key: IdempotencyKey, **kwargs: Any) -> None:
    now, standing = time.monotonic(), _standing.get()
    # A thread that serves one request after the other must not take the time from an earlier one.
    if standing is not None and standing[0] == key.pk:
        PHASE_SECONDS.labels(standing[1]).observe(now - standing[2])
    _standing.set((key.pk, key.recovery_point, now))


def _count_replay(**kwargs: Any) -> None:
    OUTCOMES.labels("replayed", "").inc()


def _count_conflict(code: str, **kwargs: Any) -> None:
    OUTCOMES.labels("conflict", code).inc()


def _count_finish(**kwargs: Any) -> None:
    OUTCOMES.labels("finished", "").inc()


def _count_stuck(key: IdempotencyKey | None, **kwargs: Any) -> None:
    OUTCOMES.labels("stuck", (key.stuck_code if key is not None else "") or "unknown").inc()


_RECEIVERS = (
    (signals.key_claimed, _count_claim),
    (signals.phase_committed, _time_phase),
    (signals.key_replayed, _count_replay),
    (signals.key_conflict, _count_conflict),
    (signals.key_finished, _count_finish),
    (signals.key_stuck, _count_stuck),
)
for _signal, _receiver in _RECEIVERS:
    _signal.connect(_receiver, dispatch_uid=f"idempotency.contrib.prometheus.{_receiver.__name__}")


class DatabaseCollector(Collector):
    """The state of the tables as gauges, read when Prometheus asks, through partial indexes and at most COUNT_LIMIT rows each.

    Nothing is written. A database that cannot be reached leaves one gauge, ``idempotency_database_up``, at 0.
    """

    def __init__(self, *, using: str | None = None) -> None:
        self._using = using

    def describe(self) -> list[GaugeMetricFamily]:
        """Return nothing: to register this collector asks no database."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges."""
        alias = self._using or router.db_for_write(IdempotencyKey)
        # A scrape outside of a request has a thread of its own, and nobody to close its connection.
        opened_here = connections[alias].connection is None
        try:
            gauges = [*_of_keys(alias), *_of_jobs(alias), *_of_processes(alias)]
            up = 1
        except Error:
            gauges, up = [], 0
        finally:
            if opened_here and not connections[alias].in_atomic_block:
                connections[alias].close()
        yield GaugeMetricFamily("idempotency_database_up", "Whether the database of the keys answered this scrape.", value=up)
        yield from gauges


def _of_keys(alias: str) -> Iterator[GaugeMetricFamily]:
    unfinished = IdempotencyKey.objects.using(alias).unfinished().order_by("created_at")
    columns = ("stuck_at", "acknowledged_at", "stuck_code")
    rows = list(unfinished.values_list(Now() - F("created_at"), *columns)[:COUNT_LIMIT])
    stuck: Counts[str] = Counts()
    oldest = 0.0
    for age, stuck_at, acknowledged_at, code in rows:
        if stuck_at is not None and (acknowledged_at is None or acknowledged_at < stuck_at):
            stuck[code] += 1
        if stuck_at is None or code == UNKNOWN_RECOVERY_POINT:
            oldest = max(oldest, _seconds(age))
    unanswered = "Keys without a response, stuck ones included, refused ones not."
    yield GaugeMetricFamily("idempotency_unfinished_keys", unanswered, value=len(rows))
    by_code = GaugeMetricFamily("idempotency_stuck_keys", "Keys that wait for a person, by stuck code.", labels=["code"])
    for code, count in stuck.items():
        by_code.add_metric([code], count)
    yield by_code
    yield GaugeMetricFamily(
        "idempotency_oldest_unfinished_seconds", "Age of the oldest key that the machine has not given up on.", value=oldest
    )


def _of_jobs(alias: str) -> Iterator[GaugeMetricFamily]:
    jobs = StagedJob.objects.using(alias)
    due = jobs.filter(failed_at__isnull=True, run_at__lte=Now()).order_by("run_at")
    oldest = due.values_list(Now() - F("run_at"), flat=True).first()
    yield GaugeMetricFamily("idempotency_due_jobs", "Staged jobs that are due.", value=due[:COUNT_LIMIT].count())
    yield GaugeMetricFamily(
        "idempotency_failed_jobs",
        "Staged jobs that were given up on.",
        value=jobs.filter(failed_at__isnull=False)[:COUNT_LIMIT].count(),
    )
    yield GaugeMetricFamily(
        "idempotency_oldest_job_seconds", "How long the oldest staged job has been due.", value=_seconds(oldest)
    )


def _of_processes(alias: str) -> Iterator[GaugeMetricFamily]:
    lags: dict[str, float] = {}
    rows: QuerySet[Any] = ProcessHeartbeat.objects.using(alias)
    for name, age in rows.values_list("name", Now() - F("beat_at"))[:COUNT_LIMIT]:
        lags[name] = min(lags.get(name, float("inf")), _seconds(age))
    gauge = GaugeMetricFamily(
        "idempotency_process_lag_seconds", "Since when no loop of this name has given a sign of life.", labels=["name"]
    )
    for name, lag in lags.items():
        gauge.add_metric([name], lag)
    yield gauge


def _seconds(age: timedelta | None) -> float:
    return max(0.0, age.total_seconds()) if age is not None else 0.0
