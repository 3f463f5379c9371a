from collections.abc import Iterator

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from idempotency.contrib.opentelemetry import instrument, uninstrument
from tests import operations
from tests.traces.tree import Spans


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def spans(
    exporter: InMemorySpanExporter, reader: InMemoryMetricReader, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Spans]:
    """Trace and measure this process for the test, and return its spans. The bank is new."""
    monkeypatch.setattr(operations, "bank", operations.Bank())
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider([reader])
    instrument(tracer_provider=provider, meter_provider=meters)
    try:
        yield Spans(exporter, provider)
    finally:
        uninstrument()
        provider.shutdown()
        meters.shutdown()
