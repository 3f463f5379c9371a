"""Traces for OpenTelemetry: a span for each protected request, claim, phase, call, replay, batch of
the enqueuer, run of the completer, and job.

Nothing is traced before ``instrument()``. It replaces functions of this app, so without it the app
makes no additional call. A failure of the tracer is logged, and has no effect on the work.
"""

from typing import Any

from django.apps import apps
from opentelemetry.trace import TracerProvider

from idempotency.apps import IdempotencyConfig

__all__ = ["Instrumentor", "instrument", "uninstrument"]

_ready = IdempotencyConfig.ready


def instrument(*, tracer_provider: TracerProvider | None = None) -> None:
    """Start the traces of this process. A second call has no effect.

    Call it at the start of each process, such as in the ``ready()`` of an app or in ``wsgi.py``.
    Before Django is set up, the call takes effect with its set-up. Spans go to the global tracer
    provider, or to ``tracer_provider``.
    """
    if apps.models_ready:
        from idempotency.contrib.opentelemetry import _wrappers

        _wrappers.install(tracer_provider)
        return

    def ready(self: IdempotencyConfig) -> None:
        _ready(self)
        instrument(tracer_provider=tracer_provider)

    IdempotencyConfig.ready = ready  # type: ignore[method-assign]


def uninstrument() -> None:
    """Stop the traces of this process."""
    IdempotencyConfig.ready = _ready  # type: ignore[method-assign]
    if apps.models_ready:
        from idempotency.contrib.opentelemetry import _wrappers

        _wrappers.remove()


class Instrumentor:
    """The entry point ``opentelemetry_instrumentor``, which ``opentelemetry-instrument`` calls."""

    def instrument(self, *, tracer_provider: TracerProvider | None = None, **options: Any) -> None:
        """Call ``instrument()``. Options of other instrumentors have no effect."""
        instrument(tracer_provider=tracer_provider)

    def uninstrument(self, **options: Any) -> None:
        """Call ``uninstrument()``."""
        uninstrument()
