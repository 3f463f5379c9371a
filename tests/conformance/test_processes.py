"""Numbers 15, 36, 39, 40 and 48: what the reaper and the completer do, as clients and the rows see
it."""

import io
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import call_command
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from pytest_django import Settings

from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.ageing import abandon, make_older, past_the_retention
from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import Gate, at_once, in_background
from tests.kit.views import Counted, both_kinds, create, phased, phased_outside, two_phases
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]

HOUR = 3600


def run(command: str) -> str:
    """Run one pass of a command and return what it says."""
    said = io.StringIO()
    call_command(command, stdout=said)
    return said.getvalue()


class Leaving:
    """A call between two phases that fails as often as it is told to, and counts how often it was
    made."""

    def __init__(self, failures: int) -> None:
        self.failures, self.made = failures, 0

    def __call__(self) -> None:
        self.made += 1
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the other system is down")


def begin(request: HttpRequest) -> None:
    """Write what a first phase commits."""
    Entry.objects.create(name="begun")


@pytest.mark.parametrize("status", [401, 403, 408, 412, 425, 428, 429])
def test_15_a_refused_request_is_its_clients_alone(
    status: int, serve: Serve, sender: Sender
) -> None:
    answers = [HttpResponse(status=503), HttpResponse(status=status)]
    serve(
        view=phased_outside(
            work := Counted(lambda request: answers.pop(0) if answers else HttpResponse(status=404))
        )
    )
    assert [sender.send().status_code for _ in range(2)] == [503, status]
    abandon()
    run("complete_keys")
    past_the_retention()
    run("complete_keys")
    run("reap_keys")
    assert (work.runs, IdempotencyKey.objects.stuck().count()) == (2, 0)
    assert IdempotencyKey.objects.refused().count() == 1
    assert sender.send().status_code == 404
    assert work.runs == 3


def left_to_its_client(sender: Sender, answers: list[HttpResponse], **sent: Any) -> bool:
    """Send the request, let both processes find its key until its retention is over, and send it
    again; return whether the key waited for its client."""
    assert sender.send(**sent).status_code == 500
    abandon()
    run("complete_keys")
    waited = (
        IdempotencyKey.objects.refused().exists() and not IdempotencyKey.objects.stuck().exists()
    )
    past_the_retention()
    run("complete_keys")
    run("reap_keys")
    waited = waited and not IdempotencyKey.objects.stuck().exists()
    answers.append(HttpResponse("done", status=201))
    return waited and sender.send(**sent).content == b"done"


def upload() -> dict[str, Any]:
    """Return a request with a file, which is not stored."""
    file = SimpleUploadedFile("file.txt", b"content")
    return {"body": encode_multipart(BOUNDARY, {"file": file}), "content_type": MULTIPART_CONTENT}


@pytest.mark.parametrize(
    ("options", "sent"),
    [({}, upload()), ({"store_body": False}, {}), ({}, {"url": "/view/?api_key=secret"})],
    ids=["upload", "store_body", "query"],
)
def test_15_request_that_is_not_stored_whole_waits_for_its_client_if_nothing_was_begun(
    options: dict[str, Any], sent: dict[str, Any], serve: Serve, sender: Sender
) -> None:
    answers: list[HttpResponse] = []
    serve(view=phased(lambda request: answers.pop(), **options))
    assert left_to_its_client(sender, answers, **sent)


def test_15_request_that_is_not_stored_whole_waits_even_if_the_reaper_finds_it_first(
    serve: Serve, sender: Sender
) -> None:
    answers: list[HttpResponse] = []
    serve(view=phased(lambda request: answers.pop(), store_body=False))
    assert sender.send().status_code == 500
    past_the_retention()  # before the completer has seen it
    IdempotencyKey.objects.update(locked_until=Now() - timedelta(hours=1))
    run("reap_keys")
    assert (IdempotencyKey.objects.stuck().count(), IdempotencyKey.objects.refused().count()) == (
        0,
        1,
    )
    answers.append(HttpResponse("done", status=201))
    assert sender.send().content == b"done"


def test_15_request_that_is_not_stored_whole_needs_a_person_if_something_was_begun(
    serve: Serve, sender: Sender
) -> None:
    serve(view=two_phases(begin, create, call=Leaving(9), store_body=False))
    assert sender.send().status_code == 500
    abandon()
    run("complete_keys")
    assert IdempotencyKey.objects.stuck().get().stuck_code == "body_not_kept"


@pytest.mark.parametrize("status", [403, 429])
def test_15_a_refusal_after_something_was_begun_does_not_end_the_request(
    status: int, serve: Serve, sender: Sender
) -> None:
    answers = [HttpResponse(status=503), HttpResponse(status=status)]

    def pay(request: HttpRequest) -> HttpResponse:
        key = request.idempotency_key
        with key.call("charge"):
            pass
        if answers:
            return answers.pop(0)
        with atomic_phase(key) as phase:
            phase.set_response(create(request))
        return key.response()  # type: ignore[no-any-return]

    serve(view=phased_outside(pay))
    assert [sender.send().status_code for _ in range(2)] == [503, status]
    abandon()
    run("complete_keys")
    replayed = sender.send()
    assert (replayed.status_code, replayed["Idempotent-Replayed"]) == (201, "true")


@pytest.mark.parametrize("lacking", ["what a middleware adds", "a host that is allowed"])
def test_48_what_only_the_rebuilt_request_was_answered_is_not_the_clients_answer(
    lacking: str, serve: Serve, sender: Sender, settings: Settings
) -> None:
    down = [HttpResponse(status=503)]

    def pay(request: HttpRequest) -> HttpResponse:
        if lacking == "what a middleware adds":
            get_object_or_404(get_user_model(), pk=request.META.get("HTTP_X_TENANT"))
        else:
            request.build_absolute_uri("/back")
        if down:
            return down.pop()
        key = request.idempotency_key
        with atomic_phase(key) as phase:
            phase.set_response(create(request))
        return key.response()  # type: ignore[no-any-return]

    serve(view=phased_outside(pay))
    headers = {"X-Tenant": str(sender.user.pk)}
    assert sender.send(headers=headers).status_code == 503
    abandon()
    allowed = settings.ALLOWED_HOSTS
    if lacking == "a host that is allowed":
        settings.ALLOWED_HOSTS = ["shop.example"]
    run("complete_keys")
    settings.ALLOWED_HOSTS = allowed
    assert IdempotencyKey.objects.unfinished().count() == 1
    answered = sender.send(headers=headers)
    assert (answered.status_code, "Idempotent-Replayed" in answered, Entry.objects.count()) == (
        201,
        False,
        1,
    )


@both_kinds
def test_36_finished_keys_go_after_their_retention_and_the_next_is_a_new_request(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted()))
    sender.send(key="old")
    make_older(73 * HOUR, "created_at", "finished_at")
    sender.send(key="young")
    run("reap_keys")
    assert list(IdempotencyKey.objects.values_list("idempotency_key", flat=True)) == ["young"]
    assert sender.send(key="young")["Idempotent-Replayed"] == "true"
    assert "Idempotent-Replayed" not in sender.send(key="old")
    assert work.runs == 3


@pytest.mark.postgres
def test_36_a_key_in_flight_is_never_touched(serve: Serve, sender: Sender) -> None:
    gate = Gate()
    serve(view=two_phases(lambda request: None, create, call=gate.wait_here))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    make_older(100 * HOUR, "created_at")
    run("reap_keys")
    key = IdempotencyKey.objects.get()
    assert (key.finished_at, key.stuck_at) == (None, None)
    gate.open()
    assert running.result().status_code == 201


def test_36_unfinished_keys_past_the_retention_are_reported_and_wait_for_a_person(
    serve: Serve, sender: Sender
) -> None:
    serve(view=two_phases(begin, create, call=Leaving(1)))
    assert sender.send().status_code == 500
    past_the_retention()
    said = run("reap_keys")
    assert "1" in said
    assert IdempotencyKey.objects.get().stuck_code == "retention_passed"
    assert problem(sender.send())["code"] == "key_stuck"
    assert Entry.objects.count() == 1, "nothing is deleted, and nothing done again"


def test_36_on_abandon_settles_them_once(serve: Serve, sender: Sender) -> None:
    settled: list[int] = []

    def on_abandon(key: IdempotencyKey) -> HttpResponse:
        settled.append(key.pk)
        return JsonResponse({"refunded": True}, status=410)

    serve(view=two_phases(begin, create, call=Leaving(1), on_abandon=on_abandon))
    assert sender.send().status_code == 500
    past_the_retention()
    run("reap_keys"), run("reap_keys")
    again = sender.send()
    assert (again.status_code, again.json(), again["Idempotent-Replayed"]) == (
        410,
        {"refunded": True},
        "true",
    )
    assert len(settled) == 1


def test_39_the_completer_finishes_what_its_client_left_as_its_own_user(
    serve: Serve, sender: Sender
) -> None:
    def second(request: HttpRequest) -> HttpResponse:
        assert request.user == sender.user
        return create(request)

    serve(view=two_phases(begin, second, call=Leaving(1)))
    assert sender.send().status_code == 500
    run("complete_keys")
    assert Entry.objects.count() == 1, "its client may still come back"
    abandon()
    run("complete_keys")
    assert Entry.objects.count() == 2
    replayed = sender.send()
    assert (replayed.status_code, replayed["Idempotent-Replayed"]) == (201, "true")


@pytest.mark.postgres
def test_39_several_completers_run_no_key_at_once(serve: Serve, sender: Sender) -> None:
    serve(view=two_phases(begin, create, call=Leaving(8)))
    for number in range(8):
        assert sender.send(key=f"key-{number}").status_code == 500
    abandon()
    at_once([lambda: run("complete_keys")] * 4)
    assert set(IdempotencyKey.objects.values_list("completer_attempts", flat=True)) == {1}
    assert IdempotencyKey.objects.finished().count() == 8
    assert Entry.objects.count() == 16


def test_39_after_its_attempts_a_key_is_stuck(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"COMPLETER_MAX_ATTEMPTS": 2}
    serve(view=two_phases(begin, create, call=(call := Leaving(100))))
    sender.send()
    for _ in range(2):
        abandon()
        IdempotencyKey.objects.update(next_run_at=None)
        run("complete_keys")
    assert IdempotencyKey.objects.get().stuck_code == "attempts_exhausted"
    assert problem(sender.send())["code"] == "key_stuck"
    assert call.made == 3


def test_39_an_answer_that_is_not_stored_is_no_success(serve: Serve, sender: Sender) -> None:
    answers = [500, 403]
    serve(view=phased_outside(lambda request: HttpResponse(status=answers.pop(0))))
    assert sender.send().status_code == 500
    abandon()
    run("complete_keys")
    key = IdempotencyKey.objects.get()
    assert (key.finished_at, key.completer_attempts) == (None, 1)


def test_40_work_whose_downstream_key_has_expired_is_not_done_again(
    serve: Serve, sender: Sender
) -> None:
    calls: list[str] = []

    def second(request: HttpRequest) -> HttpResponse:
        calls.append(request.idempotency_key.derive("charge", valid_seconds=23 * HOUR))
        if len(calls) == 1:
            raise RuntimeError("the answer was lost")
        return create(request)

    serve(view=two_phases(begin, second))
    assert sender.send().status_code == 500
    make_older(24 * HOUR, "created_at", "last_run_at")
    refused = sender.send()
    assert (refused.status_code, problem(refused)["code"], problem(refused)["retryable"]) == (
        409,
        "key_stuck",
        False,
    )
    assert IdempotencyKey.objects.get().stuck_code == "downstream_key_expired"
    run("complete_keys")
    assert len(calls) == 1
