import os
from collections.abc import Sequence
from pathlib import Path

from django.apps import AppConfig
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from idempotency.contrib.opentelemetry import instrument


class ToFile(SpanExporter):
    """Append each span to a file, so that the spans of a killed process stay."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with Path(os.environ["TEST_SPANS"]).open("a") as file:
            file.writelines(span.to_json(indent=None) + "\n" for span in spans)
        return SpanExportResult.SUCCESS


class TracesConfig(AppConfig):
    """Trace the process."""

    name = "tests.traces"
    label = "traces"

    def ready(self) -> None:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(ToFile()))
        trace.set_tracer_provider(provider)
        if "TEST_CELERY_SPANS" in os.environ:
            from opentelemetry.instrumentation.celery import CeleryInstrumentor

            CeleryInstrumentor().instrument()
        instrument()
