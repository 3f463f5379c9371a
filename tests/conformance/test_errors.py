"""Numbers 33 and 34: the app's own answers."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse
from pytest_django import Settings

from idempotency.exceptions import KeyStuck
from tests.kit.serving import Sender, View, another_client
from tests.kit.threads import elsewhere
from tests.kit.views import Counted, both_kinds, create, phased, two_phases

Kind = Callable[..., View]
Serve = Callable[..., None]


def missing(serve: Serve, sender: Sender, kind: Kind) -> HttpResponse:
    """Provoke ``key_missing``."""
    serve(view=kind(create))
    return sender.send(key=None)


def invalid(serve: Serve, sender: Sender, kind: Kind) -> HttpResponse:
    """Provoke ``key_invalid``."""
    serve(view=kind(create))
    return sender.send(key='"')


def scopeless(serve: Serve, sender: Sender, kind: Kind) -> HttpResponse:
    """Provoke ``scope_missing``."""
    serve(view=kind(create))
    sender.client.logout()
    return sender.send()


def reused(serve: Serve, sender: Sender, kind: Kind) -> HttpResponse:
    """Provoke ``key_reused``."""
    serve(view=kind(create))
    sender.send()
    return sender.send(body={"a": 2})


def stuck(serve: Serve, sender: Sender, kind: Kind) -> HttpResponse:
    """Provoke ``key_stuck``."""

    def give_up(request: HttpRequest) -> HttpResponse:
        raise KeyStuck("the card is in the machine")

    serve(view=phased(give_up))
    return sender.send()


def in_use(serve: Serve, sender: Sender, kind: Kind) -> HttpResponse:
    """Provoke ``key_in_use``: the run itself sends its duplicate."""
    answers = []
    twin = another_client(sender)
    serve(
        view=two_phases(
            lambda request: None, create, call=lambda: answers.append(elsewhere(twin.send))
        )
    )
    sender.send()
    return answers[0]


CONDITIONS = {
    "key_missing": (missing, 400, False),
    "key_invalid": (invalid, 400, False),
    "scope_missing": (scopeless, 400, False),
    "key_reused": (reused, 422, False),
    "key_stuck": (stuck, 409, False),
    "key_in_use": (in_use, 409, True),
}


@both_kinds
@pytest.mark.parametrize("code", CONDITIONS)
def test_33_error_is_a_problem_document(
    code: str, kind: Kind, serve: Serve, sender: Sender
) -> None:
    provoke, status, retryable = CONDITIONS[code]
    response = provoke(serve, sender, kind)
    assert response["Content-Type"] == "application/problem+json"
    assert response["Cache-Control"] == "no-store"
    content = json.loads(response.content)
    assert set(content) == {"type", "title", "status", "detail", "code", "retryable"}
    assert (response.status_code, content["status"], content["code"], content["retryable"]) == (
        status,
        status,
        code,
        retryable,
    )
    assert ("Retry-After" in response) is retryable
    assert urlsplit(content["type"]).scheme
    assert content["type"].endswith(code)


def test_33_each_condition_has_a_type_and_a_title_of_its_own(serve: Serve, sender: Sender) -> None:
    problems = []
    for code in ("key_missing", "key_invalid", "key_reused"):
        problems.append(json.loads(CONDITIONS[code][0](serve, sender, phased).content))
    assert (
        len({found["type"] for found in problems})
        == len({found["title"] for found in problems})
        == 3
    )


def test_33_title_is_constant(serve: Serve, sender: Sender) -> None:
    serve(view=phased(create))
    first, second = (json.loads(sender.send(key=key).content) for key in ('"', "k" * 256))
    assert first["title"] == second["title"]
    assert first["detail"] != second["detail"]


def test_33_type_base_is_a_setting(serve: Serve, sender: Sender, settings: Settings) -> None:
    settings.IDEMPOTENCY = {"PROBLEM_TYPE_BASE": "https://api.example.com/errors/"}
    assert (
        json.loads(missing(serve, sender, phased).content)["type"]
        == "https://api.example.com/errors/key_missing"
    )


@pytest.mark.parametrize(
    ("code", "kind", "its_own"),
    [
        ("key_missing", "invalid_request", "idempotency_key_required"),
        ("key_reused", "invalid_request", "idempotency_conflict"),
        ("key_in_use", "invalid_request", "idempotency_in_flight"),
        ("key_invalid", "invalid_request", "key_invalid"),
        ("key_stuck", "processing_error", "key_stuck"),
    ],
)
def test_34_errors_of_the_agentic_commerce_protocol(
    code: str, kind: str, its_own: str, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"ERROR_RENDERER": "idempotency.contrib.acp_errors.render"}
    provoke, status, retryable = CONDITIONS[code]
    response = provoke(serve, sender, phased)
    content = json.loads(response.content)
    assert set(content) == {"type", "code", "message"}
    assert (response.status_code, content["type"], content["code"]) == (status, kind, its_own)
    assert ("Retry-After" in response) is retryable


def test_34_renderer_is_a_setting(serve: Serve, sender: Sender, settings: Settings) -> None:
    def render(*, status: int, code: str, headers: dict[str, str], **members: Any) -> HttpResponse:
        return JsonResponse(
            {"error": {"type": "idempotency_error", "code": code}}, status=status, headers=headers
        )

    settings.IDEMPOTENCY = {"ERROR_RENDERER": render}
    serve(view=phased(work := Counted()))
    response = sender.send(key=None)
    assert (response.status_code, response["Content-Type"]) == (400, "application/json")
    assert json.loads(response.content) == {
        "error": {"type": "idempotency_error", "code": "key_missing"}
    }
    assert response["Cache-Control"] == "no-store"
    assert work.runs == 0
