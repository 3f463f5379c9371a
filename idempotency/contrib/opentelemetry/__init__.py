"""Traces and metrics for OpenTelemetry. Each protected request, claim, phase, call, replay, batch
of the enqueuer, run of the completer, and job has a span.

Nothing is traced or counted before ``instrument()``. It replaces functions of this app, so without
it the app makes no additional call. A failure of the tracer is logged, and has no effect on the
work.
"""

from typing import Any

from django.apps import apps
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from idempotency.apps import IdempotencyConfig

__all__ = ["Instrumentor", "instrument", "observe_database", "uninstrument"]

_ready = IdempotencyConfig.ready


def instrument(
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Start the traces and the metrics of this process. A second call has no effect.

    Call it at the start of each process, such as in the ``ready()`` of an app or in ``wsgi.py``.
    Before Django is set up, the call takes effect with its set-up. Spans and metrics go to the
    given providers, or to the global ones.
    """
    if apps.models_ready:
        from idempotency.contrib.opentelemetry import _wrappers

        _wrappers.install(tracer_provider, meter_provider)
        return

    def ready(self: IdempotencyConfig) -> None:
        _ready(self)
        instrument(tracer_provider=tracer_provider, meter_provider=meter_provider)

    IdempotencyConfig.ready = ready  # type: ignore[method-assign]


def observe_database(
    *, meter_provider: MeterProvider | None = None, using: str | None = None
) -> None:
    """Report the state of the tables as gauges. All processes share the tables, so call it in one
    process, after Django is set up."""
    from idempotency.contrib.opentelemetry import _metrics

    _metrics.observe_database(meter_provider, using)


def uninstrument() -> None:
    """Stop the traces of this process."""
    IdempotencyConfig.ready = _ready  # type: ignore[method-assign]
    if apps.models_ready:
        from idempotency.contrib.opentelemetry import _wrappers

        _wrappers.remove()


class Instrumentor:
    """The entry point ``opentelemetry_instrumentor``, which ``opentelemetry-instrument`` calls."""

    def instrument(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        **options: Any,
    ) -> None:
        """Call ``instrument()``. Options of other instrumentors have no effect."""
        instrument(tracer_provider=tracer_provider, meter_provider=meter_provider)

    def uninstrument(self, **options: Any) -> None:
        """Call ``uninstrument()``."""
        uninstrument()
