from collections.abc import Iterator

import pytest
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
def spans(exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """Trace this process for the test, and return its spans. The bank is new."""
    monkeypatch.setattr(operations, "bank", operations.Bank())
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(tracer_provider=provider)
    try:
        yield Spans(exporter, provider)
    finally:
        uninstrument()
        provider.shutdown()
