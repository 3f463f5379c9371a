"""A key stores the status and the message of a response that is not stored, so that errors are
distinguishable."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse

from idempotency._abandonment import settle
from idempotency.admin.error_groups import group_of
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.kit.ageing import past_the_retention
from tests.kit.serving import Sender
from tests.kit.views import phased_outside

pytestmark = pytest.mark.django_db(transaction=True)

Serve = Callable[..., None]
MESSAGE = "Stripe lists no charge"


def kept_of(response: Any, serve: Serve, sender: Sender, **options: Any) -> str:
    """Return the last error of a key whose view returns ``response``; the history has the beginning
    of this error."""
    serve(view=phased_outside(lambda request: response, **options))
    assert sender.send().status_code == response.status_code
    key = IdempotencyKey.objects.get()
    assert key.last_error.startswith(key.history[-1]["detail"].removesuffix("…"))
    return key.last_error


@pytest.mark.parametrize(
    "body",
    [
        {"detail": MESSAGE, "title": "Service unavailable"},
        {"title": MESSAGE, "status": 503},
        {"message": MESSAGE},
        {"error": MESSAGE},
        {"error": {"type": "card_error", "message": MESSAGE}},
        MESSAGE,
    ],
    ids=lambda body: f"{body}"[:25],
)
def test_a_status_keeps_the_message_of_its_json(body: Any, serve: Serve, sender: Sender) -> None:
    response = JsonResponse(body, status=503, safe=False, content_type="application/problem+json")
    assert kept_of(response, serve, sender).endswith(f"status 503: {MESSAGE}")


def test_a_status_keeps_the_first_line_of_a_short_text(serve: Serve, sender: Sender) -> None:
    response = HttpResponse(f"{MESSAGE}\nsee the log", status=503, content_type="text/plain")
    assert kept_of(response, serve, sender).endswith(f"status 503: {MESSAGE}")


def test_a_long_message_ends_with_a_sign(serve: Serve, sender: Sender) -> None:
    kept = kept_of(JsonResponse({"detail": "x" * 5000}, status=503), serve, sender)
    assert kept.endswith("x…")
    assert len(kept) < 600


@pytest.mark.parametrize(
    "response",
    [
        HttpResponse(status=503),
        HttpResponse(f"<h1>{MESSAGE}</h1>", status=503),
        HttpResponse("x" * 30_000, status=503, content_type="text/plain"),
        HttpResponse("{", status=503, content_type="application/json"),
        HttpResponse("[" * 9000, status=503, content_type="application/json"),
        HttpResponse(b"\xff", status=503, content_type="application/json"),
        JsonResponse({"detail": ["a"], "error": {"message": 7}, "title": " "}, status=503),
        JsonResponse([1], status=503, safe=False),
        StreamingHttpResponse([MESSAGE.encode()], status=503, content_type="text/plain"),
    ],
)
def test_a_body_without_a_message_leaves_the_status(
    response: Any, serve: Serve, sender: Sender
) -> None:
    assert kept_of(response, serve, sender).endswith("status 503.")


@pytest.mark.parametrize("status", [503, 403])
def test_a_view_that_stores_no_body_keeps_no_message(
    status: int, serve: Serve, sender: Sender
) -> None:
    response = JsonResponse({"detail": MESSAGE}, status=status)
    assert kept_of(response, serve, sender, store_body=False).endswith(f"status {status}.")
    assert MESSAGE not in json.dumps(
        list(IdempotencyKey.objects.values_list("history", "last_error"))
    )


def test_responses_with_different_messages_are_different_errors(
    serve: Serve, sender: Sender
) -> None:
    first, same, other = (
        group_of(f"The view responded with status 503: {text}")
        for text in ("no ride 7", "no ride 8", "no charge 8")
    )
    assert first == same != other


@pytest.mark.parametrize("store_body", [True, False])
def test_the_reason_has_the_message_of_an_on_abandon_that_is_refused(
    store_body: bool, serve: Serve, sender: Sender
) -> None:
    def view(request: HttpRequest) -> HttpResponse:
        raise OSError("down")

    def refund(key: IdempotencyKey) -> HttpResponse:
        return JsonResponse({"detail": MESSAGE}, status=503)

    serve(view=idempotent(recovery_points=[], on_abandon=refund, store_body=store_body)(view))
    sender.send(body={"card": "4242"})
    past_the_retention()
    key = IdempotencyKey.objects.get()
    assert settle(key.pk, using="default") is False
    key.refresh_from_db()
    assert (MESSAGE in key.stuck_reason, "503" in key.stuck_reason) == (store_body, True)
