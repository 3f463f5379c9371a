"""A call to a service that is not idempotent is made once per key, or a person hears of it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse

from idempotency.decorators import idempotent
from idempotency.exceptions import CallNotRecorded
from idempotency.models import ForeignCall, IdempotencyKey
from idempotency.phases import MadeCall, atomic_phase, foreign_call
from tests.concurrency import Gate, background
from tests.serving import Sender, problem

pytestmark = pytest.mark.django_db(transaction=True)


class SmsService:
    """A service that sends what it is told, as often as it is told."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self) -> str:
        self.sent.append("sms")
        return f"receipt {len(self.sent)}"


class Trouble(Exception):
    """What goes wrong in these tests."""


def texting(block: Callable[[MadeCall], None], after: Callable[[], None] = lambda: None) -> Any:
    """Return a view that makes one foreign call with ``block``, then finishes with its result."""

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            with foreign_call(key, "sms") as call:
                block(call)
            after()
            with atomic_phase(key) as phase:
                phase.set_response(JsonResponse({"receipt": call.result}))
        return key.response()

    return view


def once(action: Callable[[], None]) -> Callable[[], None]:
    """Return ``action``, which does nothing from its second call on."""
    calls: list[int] = []

    def act() -> None:
        calls.append(1)
        if len(calls) == 1:
            action()

    return act


def fail() -> None:
    """Go wrong."""
    raise Trouble("out of luck")


def test_the_call_is_made_and_its_result_kept(serve: Any, sender: Sender) -> None:
    service = SmsService()
    serve(view=texting(lambda call: call.record(service.send())))
    assert sender.send().json() == {"receipt": "receipt 1"}
    row = ForeignCall.objects.get()
    assert (row.name, row.result) == ("sms", "receipt 1")
    assert row.recorded_at >= row.started_at


def test_a_retry_after_the_call_does_not_make_it_again(serve: Any, sender: Sender) -> None:
    service = SmsService()

    def block(call: MadeCall) -> None:
        if call.due:
            call.record(service.send())

    serve(view=texting(block, after=once(fail)))
    assert sender.send().status_code == 500
    assert sender.send().json() == {"receipt": "receipt 1"}
    assert len(service.sent) == 1


def test_a_result_recorded_before_an_error_is_kept(serve: Any, sender: Sender) -> None:
    service = SmsService()
    trouble = once(fail)

    def block(call: MadeCall) -> None:
        if call.due:
            call.record(service.send())
        trouble()

    serve(view=texting(block))
    assert [sender.send().status_code for _ in range(2)] == [500, 200]
    assert len(service.sent) == 1


def test_a_call_in_doubt_is_not_made_again_but_handed_to_a_person(serve: Any, sender: Sender) -> None:
    """The service may have sent the message before the line was cut."""
    service = SmsService()

    def block(call: MadeCall) -> None:
        service.send()
        fail()

    serve(view=texting(block))
    assert sender.send().status_code == 500
    answer = sender.send()
    assert (answer.status_code, problem(answer)["code"]) == (409, "key_stuck")
    assert len(service.sent) == 1
    assert IdempotencyKey.objects.get().stuck_code == "call_in_doubt"


def test_a_call_that_took_no_effect_is_made_again(serve: Any, sender: Sender) -> None:
    service = SmsService()
    refused = once(fail)

    def block(call: MadeCall) -> None:
        try:
            refused()
        except Trouble:
            call.retryable()
            raise
        call.record(service.send())

    serve(view=texting(block))
    assert [sender.send().status_code for _ in range(2)] == [500, 200]
    assert len(service.sent) == 1


def test_another_call_may_do_instead_of_one_that_was_put_off(serve: Any, sender: Sender) -> None:
    service = SmsService()

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponse:
        key = request.idempotency_key
        for _ in key.phases():
            with foreign_call(key, "first provider") as call:
                call.retryable()
            with foreign_call(key, "second provider") as call:
                if call.due:
                    call.record(service.send())
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse("sent"))
        return key.response()

    serve(view=view)
    assert [sender.send().status_code for _ in range(2)] == [200, 200]
    assert len(service.sent) == 1


def test_a_block_that_records_nothing_is_a_mistake(serve: Any, sender: Sender) -> None:
    serve(view=texting(lambda call: None))
    sender.client.raise_request_exception = True
    with pytest.raises(CallNotRecorded, match=r"call\.record"):
        sender.send()


def test_a_result_of_none_is_a_result(serve: Any, sender: Sender) -> None:
    service = SmsService()

    def block(call: MadeCall) -> None:
        if call.due:
            service.send()
            call.record()

    serve(view=texting(block, after=once(fail)))
    assert [sender.send().status_code for _ in range(2)] == [500, 200]
    assert len(service.sent) == 1


@pytest.mark.postgres
def test_a_serialization_failure_after_the_call_does_not_make_it_again(serve: Any, sender: Sender) -> None:
    service = SmsService()

    def lose_a_race() -> None:
        with connection.cursor() as cursor:
            cursor.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")

    def block(call: MadeCall) -> None:
        if call.due:
            call.record(service.send())

    serve(view=texting(block, after=once(lose_a_race)))
    assert sender.send().json() == {"receipt": "receipt 1"}
    assert len(service.sent) == 1


@pytest.mark.postgres
def test_a_late_result_is_recorded_after_a_takeover(serve: Any, sender: Sender) -> None:
    """The first run is inside its call when its lock expires: the retry must not call, and the result is not lost."""
    service, gate = SmsService(), Gate()

    def block(call: MadeCall) -> None:
        receipt = service.send()
        gate.wait_here()
        call.record(receipt)

    serve(view=texting(block))
    with background(sender.send) as first:
        gate.wait_until_reached()
        IdempotencyKey.objects.update(locked_at=Now() - timedelta(seconds=91))
        assert sender.send().status_code == 409
        assert IdempotencyKey.objects.get().stuck_code == "call_in_doubt"
        gate.open()
    assert first.result().status_code == 409
    assert ForeignCall.objects.get().result == "receipt 1"
    assert len(service.sent) == 1


def test_no_call_is_made_by_a_run_that_has_lost_its_key(serve: Any, sender: Sender) -> None:
    service = SmsService()

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        IdempotencyKey.objects.update(claim_token="8e03978e-40d5-43e8-bc93-6894a57f9324")
        with foreign_call(key, "sms") as call:
            call.record(service.send())
        raise AssertionError

    serve(view=view)
    assert sender.send().status_code == 409
    assert not service.sent
    assert not ForeignCall.objects.exists()


def test_a_foreign_call_cannot_stand_in_a_phase(serve: Any, sender: Sender) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        with atomic_phase(key) as phase:
            with pytest.raises(RuntimeError, match="nested"), foreign_call(key, "sms"):
                pass
            phase.set_response(JsonResponse({}))
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 200
