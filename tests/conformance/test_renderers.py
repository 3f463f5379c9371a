"""Number 34: the app's own answers in another shape."""

from collections.abc import Callable

import pytest
from django.http import HttpResponse, JsonResponse
from pytest_django import Settings

from tests.kit.serving import Sender
from tests.kit.views import Counted, create, plain

Serve = Callable[..., None]


def test_34_errors_in_stripes_envelope(serve: Serve, sender: Sender, settings: Settings) -> None:
    settings.IDEMPOTENCY = {"ERROR_RENDERER": "idempotency.contrib.stripe_errors.render"}
    serve(view=plain(Counted()))
    missing = sender.send(key=None)
    assert (missing.status_code, missing["Content-Type"], missing["Cache-Control"]) == (
        400,
        "application/json",
        "no-store",
    )
    assert (missing.json()["error"]["type"], missing.json()["error"]["code"]) == (
        "idempotency_error",
        "key_missing",
    )
    assert missing["Stripe-Should-Retry"] == "false"
    sender.send()
    assert sender.send(body={"a": 2}).json()["error"]["type"] == "idempotency_error"


@pytest.mark.parametrize("by_path", [False, True])
def test_34_renderer_of_ones_own(
    by_path: bool, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"ERROR_RENDERER": f"{__name__}.mine" if by_path else mine}
    serve(view=plain(create))
    refused = sender.send(key=None)
    assert (refused.status_code, refused.json()) == (400, {"mine": "key_missing", "again": False})


def mine(*, status: int, code: str, retryable: bool, **members: object) -> HttpResponse:
    """Render an error in a shape of the project's own."""
    return JsonResponse({"mine": code, "again": retryable}, status=status)
