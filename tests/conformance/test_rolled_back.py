"""Number 50: what a plain view did to its request, session and messages goes with what it wrote to
the database."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import IntegrityError, OperationalError, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from psycopg.errors import SerializationFailure
from pytest_django import Settings
from rest_framework.exceptions import NotFound, Throttled
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency.decorators import idempotent
from idempotency.http import not_stored
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender, View
from tests.kit.views import Counted, plain
from tests.models import Entry

Serve = Callable[..., None]


def conflict(request: HttpRequest) -> HttpResponse:
    """Fail as PostgreSQL does when two transactions cannot be put in an order."""
    raise OperationalError("conflict") from SerializationFailure()


def raising(error: Exception) -> Callable[[HttpRequest], HttpResponse]:
    """Return an end that raises."""

    def end(request: HttpRequest) -> HttpResponse:
        raise error

    return end


def broken_reference(request: HttpRequest) -> HttpResponse:
    """Fail at COMMIT."""
    Entry.objects.create(name="broken", idempotency_key_id=-1)
    return HttpResponse(status=201)


ENDS: dict[str, tuple[Callable[[HttpRequest], HttpResponse], int]] = {
    "401": (lambda request: HttpResponse(status=401), 401),
    "403": (lambda request: HttpResponse(status=403), 403),
    "403 raised": (raising(PermissionDenied()), 403),
    "429": (lambda request: HttpResponse(status=429), 429),
    "503": (lambda request: HttpResponse(status=503), 503),
    "500 raised": (raising(OSError("on purpose")), 500),
    "not stored": (lambda request: not_stored(HttpResponse(status=202)), 202),
    "each try conflicts": (conflict, 409),
    "COMMIT fails": (broken_reference, 500),
    "a constraint fails": (raising(IntegrityError("on purpose")), 500),
}


class Shop:
    """A cart in the session, an order that takes it, and a middleware that notes what is left of
    the request."""

    def __init__(self, end: Callable[[HttpRequest], HttpResponse]) -> None:
        self.ends = [end]
        self.left: list[dict[str, Any]] = []

    def fill(self, request: HttpRequest) -> HttpResponseBase:
        request.session["cart"] = {"jetpacks": [1]}
        return HttpResponse()

    def order(self, request: HttpRequest) -> HttpResponse:
        """Take the cart, tell the user, and end as the test says; in later runs with what was
        ordered."""
        cart = request.session["cart"]
        ordered = cart.pop("jetpacks", None)
        request.session.modified = True
        request.session["ordered"] = True
        messages.success(request, "Ordered.")
        request.META["seen"] = request.user.first_name = request.seen = "by the view"  # type: ignore[attr-defined]
        Entry.objects.create(name="order")
        if self.ends:
            return self.ends[0](request)
        return JsonResponse(
            {"ordered": ordered, "told": len(messages.get_messages(request))}, status=201
        )

    def outside(self, get_response: View) -> View:
        """Note what a middleware finds when the view is through."""

        def middleware(request: HttpRequest) -> HttpResponseBase:
            response = get_response(request)
            found = {name: getattr(request, name, None) for name in ("seen", "idempotency_key")}
            self.left.append(
                found | {"META": request.META.get("seen"), "user": request.user.first_name}
            )
            return response

        return middleware


UNTOUCHED = {"seen": None, "idempotency_key": None, "META": None, "user": ""}


def served(shop: Shop, view: View, serve: Serve, sender: Sender, settings: Settings) -> None:
    """Serve the shop, and fill the cart."""
    globals()["outside"] = shop.outside
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.outside"]
    settings.IDEMPOTENCY = {"SERIALIZATION_RETRIES": 1}
    serve(view=view, fill=shop.fill)
    assert sender.client.get("/fill/").status_code == 200
    shop.left.clear()


@pytest.mark.parametrize("end", ENDS)
def test_50_rolled_back_view_leaves_session_messages_and_request_as_they_were(
    end: str, serve: Serve, sender: Sender, settings: Settings
) -> None:
    shop = Shop(ENDS[end][0])
    served(shop, plain(work := Counted(shop.order)), serve, sender, settings)
    assert sender.send().status_code == ENDS[end][1]
    assert not Entry.objects.exists()
    assert dict(sender.client.session.items()).items() >= {"cart": {"jetpacks": [1]}}.items()
    assert "ordered" not in sender.client.session
    assert shop.left == [UNTOUCHED]
    runs = work.runs
    shop.ends.clear()
    second = sender.send()
    assert (second.status_code, json.loads(second.content)) == (201, {"ordered": [1], "told": 1})
    assert work.runs == runs + 1
    assert sender.client.session["cart"] == {}


@pytest.mark.parametrize(("error", "status"), [(NotFound, 404), (Throttled, 429)])
def test_50_view_of_rest_framework_leaves_them_too(
    error: type[Exception], status: int, serve: Serve, sender: Sender, settings: Settings
) -> None:
    shop = Shop(raising(error()))

    class Orders(APIView):
        @idempotent
        def post(self, request: Any) -> Response:
            shop.order(request._request)
            return Response()

    served(shop, Orders.as_view(), serve, sender, settings)
    assert sender.send().status_code == status
    assert sender.client.session["cart"] == {"jetpacks": [1]}
    key = IdempotencyKey.objects.first()  # The answer of NotFound is stored.
    assert shop.left == [UNTOUCHED | {"idempotency_key": key}]


def test_50_answer_of_an_exception_is_stored_and_what_the_view_did_is_not(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    shop = Shop(raising(Http404()))
    served(shop, plain(shop.order), serve, sender, settings)
    assert [sender.send().status_code for _ in range(2)] == [404, 404]
    assert sender.client.session["cart"] == {"jetpacks": [1]}
    assert not Entry.objects.exists()


@pytest.mark.parametrize("error", [OSError, Http404])
def test_50_hook_that_fails_after_commit_undoes_nothing(
    error: type[Exception], serve: Serve, sender: Sender, settings: Settings
) -> None:
    def end(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(lambda: raising(error())(request))
        return HttpResponse(status=201)

    shop = Shop(end)
    served(shop, plain(shop.order), serve, sender, settings)
    sender.send()
    assert shop.left[0]["seen"] == "by the view"
    assert Entry.objects.count() == 1
