"""Number 37: the policy of each view can be printed, and what is printed is what happens."""

import json
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.ageing import make_older
from tests.kit.serving import Sender, View
from tests.kit.views import Counted, Work, both_kinds, phased, plain

Kind = Callable[..., View]
Serve = Callable[..., None]


def printed(*arguments: str) -> str:
    """Return what the command prints about the URLs of the test."""
    call_command("describe_idempotency", *arguments, stdout=(output := StringIO()))
    return output.getvalue()


def policy() -> dict[str, Any]:
    """Return the policy of the only protected view."""
    [only] = json.loads(printed("--json"))
    return only


@both_kinds
@pytest.mark.parametrize(
    "values", [{}, {"HEADER_NAMES": ["X-Key"], "KEY_MIN_LENGTH": 3, "KEY_MAX_LENGTH": 9}]
)
def test_37_printed_header_and_limits_are_those_that_hold(
    kind: Kind, values: dict[str, Any], serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = values
    serve(view=kind(Counted()))
    told = policy()
    [name] = told["headers"]
    lengths = (
        told["key_min_length"],
        told["key_max_length"],
        told["key_min_length"] - 1,
        told["key_max_length"] + 1,
    )
    sent = [
        sender.send(key=None, headers={name: "k" * length}, body=length).status_code
        for length in lengths
    ]
    assert sent == [201, 201, 400, 400]
    assert (sender.send(key=None).status_code == 400) is told["required"]


def refusing_outside(work: Work) -> View:
    """Return a phased view that stores a success in a phase, and returns a refusal from outside of
    it."""

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        response, key = work(request), request.idempotency_key
        if response.status_code >= 400:
            return response
        for _ in key.phases():
            with atomic_phase(key) as phase:
                phase.set_response(response)
        return key.response()

    return view


@pytest.mark.parametrize("kind", [plain, refusing_outside])
def test_37_printed_statuses_are_stored_and_the_others_are_not(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    statuses = [200, 201, 204, 302, 400, 401, 403, 404, 408, 409, 412, 422, 425, 428, 429, 500, 503]

    def work(request: HttpRequest) -> HttpResponse:
        return HttpResponse(status=json.loads(request.body))

    serve(view=kind(work))
    told = policy()
    for status in statuses:
        sender.send(key=f"key-{status}", body=status)
        stored = (
            f"{status // 100}xx" in told["stored_statuses"]
            and status not in told["never_stored_statuses"]
        )
        finished = (
            IdempotencyKey.objects.finished().filter(idempotency_key=f"key-{status}").exists()
        )
        assert finished is stored, status


def test_37_printed_retention_is_the_time_after_which_the_key_is_new(
    serve: Serve, sender: Sender
) -> None:
    serve(view=plain(work := Counted()))
    sender.send()
    seconds = policy()["retention_hours"] * 3600
    make_older(seconds - 60, "finished_at", "created_at")
    sender.send()
    assert work.runs == 1
    make_older(120, "finished_at", "created_at")
    sender.send()
    assert work.runs == 2


def test_37_policy_reads_as_text_too(serve: Serve) -> None:
    serve(rides=phased(Counted(), store_body=False), notes=plain(Counted(), required=False))
    text = printed()
    for part in (
        "POST PUT PATCH DELETE /rides/",
        "headers: Idempotency-Key",
        "key min length: 1",
        "key max length: 255",
        "required: False",
        "recovery points: started, unused, finished",
        "store body: False",
        "retention hours: 72",
        "never stored statuses: 401, 403, 408",
    ):
        assert part in " ".join(text.split())
    assert text.endswith("2 protected views.\n")
