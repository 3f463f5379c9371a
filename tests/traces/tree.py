"""The spans of a test, by their names and places."""

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Spans:
    """The spans that have ended."""

    def __init__(self, exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
        self._exporter = exporter
        #: A span of the project around a block.
        self.span = provider.get_tracer(__name__).start_as_current_span

    def take(self) -> list[ReadableSpan]:
        """Return the spans since the last call, in the order of their starts."""
        found = self._exporter.get_finished_spans()
        self._exporter.clear()
        return sorted(found, key=lambda span: span.start_time)

    def tree(self) -> list[str]:
        """Return the names of the spans since the last call, indented below their parents."""
        return tree(self.take())


def tree(spans: list[ReadableSpan]) -> list[str]:
    """Return the names of spans, each below its parent."""
    ids = {span.context.span_id for span in spans}

    def below(parent: int | None, depth: int) -> list[str]:
        lines: list[str] = []
        for span in spans:
            of = span.parent.span_id if span.parent is not None else None
            if (of if of in ids else None) == parent:
                lines.append("  " * depth + span.name)
                lines += below(span.context.span_id, depth + 1)
        return lines

    return below(None, 0)


def named(spans: list[ReadableSpan], name: str) -> ReadableSpan:
    """Return the only span with this name."""
    (found,) = (span for span in spans if span.name == name)
    return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Return the attributes without their prefix."""
    return {
        name.removeprefix("idempotency."): value for name, value in (span.attributes or {}).items()
    }


def linked(span: ReadableSpan) -> list[int]:
    """Return the ids of the spans to which a span links."""
    return [link.context.span_id for link in span.links]
