"""The completer must finish the request without the client, unless a refusal before any effect
leaves it to the client."""

from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from idempotency.testing import DoesNotSurvive, assert_survives, cures
from tests.kit.serving import Sender
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)

#: The completer has no such header.
HEADERS = {"X-Currency": "eur"}


def order(request: HttpRequest, currency: str) -> HttpResponseBase:
    """Write an entry in a first phase, and answer in a second one."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        with atomic_phase(key) as phase:
            if recovery_point == "started":
                Entry.objects.create(name=currency, idempotency_key=key)
                phase.set_recovery_point("ordered")
            else:
                phase.set_response(JsonResponse({}, status=201))
    return key.response()


@idempotent(recovery_points=["ordered"])
def reads_a_header(request: HttpRequest) -> HttpResponseBase:
    """Read a header that the rebuilt request lacks."""
    return order(request, request.headers["X-Currency"])


@idempotent(recovery_points=["ordered"])
def reads_the_session(request: HttpRequest) -> HttpResponseBase:
    """Read the session, which the rebuilt request lacks."""
    return order(request, request.session["currency"])


@idempotent(recovery_points=["ordered"], keep=["session.currency"])
def keeps_the_session(request: HttpRequest) -> HttpResponseBase:
    """Read a value of the session that is stored for the completer."""
    return order(request, request.session["currency"])


def send_to(view: Any, serve: Callable[..., None], sender: Sender) -> Callable[[str], Any]:
    """Put a view under a URL, and return what sends it a request with the header and the
    session."""
    serve(view=view)
    session = sender.client.session
    session["currency"] = "eur"
    session.save()
    return lambda key: sender.send(key=key, headers=HEADERS)


@pytest.mark.parametrize(
    ("view", "error"),
    [(reads_a_header, "KeyError: 'x-currency'"), (reads_the_session, "no attribute 'session'")],
)
def test_a_view_that_only_its_client_can_finish_is_caught(
    view: Any, error: str, serve: Callable[..., None], sender: Sender
) -> None:
    with pytest.raises(DoesNotSurvive) as caught:
        assert_survives(send_to(view, serve, sender), races=False)
    for failure in caught.value.failures:
        assert failure.cure == cures.NOT_REBUILT
        assert error in failure.cause
        assert "the completer takes over" in failure.course


def settle(key: IdempotencyKey) -> None:
    """Settle an overdue key."""


@pytest.mark.parametrize("on_abandon", [None, settle])
def test_a_view_whose_sender_the_completer_cannot_know_is_caught(
    on_abandon: Any, serve: Callable[..., None], sender: Sender
) -> None:
    """Each abandoned request would need a person, although a retry of the client runs it. The
    reaper settles no stuck key."""

    @idempotent(
        recovery_points=["ordered"],
        scope=lambda request: request.headers["X-Currency"],
        on_abandon=on_abandon,
    )
    def by_header(request: HttpRequest) -> HttpResponseBase:
        return order(request, "eur")

    serve(view=by_header)
    sender.client.logout()
    with pytest.raises(DoesNotSurvive, match="PREPARE_REQUEST"):
        assert_survives(lambda key: sender.send(key=key, headers=HEADERS), races=False)


def test_a_value_that_is_kept_is_enough(serve: Callable[..., None], sender: Sender) -> None:
    assert_survives(send_to(keeps_the_session, serve, sender), races=False)


@pytest.mark.parametrize(
    ("status", "everybody", "on_abandon"),
    [(404, True, None), (404, True, settle), (404, False, None), (403, True, settle)],
)
def test_a_refusal_before_any_effect_leaves_the_request_to_its_client(
    status: int, everybody: bool, on_abandon: Any, serve: Callable[..., None], sender: Sender
) -> None:
    @idempotent(recovery_points=["ordered"], on_abandon=on_abandon)
    def refuses(request: HttpRequest) -> HttpResponseBase:
        if everybody or "X-Currency" not in request.headers:
            return HttpResponse(status=status)
        key = request.idempotency_key
        for _ in key.phases():
            with atomic_phase(key) as phase:
                Entry.objects.create(name="made", idempotency_key=key)
                phase.set_response(JsonResponse({}, status=201))
        return key.response()

    assert_survives(send_to(refuses, serve, sender), races=False)


@pytest.mark.parametrize("on_abandon", [None, settle])
def test_a_request_whose_body_is_not_stored_is_left_to_its_client_or_to_on_abandon(
    on_abandon: Any, serve: Callable[..., None], sender: Sender
) -> None:
    @idempotent(recovery_points=["ordered"], on_abandon=on_abandon, store_body=False)
    def with_pin(request: HttpRequest) -> HttpResponseBase:
        return order(request, "eur")

    serve(view=with_pin)
    assert_survives(lambda key: sender.send(key=key, body={"pin": "1234"}), races=False)
