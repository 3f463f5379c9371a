"""The calls with which a project starts an error tracker or a tracer. A configuration names them in
the list STARTS."""

from typing import Any


def sentry() -> None:
    """Start sentry-sdk with its default integrations; the events go nowhere."""
    import sentry_sdk
    from sentry_sdk.transport import Transport

    class Nowhere(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            pass

    sentry_sdk.init(
        dsn="http://public@127.0.0.1:9/1",
        transport=Nowhere,
        traces_sample_rate=1.0,
        profiles_sample_rate=0,
    )


def opentelemetry() -> None:
    """Instrument Django, psycopg and this app; the spans go nowhere."""
    from opentelemetry import trace
    from opentelemetry.instrumentation.django import DjangoInstrumentor
    from opentelemetry.instrumentation.psycopg import PsycopgInstrumentor
    from opentelemetry.sdk.trace import TracerProvider

    from idempotency.contrib.opentelemetry import instrument

    trace.set_tracer_provider(TracerProvider())
    DjangoInstrumentor().instrument()
    PsycopgInstrumentor().instrument(enable_commenter=True)
    instrument()


def ddtrace() -> None:
    """Patch Django and psycopg; the spans are dropped."""
    import ddtrace

    ddtrace.tracer.enabled = True
    ddtrace.tracer.configure(trace_processors=[_Drop()])
    ddtrace.patch(django=True, psycopg=True)


class _Drop:
    """A processor of traces that keeps none."""

    def process_trace(self, trace: Any) -> None:
        """Drop the trace."""


def postgres_extra_without_hstore() -> None:
    """Do not create the extension hstore, which the wheel of PostgreSQL lacks."""
    from django.db.backends.base.base import BaseDatabaseWrapper
    from psqlextra.backend.base import DatabaseWrapper

    DatabaseWrapper.prepare_database = BaseDatabaseWrapper.prepare_database
