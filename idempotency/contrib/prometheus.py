"""Metrics for Prometheus: counters from the signals of this process, and gauges from the database
at scrape time.

An import of this module starts the counters. Register the gauges in only one scraped process,
because all processes share the tables: ``REGISTRY.register(DatabaseCollector())``. Alert rules are
in docs/how-to/metrics-and-alerts.md.
"""

from collections.abc import Iterator

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from idempotency.monitoring.metrics import (
    OUTCOMES_TEXT,
    PHASE_BUCKETS,
    PHASE_SECONDS_TEXT,
    Counting,
    database_gauges,
)

OUTCOMES = Counter("idempotency_outcomes_total", OUTCOMES_TEXT, ["outcome", "code"])
PHASE_SECONDS = Histogram(
    "idempotency_phase_seconds", PHASE_SECONDS_TEXT, ["recovery_point"], buckets=PHASE_BUCKETS
)
# The series must exist from the start for alerts on a value of 0.
for _outcome in ("claimed", "replayed", "finished"):
    OUTCOMES.labels(_outcome, "")

Counting(
    lambda outcome, code: OUTCOMES.labels(outcome, code).inc(),
    lambda recovery_point, seconds: PHASE_SECONDS.labels(recovery_point).observe(seconds),
).connect()


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
        for gauge in database_gauges(self._using):
            labels = [gauge.label] if gauge.label else []
            family = GaugeMetricFamily(f"idempotency_{gauge.name}", gauge.text, labels=labels)
            for value, number in gauge.values.items():
                family.add_metric([value] if labels else [], number)
            yield family
