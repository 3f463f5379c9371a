"""The picture of a trace: which spans it has, in which order, and how they ended."""

import os
from pathlib import Path

import pytest
from django.test import Client
from opentelemetry.trace import INVALID_SPAN, Link, set_span_in_context
from pytest_django import Settings

from rides_demo import traces
from tests.kit.rides import Phone, jane, sandbox  # noqa: F401

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)


@pytest.fixture(autouse=True)
def on(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.TRACES = True
    monkeypatch.setattr(traces, "FILE", tmp_path / "spans")


def test_a_killed_request_and_the_spans_that_link_to_it() -> None:
    tracer = traces.provider("web").get_tracer("test")
    root = set_span_in_context(INVALID_SPAN)
    first = tracer.start_span("first", root)
    tracer.start_span("call", set_span_in_context(first))
    own = first.get_span_context()
    traces.note_kill(os.getpid())
    other = tracer.start_span("another request", root)
    retry = tracer.start_span("retry", root, links=[Link(own)])
    retry.set_attribute("idempotency.outcome", "ran")
    batch = tracer.start_span("batch", root, links=[Link(retry.get_span_context())])
    for span in (other, retry):
        span.end()

    picture = traces.picture(f"00-{own.trace_id:032x}-{own.span_id:016x}-01")

    shown = [
        (row["depth"], row["linked"], row["name"], row["state"], row["result"])
        for row in picture["rows"]
    ]
    assert shown == [
        (0, False, "first", "killed", ""),
        (1, False, "call", "killed", ""),
        (0, True, "retry", "ended", "ran"),
        (0, True, "batch", "open", ""),
    ]
    assert {row["process"] for row in picture["rows"]} == {"web"}
    batch.end()


@pytest.mark.django_db
def test_only_the_rider_sees_the_trace_of_a_booking_and_only_if_it_is_on(
    jane: Phone, settings: Settings
) -> None:
    jane.book(key="k")
    window = Client()
    assert window.get("/page/trace?key=k").status_code == 404
    session = window.session
    session["rides_token"] = "demo-jane"
    session.save()
    assert b"No spans yet." in window.get("/page/trace?key=k").content
    assert window.get("/page/trace?key=another").status_code == 404
    settings.TRACES = False
    assert window.get("/page/trace?key=k").status_code == 404
