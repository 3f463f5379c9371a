"""``applies=``: which requests of a view are protected. ``tests/frameworks`` tests it in each
framework."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.urls import path

from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.policy import policies
from tests.kit.ageing import abandon
from tests.kit.commands import run
from tests.kit.serving import Sender, View, problem
from tests.kit.views import Counted, both_kinds, phased, plain, two_phases
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]

PREVIEW, ORDER = {"action": "preview"}, {"action": "place_order"}


def places_order(request: HttpRequest) -> bool:
    return json.loads(request.body)["action"] == "place_order"


def checkout(kind: Kind, work: Counted, **options: Any) -> View:
    """Return a view that protects only requests that place an order; others run ``work``
    unprotected."""
    if kind is plain:
        return idempotent(applies=places_order, **options)(work)
    order = phased(work).__wrapped__

    @idempotent(recovery_points=["unused"], applies=places_order, **options)
    def view(request: HttpRequest) -> HttpResponseBase:
        return work(request) if request.idempotency_key is None else order(request)

    return view


@both_kinds
@pytest.mark.parametrize("key", [None, "key-1"])
def test_a_request_to_which_it_does_not_apply_runs_each_time(
    key: str | None, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=checkout(kind, work := Counted()))
    answers = [sender.send(key=key, body=PREVIEW) for _ in range(2)]
    assert [(answer.status_code, "Idempotent-Replayed" in answer) for answer in answers] == [
        (201, False)
    ] * 2
    assert (work.runs, Entry.objects.filter(idempotency_key=None).count()) == (2, 2)
    assert not IdempotencyKey.objects.exists()


@both_kinds
def test_the_others_are_protected(kind: Kind, serve: Serve, sender: Sender) -> None:
    serve(view=checkout(kind, work := Counted()))
    sender.send(body=PREVIEW)
    assert problem(sender.send(key=None, body=ORDER))["code"] == "key_missing"
    first, again = (sender.send(body=ORDER) for _ in range(2))
    assert (first.status_code, again.content, again["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    assert work.runs == 2


def test_it_is_not_asked_for_a_safe_method_nor_for_the_request_of_the_completer(
    serve: Serve, sender: Sender
) -> None:
    asked: list[str] = []

    def applies(request: HttpRequest) -> bool:
        asked.append(request.method or "")
        return True

    down = [True]

    def call() -> None:
        if down:
            raise OSError(down.pop())

    serve(
        view=two_phases(
            lambda request: None,
            lambda request: HttpResponse(status=201),
            call=call,
            applies=applies,
        ),
        safe=idempotent(applies=applies)(lambda request: HttpResponse()),
    )
    assert sender.send("/safe/", method="GET").status_code == 200
    assert sender.send().status_code == 500
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert asked == ["POST"]


@pytest.mark.parametrize(
    ("error", "status"), [(Http404, 404), (PermissionDenied, 403), (LookupError, 500)]
)
def test_its_error_is_that_of_the_request(
    error: type[Exception], status: int, serve: Serve, sender: Sender
) -> None:
    def applies(request: HttpRequest) -> bool:
        raise error

    serve(view=plain(work := Counted(), applies=applies))
    assert sender.send().status_code == status
    assert work.runs == 0
    assert not IdempotencyKey.objects.exists()


@pytest.mark.parametrize("value", [None, "", "place_order", 1])
def test_a_value_that_is_no_bool_is_an_error(value: Any, serve: Serve, sender: Sender) -> None:
    """``request.POST.get("action")`` alone would protect each request that has an action."""
    serve(view=plain(work := Counted(), applies=lambda request: value))
    sender.client.raise_request_exception = True
    with pytest.raises(TypeError, match=f"applies.*Counted.* {type(value).__name__}"):
        sender.send()
    assert work.runs == 0


def test_what_is_not_protected_keeps_its_own_atomic_requests(
    serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: HttpRequest) -> HttpResponseBase:
        Entry.objects.create(name="half")
        raise LookupError("no such basket")

    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    serve(view=plain(fail, applies=places_order))
    assert sender.send(body=PREVIEW).status_code == 500
    assert not Entry.objects.exists()
    serve(view=plain(transaction.non_atomic_requests(fail), applies=places_order))
    assert sender.send(body=PREVIEW).status_code == 500
    assert Entry.objects.count() == 1


def test_it_stands_in_the_policy() -> None:
    urls = type(
        "Urls",
        (),
        {
            "urlpatterns": [
                path("", plain(Counted(), applies=places_order)),
                path("all", plain(Counted())),
            ]
        },
    )
    assert [policy.applies for policy in policies(urls)] == [
        "tests.request.test_applies.places_order",
        "",
    ]


urlpatterns = [path("checkout/", idempotent(applies=places_order)(lambda request: HttpResponse()))]


@pytest.mark.processes
def test_the_command_shows_it() -> None:
    done = run("describe_idempotency", "--urlconf", __name__)
    assert f"{__name__}.places_order" in done.stdout, done.stderr
