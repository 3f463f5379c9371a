"""Number 6: keys that stand in the body, in a form, or where a function finds them."""

from collections.abc import Callable

import pytest
from django.core.validators import RegexValidator
from django.http import HttpRequest
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender, View, problem
from tests.kit.views import Counted, both_kinds, create

Kind = Callable[..., View]
Serve = Callable[..., None]


def event_id(request: HttpRequest) -> str | None:
    """Return the number that a sender of webhooks gives its events."""
    return request.headers.get("X-Event-Id")


@both_kinds
@pytest.mark.parametrize(
    ("key_from", "sent"),
    {
        "body:idempotency_key": {"body": {"idempotency_key": "abc", "a": 1}},
        "form:token": {
            "body": "token=abc&a=1",
            "content_type": "application/x-www-form-urlencoded",
        },
        event_id: {"headers": {"X-Event-Id": "abc"}},
    }.items(),
    ids=["body", "form", "function"],
)
def test_06_key_is_found_outside_the_header(
    key_from: str | Callable[..., str],
    sent: dict[str, object],
    kind: Kind,
    serve: Serve,
    sender: Sender,
) -> None:
    serve(view=kind(work := Counted(), key_from=key_from))
    first, second = (sender.send(key=None, **sent) for _ in range(2))
    assert (first.status_code, second.content, second["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    assert IdempotencyKey.objects.get().idempotency_key == "abc"
    assert problem(sender.send(key="other", **sent))["code"] == "key_invalid"
    assert sender.send(key="abc", **sent).content == first.content
    assert work.runs == 1


@both_kinds
@pytest.mark.parametrize("body", [{"a": 1}, [1], "{", {"idempotency_key": None}])
def test_06_no_key_there_is_no_key(body: object, kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=kind(work := Counted(), key_from="body:idempotency_key"))
    assert problem(sender.send(key=None, body=body))["code"] == "key_missing"
    assert sender.send(key="abc", body=body).status_code == 201
    assert work.runs == 1


@both_kinds
@pytest.mark.parametrize("value", ["", 1, ["abc"], {"a": 1}, "ä", "a\nb", "x" * 256])
def test_06_what_is_no_key_is_refused(
    value: object, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted(), key_from="body:idempotency_key"))
    assert problem(sender.send(key=None, body={"idempotency_key": value}))["code"] == "key_invalid"
    assert (work.runs, IdempotencyKey.objects.count()) == (0, 0)


@pytest.mark.parametrize("key_from", ["body", "header:x", "body:", 1])
def test_06_a_place_that_does_not_exist_is_refused_at_decoration(key_from: object) -> None:
    with pytest.raises(ValueError, match="key_from"):
        idempotent(key_from=key_from)(create)


@both_kinds
def test_04_a_validator_is_a_setting(
    kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"KEY_VALIDATOR": RegexValidator(r"^[0-9a-f-]{36}$", "Send a UUID.")}
    serve(view=kind(work := Counted()))
    refused = problem(sender.send(key="abc"))
    assert (refused["code"], refused["detail"]) == ("key_invalid", "Send a UUID.")
    assert sender.send(key="8e03978e-40d5-43e8-bc93-6894a57f9324").status_code == 201
    assert work.runs == 1
