"""Number 30: a duplicate that waits for the first request."""

from collections.abc import Callable

import pytest
from django.http import HttpRequest, HttpResponse
from pytest_django import Settings

from tests.kit.duplicates import waiting_requests
from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import Gate, in_background
from tests.kit.views import both_kinds, create
from tests.kit.waiting import eventually
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]

pytestmark = pytest.mark.postgres


@both_kinds
def test_30_duplicate_waits_and_gets_the_replay(kind: Kind, serve: Serve, sender: Sender) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return create(request)

    serve(view=kind(work, wait_seconds=30))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    waiting = [in_background(another_client(sender).send) for _ in range(2)]
    eventually(lambda: waiting_requests() == 2)
    assert not any(future.done() for future in waiting)
    gate.open()
    first = running.result()
    for answer in (future.result() for future in waiting):
        assert (answer.status_code, answer.content, answer["Idempotent-Replayed"]) == (
            201,
            first.content,
            "true",
        )
    assert Entry.objects.count() == 1


@both_kinds
def test_30_duplicate_takes_over_from_a_first_that_fails(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    gate, failures = Gate(), [True]

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        if failures:
            failures.clear()
            raise RuntimeError("out of luck")
        return create(request)

    serve(view=kind(work, wait_seconds=30))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    waiting = in_background(another_client(sender).send)
    eventually(lambda: waiting_requests() == 1)
    gate.open()
    assert running.result().status_code == 500
    assert waiting.result().status_code == 201
    assert Entry.objects.count() == 1


@both_kinds
@pytest.mark.parametrize(
    ("seconds", "places"), [(0.3, 10), (30, 1)], ids=["time is over", "no place left"]
)
def test_30_waiting_has_its_limits(
    seconds: float, places: int, kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"MAX_WAITING_REQUESTS": places}
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return create(request)

    serve(view=kind(work, wait_seconds=seconds))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    others = [in_background(another_client(sender).send) for _ in range(2)]
    eventually(lambda: any(future.done() for future in others))
    refused = next(future for future in others if future.done()).result()
    assert problem(refused)["code"] == "key_in_use"
    gate.open()
    assert running.result().status_code == 201
    assert {future.result().status_code for future in others} <= {201, 409}
    assert Entry.objects.count() == 1


@both_kinds
def test_30_by_default_most_of_eight_threads_stay_free(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return create(request)

    serve(view=kind(work, wait_seconds=60))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    duplicates = [in_background(another_client(sender).send) for _ in range(7)]
    eventually(lambda: sum(not future.done() for future in duplicates) <= 3)
    assert {problem(future.result())["code"] for future in duplicates if future.done()} == {
        "key_in_use"
    }
    gate.open()
    assert running.result().status_code == 201
    assert {future.result().status_code for future in duplicates} <= {201, 409}
    assert Entry.objects.count() == 1


@both_kinds
def test_30_duplicate_does_not_wait_in_the_only_thread_of_its_worker(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return create(request)

    serve(view=kind(work, wait_seconds=60))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    refused = sender.send()
    gate.open()
    assert problem(refused)["code"] == "key_in_use"
    assert running.result().status_code == 201


@both_kinds
def test_30_mismatch_does_not_wait(kind: Kind, serve: Serve, sender: Sender) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        return create(request)

    serve(view=kind(work, wait_seconds=60))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    assert problem(sender.send(body={"a": 2}))["code"] == "key_reused"
    gate.open()
    assert running.result().status_code == 201
