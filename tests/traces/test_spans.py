"""The spans of requests, operations, the completer, the enqueuer and jobs, in one process."""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from celery import shared_task
from celery._state import _task_stack
from celery.exceptions import Retry
from django.conf import settings
from django.db import OperationalError, transaction
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode
from psycopg.errors import SerializationFailure
from pytest_django import Settings

from idempotency import _job_run
from idempotency.completer import complete_key
from idempotency.contrib.celery import OnceTask
from idempotency.contrib.rq import run_once
from idempotency.contrib.tasks import run_staged
from idempotency.decorators import idempotent
from idempotency.enqueuer import enqueue_once
from idempotency.exceptions import InProgress, KeyReused, Unavailable, Unfinished
from idempotency.jobs import stage_job, trace_of
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.phases import atomic_phase
from tests.factories import UserFactory
from tests.kit.commands import environment
from tests.kit.jobs import record
from tests.kit.serving import Sender
from tests.kit.views import create, phased, plain, two_phases
from tests.operations import note, pay
from tests.traces.tree import Spans, attributes, linked, named

JOB = "tests.kit.jobs.record"


def traceparent(span: ReadableSpan) -> str:
    own = span.context
    return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"


record_by_celery = shared_task(record, name=JOB, base=OnceTask)


def test_a_plain_request(spans: Spans, sender: Sender, serve: Callable[..., None]) -> None:
    serve(view=plain(create))
    sender.send()
    found = spans.take()
    request, claim = found
    assert [span.name for span in found] == ["idempotency.request", "idempotency.claim"]
    assert claim.parent.span_id == request.context.span_id
    key = IdempotencyKey.objects.get()
    assert key.traceparent == traceparent(request)
    scope_hash = attributes(request).pop("scope_hash")
    assert len(scope_hash) == 12
    scope = IdempotencyKey.objects.get().scope
    assert scope_hash not in hashlib.sha256(scope.encode()).hexdigest()
    assert attributes(request) == {
        "kind": "view",
        "outcome": "ran",
        "key.id": key.pk,
        "scope_hash": scope_hash,
        "recovery_point": "finished",
        "attempt": 1,
    }
    assert attributes(claim)["outcome"] == "claimed"


def test_a_replay_links_to_the_request_that_did_the_work(
    spans: Spans, sender: Sender, serve: Callable[..., None]
) -> None:
    serve(view=plain(create))
    sender.send()
    first = named(spans.take(), "idempotency.request")
    sender.send()
    found = spans.take()
    replay = named(found, "idempotency.request")
    assert [span.name for span in found] == [
        "idempotency.request",
        "idempotency.claim",
        "idempotency.replay",
    ]
    assert replay.context.trace_id != first.context.trace_id
    assert linked(replay) == [first.context.span_id]
    assert attributes(replay)["outcome"] == "replayed"
    assert IdempotencyKey.objects.get().traceparent == traceparent(first)


def test_a_conflict_has_its_code(spans: Spans, sender: Sender, serve: Callable[..., None]) -> None:
    serve(view=plain(create))
    sender.send()
    spans.take()
    sender.send(body={"other": 1})
    request = named(spans.take(), "idempotency.request")
    assert attributes(request)["outcome"] == "conflict"
    assert attributes(request)["code"] == "key_reused"
    assert request.status.status_code is StatusCode.UNSET


def test_a_takeover_and_the_completer_link_to_the_first_request(
    spans: Spans, sender: Sender, serve: Callable[..., None]
) -> None:
    broken = True

    def second(request: HttpRequest) -> HttpResponseBase:
        if broken:
            raise ValueError("a secret")
        return JsonResponse({})

    serve(view=two_phases(lambda request: None, second))
    sender.send()
    found = spans.take()
    first = named(found, "idempotency.request")
    assert [span.name for span in found][1:] == [
        "idempotency.claim",
        "idempotency.phase started",
        "idempotency.phase between",
    ]
    assert {span.parent.span_id for span in found[1:]} == {first.context.span_id}
    assert first.status.status_code is StatusCode.ERROR
    phase = named(found, "idempotency.phase between")
    assert phase.attributes["error.type"] == "ValueError"
    assert "a secret" not in "".join(span.to_json() for span in found)

    sender.send()
    takeover = named(spans.take(), "idempotency.request")
    assert (linked(takeover), attributes(takeover)["attempt"]) == ([first.context.span_id], 2)

    broken = False
    key = IdempotencyKey.objects.get()
    assert complete_key(key.pk) == "finished"
    found = spans.take()
    completer = named(found, "idempotency.complete")
    assert [span.name for span in found] == [
        "idempotency.complete",
        "idempotency.claim",
        "idempotency.phase between",
    ]
    assert linked(completer) == [first.context.span_id]
    assert completer.context.trace_id != first.context.trace_id
    assert (attributes(completer)["outcome"], attributes(completer)["attempt"]) == ("finished", 3)
    key.refresh_from_db()
    assert key.traceparent == traceparent(first)


def test_operations_have_their_names(spans: Spans, transactional_db: None) -> None:
    pay.once("key", name="one", cents=9)
    assert spans.tree() == [
        "tests.pay",
        "  idempotency.claim",
        "  idempotency.phase started",
        "  idempotency.call transfer",
        "  idempotency.phase booked",
    ]
    pay.once("key", name="one", cents=9)
    with pytest.raises(KeyReused):
        pay.once("key", name="one", cents=10)
    replay, *_, reused, _ = spans.take()
    assert (attributes(replay)["kind"], attributes(replay)["outcome"]) == ("operation", "replayed")
    assert attributes(reused)["code"] == "key_reused"


def test_a_signal_that_waits_for_the_outer_commit_changes_no_other_span(
    spans: Spans, sender: Sender, serve: Callable[..., None]
) -> None:
    broken = True

    def second(request: HttpRequest) -> HttpResponseBase:
        note.once("inner", name="one")
        if broken:
            raise ValueError
        return JsonResponse({})

    serve(view=two_phases(lambda request: None, second))
    sender.send()
    (key,) = IdempotencyKey.objects.all()
    broken = False
    assert complete_key(key.pk) == "finished"
    found = spans.take()
    assert attributes(named(found, "idempotency.complete"))["key.id"] == key.pk
    inner = [span for span in found if span.name == "tests.note"][-1]
    assert attributes(inner)["outcome"] == "ran"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InProgress(), StatusCode.UNSET),
        (Unfinished(), StatusCode.UNSET),
        (Retry(), StatusCode.UNSET),
        (Unavailable(), StatusCode.ERROR),
        (SystemExit(), StatusCode.ERROR),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_job_that_is_to_be_retried_has_no_error(
    error: BaseException, status: StatusCode, spans: Spans, transactional_db: None
) -> None:
    with pytest.raises(type(error)), _job_run.job_run(JOB, str(uuid4()), None):
        raise error
    (job,) = spans.take()
    assert job.status.status_code is status


#: The traces in which jobs were handed over.
handed_over: list[int] = []


def accept(job: StagedJob) -> None:
    """Take a job of the enqueuer."""
    handed_over.append(trace.get_current_span().get_span_context().trace_id)


def stage() -> StagedJob:
    with transaction.atomic():
        return stage_job(JOB, {"user": UserFactory().pk})


def test_the_enqueuer_links_to_the_trace_of_each_job(
    spans: Spans, transactional_db: None, settings: Settings
) -> None:
    settings.IDEMPOTENCY = settings.IDEMPOTENCY | {"ENQUEUERS": {"*": f"{__name__}.accept"}}
    for name in ("one", "two"):
        with spans.span(name):
            stage()
    stage()
    one, two = spans.take()
    assert enqueue_once().handed_over == 3
    (batch,) = spans.take()
    assert (batch.name, batch.parent, attributes(batch)["jobs"]) == ("idempotency.enqueue", None, 3)
    assert set(linked(batch)) == {one.context.span_id, two.context.span_id}
    traces = {span.context.trace_id for span in (one, two, batch)}
    assert set(handed_over[-3:]) == traces, "an instrumentor of a queue gets the trace of the job"


def by_celery(name: str, args: Any, job_id: str, *, trace: Any, retries: int = 0) -> None:
    headers = {"idempotency_trace": trace}
    options = {"id": job_id, "called_directly": False, "retries": retries, "is_eager": True}
    record_by_celery.push_request(**options, **headers)
    _task_stack.push(record_by_celery)
    try:
        record_by_celery(**args)
    finally:
        _task_stack.pop()
        record_by_celery.pop_request()


@pytest.mark.parametrize("worker", [run_once, run_staged.func, by_celery])
def test_the_first_attempt_of_a_job_is_a_child_and_a_later_one_has_a_link(
    worker: Callable[..., Any], spans: Spans, transactional_db: None
) -> None:
    with spans.span("request"):
        job = stage()
    (request,) = spans.take()
    assert job.traceparent == traceparent(request)
    worker(job.job_name, job.job_args, str(job.pk), trace=trace_of(job))
    first = named(spans.take(), "idempotency.job")
    assert (first.parent.span_id, linked(first)) == (request.context.span_id, [])
    assert attributes(first) == {"job": JOB, "job.id": str(job.pk)}

    job.hand_overs = 1
    worker(job.job_name, job.job_args, str(job.pk), trace=trace_of(job))
    later = named(spans.take(), "idempotency.job")
    assert (later.parent, linked(later)) == (None, [request.context.span_id])


def test_a_retry_of_celery_has_a_link(spans: Spans, transactional_db: None) -> None:
    with spans.span("request"):
        job = stage()
    (request,) = spans.take()
    by_celery(job.job_name, job.job_args, str(job.pk), trace=trace_of(job), retries=1)
    retry = named(spans.take(), "idempotency.job")
    assert (retry.parent, linked(retry)) == (None, [request.context.span_id])


def test_a_retry_inside_the_process_is_an_event(
    spans: Spans, sender: Sender, serve: Callable[..., None]
) -> None:
    failures = [OperationalError()]
    failures[0].__cause__ = SerializationFailure()

    def work(request: HttpRequest) -> HttpResponseBase:
        if failures:
            raise failures.pop()
        return JsonResponse({})

    serve(view=phased(work, isolation="serializable"))
    assert sender.send().status_code == 200
    found = spans.take()
    request = named(found, "idempotency.request")
    assert [event.name for event in request.events] == ["idempotency.retry"]
    assert {span.status.status_code for span in found} == {StatusCode.UNSET}


def test_an_async_view(spans: Spans, sender: Sender, serve: Callable[..., None]) -> None:
    @idempotent(recovery_points=[])
    async def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        async for _ in key.aphases():
            async with key.call("bank"):
                pass
            async with atomic_phase(key) as phase:
                phase.set_response(JsonResponse({}))
        return key.response()

    serve(view=view)
    with spans.span("server"):
        sender.send()
        with spans.span("after"):
            pass
    assert spans.tree() == [
        "server",
        "  idempotency.request",
        "    idempotency.claim",
        "    idempotency.call bank",
        "    idempotency.phase started",
        "  after",
    ]


START = """
import os, sys, django
if instrumented := len(sys.argv) > 1:
    from importlib.metadata import EntryPoint
    named = EntryPoint("", "idempotency.contrib.opentelemetry:Instrumentor", "")
    named.load()().instrument(skip_dep_check=True)
django.setup()
from idempotency._http import entry
print("idempotency.contrib.opentelemetry" in sys.modules, entry._run_with_signal.__module__)
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "False idempotency._http.entry"),
        (["instrument"], "True idempotency.contrib.opentelemetry._wrappers"),
    ],
)
def test_nothing_is_imported_without_a_call_and_a_call_before_the_set_up_waits_for_it(
    arguments: list[str], expected: str
) -> None:
    command = [sys.executable, "-c", START, *arguments]
    done = subprocess.run(
        command,
        env=environment(),
        cwd=settings.BASE_DIR,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected
