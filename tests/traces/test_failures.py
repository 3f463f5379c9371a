"""A tracer that fails: it changes neither the response nor what is committed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)

from idempotency.contrib.opentelemetry import _spans, instrument, uninstrument
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender
from tests.kit.views import create, plain, two_phases
from tests.models import Entry

over = threading.Event()


class Raises(SpanProcessor):
    """A processor whose methods raise."""

    def on_start(self, *args: Any, **options: Any) -> None:
        raise RuntimeError("on start")

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("on end")


class RaisesAtEnd(Raises):
    """A processor that raises at the end of a span."""

    def on_start(self, *args: Any, **options: Any) -> None:
        """Do nothing."""


class Broken(SpanExporter):
    """An exporter that raises."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("export")


class Hangs(SpanExporter):
    """An exporter that waits until the test is over."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        over.wait()
        return SpanExportResult.FAILURE


PROCESSORS: dict[str, Callable[[], SpanProcessor]] = {
    "raises": Raises,
    "raises at the end": RaisesAtEnd,
    "exporter raises": lambda: SimpleSpanProcessor(Broken()),
    "exporter hangs and is full": lambda: BatchSpanProcessor(
        Hangs(), max_queue_size=1, max_export_batch_size=1
    ),
}


@pytest.fixture(params=PROCESSORS)
def failing(request: pytest.FixtureRequest) -> Iterator[None]:
    over.clear()
    provider = TracerProvider()
    provider.add_span_processor(PROCESSORS[request.param]())
    instrument(tracer_provider=provider)
    try:
        yield
    finally:
        uninstrument()
        over.set()
        provider.shutdown()


def test_a_failure_of_the_tracer_changes_nothing(
    failing: None, sender: Sender, serve: Callable[..., None]
) -> None:
    serve(
        plain=plain(create),
        phased=two_phases(lambda request: Entry.objects.create(name="first"), create),
    )
    for number, url in enumerate(["/plain/", "/phased/"]):
        first, replay = sender.send(url, f"key-{number}"), sender.send(url, f"key-{number}")
        assert (first.status_code, replay.content) == (201, first.content)
        assert replay["Idempotent-Replayed"] == "true"
    assert Entry.objects.count() == 3
    assert IdempotencyKey.objects.finished().count() == 2


def cannot_hash(scope: str) -> str:
    raise RuntimeError("hash")


def test_a_failure_at_the_attributes_of_a_key_changes_nothing(
    serve: Callable[..., None], sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_spans, "_keyed_hash", cannot_hash)
    instrument(tracer_provider=TracerProvider())
    try:
        serve(view=two_phases(lambda request: None, create))
        assert sender.send().status_code == 201
    finally:
        uninstrument()
    assert IdempotencyKey.objects.get().attempts == 1
