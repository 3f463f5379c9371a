"""The views of this app with traces and metrics on. Spans are exported in batches by a thread; the
exporter drops them."""

from collections.abc import Sequence

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.ours import DISTRIBUTION, VIEWS
from idempotency.contrib.opentelemetry import instrument

__all__ = ["DISTRIBUTION", "VIEWS"]


class _Drops(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def prepare() -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_Drops()))
    instrument(tracer_provider=provider, meter_provider=MeterProvider([InMemoryMetricReader()]))
