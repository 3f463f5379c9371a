"""The traces of ``make serve TRACES=1``, and the picture of a booking that the page draws of them.

Each process appends its spans to one file of the run folder. A project sends them to a collector
instead.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from idempotency.models import IdempotencyKey

if TYPE_CHECKING:  # Without TRACES, the demo does not import the SDK.
    from opentelemetry.sdk.trace import TracerProvider

FILE = settings.RUN_FOLDER / "spans"
#: The attributes that the picture shows.
SHOWN = (
    "http.response.status_code",
    *(f"idempotency.{name}" for name in ("outcome", "code", "job")),
    "error.type",
)


def start() -> None:
    """Trace this process."""
    from idempotency.contrib.opentelemetry import instrument

    name = sys.argv[1] if Path(sys.argv[0]).name == "manage.py" else "web"
    trace.set_tracer_provider(provider(name))
    instrument()


def provider(process: str) -> "TracerProvider":
    """Return a provider whose spans go to the file, at the start and at the end of a span, because
    a killed process ends no span."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

    class ToFile(SpanProcessor):
        def on_start(self, span: ReadableSpan, parent_context: Any = None) -> None:
            _append(span.to_json(indent=None))

        def on_end(self, span: ReadableSpan) -> None:
            _append(span.to_json(indent=None))

    resource = Resource.create({"service.name": process, "process.pid": os.getpid()})
    made = TracerProvider(resource=resource)
    made.add_span_processor(ToFile())
    return made


def server_span(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Return a middleware that makes a span of each POST, as the instrumentor of Django does."""

    def middleware(request: HttpRequest) -> HttpResponse:
        if request.method != "POST":
            return get_response(request)
        name = f"POST {request.path}"
        with trace.get_tracer(__name__).start_as_current_span(name) as span:
            response = get_response(request)
            span.set_attribute("http.response.status_code", response.status_code)
            return response

    return middleware


def link_to(key: IdempotencyKey | None) -> None:
    """Link the current span to the first request with the key."""
    if key is not None and key.traceparent:
        carrier = TraceContextTextMapPropagator().extract({"traceparent": key.traceparent})
        trace.get_current_span().add_link(trace.get_current_span(carrier).get_span_context())


def note_kill(pid: int) -> None:
    """Record that the process is killed now: its spans end here."""
    if settings.TRACES:
        _append(json.dumps({"killed": pid, "at": time.time()}))


def _append(line: str) -> None:
    # One write: other processes append too.
    with FILE.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


def picture(traceparent: str | None) -> dict[str, Any]:
    """Return the template variables of the picture: a row for each span of the trace, and of the
    traces that link to it or to one of these."""
    spans = _read()
    traces = {f"0x{(traceparent or '--').split('-')[1]}"}
    while more := {_trace(span) for span in spans if _links(span) & traces} - traces:
        traces |= more
    shown = [span for span in spans if _trace(span) in traces]
    begin = min((span["begin"] for span in shown), default=0.0)
    end = max((span["end"] or span["begin"] for span in shown), default=0.0)
    rows = [
        {
            "name": span["name"],
            "process": span["resource"]["attributes"]["service.name"],
            "depth": depth,
            "linked": bool(_links(span) & traces),
            "state": span["state"],
            "result": _result(span["attributes"]),
            "left": _percent(span["begin"] - begin, end - begin),
            "width": _percent((span["end"] or end) - span["begin"], end - begin),
        }
        for depth, span in _tree(shown)
    ]
    return {"rows": rows, "seconds": f"{end - begin:.1f}"}


def _read() -> list[dict[str, Any]]:
    """Return the last state of each span. The spans of a killed process end at its kill."""
    spans: dict[str, dict[str, Any]] = {}
    kills: dict[int, float] = {}
    for line in FILE.read_text().splitlines() if FILE.exists() else ():
        with suppress(ValueError):  # a line that is being written
            read = json.loads(line)
            if "killed" in read:
                kills[read["killed"]] = read["at"]
            else:
                spans[read["context"]["span_id"]] = read
    for span in spans.values():
        begin, end = _seconds(span["start_time"]), _seconds(span["end_time"])
        state = "failed" if span["status"]["status_code"] == "ERROR" else "ended"
        if end is None:
            killed = kills.get(span["resource"]["attributes"]["process.pid"], 0.0)
            end, state = (killed, "killed") if killed >= begin else (None, "open")
        span |= {"begin": begin, "end": end, "state": state}
    return list(spans.values())


def _tree(
    spans: list[dict[str, Any]], parent: str | None = None, depth: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each span with its depth, below its parent; the traces in the order of their starts."""
    ids = {span["context"]["span_id"] for span in spans}
    for span in sorted(spans, key=lambda span: span["begin"]):
        if (span["parent_id"] if span["parent_id"] in ids else None) == parent:
            yield depth, span
            yield from _tree(spans, span["context"]["span_id"], depth + 1)


def _trace(span: dict[str, Any]) -> str:
    return str(span["context"]["trace_id"])


def _links(span: dict[str, Any]) -> set[str]:
    return {link["context"]["trace_id"] for link in span["links"]}


def _result(attributes: dict[str, Any]) -> str:
    return " ".join(str(attributes[name]) for name in SHOWN if name in attributes)


def _seconds(moment: str | None) -> Any:
    return moment and datetime.fromisoformat(moment).timestamp()


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / (whole or 1):.2f}"
