"""The metrics of the Prometheus exporter as instruments of OpenTelemetry."""

import time
from collections.abc import Callable, Iterable, Iterator

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

from idempotency import __version__
from idempotency.contrib.opentelemetry._spans import harmless
from idempotency.monitoring.metrics import (
    GAUGES,
    OUTCOMES_TEXT,
    PHASE_BUCKETS,
    PHASE_SECONDS_TEXT,
    Counting,
    Gauge,
    database_gauges,
)

#: The time for which the gauges of one collection share their queries.
_SHARED_SECONDS = 1


def counting(provider: MeterProvider | None) -> Counting:
    """Return the receivers that count in two instruments."""
    meter = _meter(provider)
    outcomes = meter.create_counter("idempotency_outcomes_total", description=OUTCOMES_TEXT)
    phases = meter.create_histogram(
        "idempotency_phase_seconds",
        "s",
        PHASE_SECONDS_TEXT,
        explicit_bucket_boundaries_advisory=PHASE_BUCKETS,
    )
    return Counting(
        harmless(lambda outcome, code: outcomes.add(1, {"outcome": outcome, "code": code})),
        harmless(lambda point, seconds: phases.record(seconds, {"recovery_point": point})),
    )


def observe_database(provider: MeterProvider | None, using: str | None) -> None:
    """Make a gauge of each measurement of the tables."""
    meter, read = _meter(provider), _Reading(using)
    for name, text in GAUGES.items():
        callbacks = [_callback(name, read)]
        meter.create_observable_gauge(f"idempotency_{name}", callbacks, description=text)


def _meter(provider: MeterProvider | None) -> Meter:
    return metrics.get_meter("idempotency", __version__, provider)


class _Reading:
    """The gauges of the last collection."""

    def __init__(self, using: str | None) -> None:
        self._using, self._at = using, float("-inf")
        self._gauges: dict[str, Gauge] = {}

    def __call__(self, name: str) -> Gauge | None:
        if time.monotonic() - self._at > _SHARED_SECONDS:
            self._gauges = {gauge.name: gauge for gauge in database_gauges(self._using)}
            self._at = time.monotonic()
        return self._gauges.get(name)


def _callback(name: str, read: _Reading) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(options: CallbackOptions) -> Iterator[Observation]:
        if (gauge := read(name)) is not None:
            for value, number in gauge.values.items():
                yield Observation(number, {gauge.label: value} if gauge.label else {})

    return observe
