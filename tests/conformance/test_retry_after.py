"""Number 54: a response that asks to be retried is not stored, and what is stored keeps
``Retry-After`` in its replay."""

from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from pytest_django import Settings
from rest_framework.exceptions import APIException
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from idempotency.reaper import reap_once
from tests.kit.ageing import abandon, past_the_retention
from tests.kit.serving import Sender, View
from tests.kit.views import Counted, phased, phased_outside, plain
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]

ASKING = [409, 423, 429, 503]
outside = pytest.mark.parametrize("kind", [plain, phased_outside])


def asking(status: int, when: str = "5") -> HttpResponse:
    """Return a response that asks to be retried."""
    return HttpResponse("later", status=status, headers={"Retry-After": when})


@outside
@pytest.mark.parametrize("status", ASKING)
@pytest.mark.parametrize("when", ["5", "Wed, 25 Nov 2026 21:00:00 GMT"])
def test_54_returned_response_is_not_stored(
    status: int, when: str, kind: Kind, serve: Serve, sender: Sender
) -> None:
    answers = iter([asking(status, when), HttpResponse(status=404)])
    serve(view=kind(work := Counted(lambda request: next(answers))))
    first = sender.send()
    assert (first.status_code, first["Retry-After"]) == (status, when)
    assert [sender.send().status_code for _ in range(2)] == [404, 404]
    assert work.runs == 2


@outside
@pytest.mark.parametrize("status", [409, 423])
def test_54_without_retry_after_it_is_stored(
    status: int, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted(lambda request: HttpResponse(status=status))))
    assert [sender.send().status_code for _ in range(2)] == [status, status]
    assert work.runs == 1


@outside
@pytest.mark.parametrize("status", [202, 303, 400, 402, 404, 410, 422])
def test_54_another_response_is_stored_with_it(
    status: int, kind: Kind, serve: Serve, sender: Sender
) -> None:
    if status < 400 and kind is phased_outside:
        kind = phased
    serve(view=kind(work := Counted(lambda request: asking(status))))
    first, replayed = sender.send(), sender.send()
    assert (replayed.status_code, replayed["Retry-After"]) == (status, first["Retry-After"])
    assert (replayed["Idempotent-Replayed"], work.runs) == ("true", 1)


@outside
@pytest.mark.parametrize("status", [429, 503])
def test_54_settings_that_store_the_status_do_not_store_it(
    status: int, kind: Kind, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"STORE_5XX": True, "NEVER_STORED_STATUSES": [401]}
    serve(
        asking=kind(asks := Counted(lambda request: asking(status))),
        final=kind(final := Counted(lambda request: HttpResponse(status=status))),
    )
    assert [sender.send("/asking/").status_code for _ in range(2)] == [status, status]
    assert [sender.send("/final/", "key-2").status_code for _ in range(2)] == [status, status]
    assert (asks.runs, final.runs) == (2, 1)


@pytest.mark.parametrize("store_5xx", [False, True])
@pytest.mark.parametrize("status", ASKING)
def test_54_response_that_a_phase_stores_is_stored(
    status: int, store_5xx: bool, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"STORE_5XX": store_5xx}
    serve(view=phased(work := Counted(lambda request: asking(status))))
    stored = status < 500 or store_5xx
    replayed = [sender.send() for _ in range(2)][1]
    assert replayed.status_code == (status if stored else 500)
    assert work.runs == (1 if stored else 2)
    assert replayed.get("Retry-After") == ("5" if stored else None)


def test_54_after_a_phase_the_retry_continues(serve: Serve, sender: Sender) -> None:
    """Such a response is no mistake of the view, as another 4xx there is."""
    answers = iter([asking(409)])

    @idempotent(recovery_points=["between"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for recovery_point in key.phases():
            if recovery_point == "started":
                with atomic_phase(key) as phase:
                    Entry.objects.create(name="first")
                    phase.set_recovery_point("between")
            elif (answer := next(answers, None)) is not None:
                return answer
            else:
                with atomic_phase(key) as phase:
                    phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 409
    key = IdempotencyKey.objects.get()
    assert (key.recovery_point, key.locked_until, key.stuck_at, "409" in key.last_error) == (
        "between",
        None,
        None,
        True,
    )
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert (sender.send().status_code, Entry.objects.count()) == (201, 1)


def test_54_before_a_phase_it_is_the_clients_alone(serve: Serve, sender: Sender) -> None:
    serve(view=phased_outside(work := Counted(lambda request: asking(423))))
    assert sender.send().status_code == 423
    abandon()
    assert (complete_once(), work.runs) == (CompletePass(), 1)
    past_the_retention()
    assert not IdempotencyKey.objects.stuck().exists()


def test_54_completer_gets_it_and_tries_again(serve: Serve, sender: Sender) -> None:
    answers = iter([asking(503), asking(409)])

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            if (answer := next(answers, None)) is not None:
                return answer
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 503
    abandon()
    assert complete_once() == CompletePass(failed=1)
    abandon(2)
    assert complete_once() == CompletePass(finished=1)
    assert sender.send().status_code == 201


def test_54_what_an_exception_handler_answers_is_not_stored(serve: Serve, sender: Sender) -> None:
    class Locked(APIException):
        status_code, wait = 423, 5

    runs = []

    class View(APIView):
        @idempotent(scope=lambda request: "one")
        def post(self, request: Any) -> Response:
            Entry.objects.create(name="made")
            runs.append(1)
            if len(runs) == 1:
                raise Locked
            return Response(status=201)

    serve(view=View.as_view())
    first = sender.send()
    assert (first.status_code, first["Retry-After"]) == (423, "5")
    assert ([sender.send().status_code for _ in range(2)], len(runs), Entry.objects.count()) == (
        [201, 201],
        2,
        1,
    )


def test_54_response_of_on_abandon_is_stored(serve: Serve, sender: Sender) -> None:
    serve(
        view=phased_outside(
            lambda request: HttpResponse(status=503), on_abandon=lambda key: asking(409)
        )
    )
    assert sender.send().status_code == 503
    past_the_retention()
    assert reap_once().settled == 1
    assert (sender.send().status_code, sender.send()["Retry-After"]) == (409, "5")
