"""``key.call()``: a call with a derived key renews the lease, is recorded before it is made, and is
visible to operators."""

import re
from contextlib import suppress
from html import unescape
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.test import Client
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency import interventions
from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from idempotency.reaper import ReapPass, reap_once
from idempotency.signals import key_conflict
from rides_demo.urls import urlpatterns
from tests.factories import UserFactory
from tests.kit.ageing import abandon, expire_lock, make_older
from tests.kit.asgi import ask, run
from tests.kit.serving import Sender, another_client, problem
from tests.kit.threads import Gate, background
from tests.kit.views import over_key

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = "/admin/idempotency/idempotencykey/"


def finish(key: IdempotencyKey, body: str = "done") -> None:
    """Store a response."""
    with atomic_phase(key) as phase:
        phase.set_response(HttpResponse(body))


def test_it_gives_the_derived_key_and_is_written_down_before_the_block(
    serve: Any, sender: Sender
) -> None:
    seen: list[Any] = []

    def pay(key: Any) -> None:
        derived = key.derive("charge", valid_seconds=60)
        make_older(80, "locked_until")
        before = IdempotencyKey.objects.get()
        with key.call("charge", valid_seconds=60) as call:
            row = IdempotencyKey.objects.get()
            seen.append(
                (
                    call.key == derived,
                    before.untouched,
                    row.untouched,
                    row.locked_until > before.locked_until,
                )
            )
            seen.append(
                (row.call_begun_at is not None, row.history[-1]["event"], row.history[-1]["detail"])
            )
        finish(key)

    serve(view=over_key(pay))
    assert sender.send().status_code == 200
    assert seen == [(True, True, False, True), (True, "call begun", "charge")]


def test_in_an_async_view(serve: Any, transactional_db: None) -> None:
    charged: list[str] = []

    @csrf_exempt
    @idempotent(recovery_points=[], scope=lambda request: "everybody")
    async def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        async for _ in key.aphases():
            async with key.call("charge") as call:
                charged.append(call.key)
            async with atomic_phase(key) as phase:
                phase.set_response(HttpResponse("done"))
        return key.response()

    async def scenario() -> None:
        assert (await ask("/view/", "key-1"))[0] == 200

    serve(view=view)
    run(scenario)
    key = IdempotencyKey.objects.get()
    assert len(charged) == 1
    assert [event["event"] for event in key.history] == ["claimed", "call begun", "finished"]


def test_it_is_neither_a_string_nor_a_call_that_can_be_recorded(serve: Any, sender: Sender) -> None:
    """A service that got the text of the call as its key would get another key in each attempt."""

    def pay(key: Any) -> None:
        with key.call("charge") as call:
            with pytest.raises(TypeError, match=r"call\.key"):
                f"{call}"
            assert call.key not in repr(call)
            for use in (
                lambda: call.due,
                lambda: call.result,
                lambda: call.record("paid"),
                lambda: call.retryable(),
            ):
                with pytest.raises(AttributeError, match="at_most_once=True"):
                    use()
        finish(key)

    serve(view=over_key(pay))
    assert sender.send().status_code == 200


def test_past_its_validity_nothing_is_begun(serve: Any, sender: Sender) -> None:
    def pay(key: Any) -> None:
        with key.call("charge", valid_seconds=-1):
            raise AssertionError

    serve(view=over_key(pay))
    assert problem(sender.send())["code"] == "key_stuck"
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.call_begun_at) == ("downstream_key_expired", None)


@pytest.mark.parametrize("end", ["answered", "taken over", "left to a retry", "given up"])
def test_a_late_run_does_not_begin_to_charge(end: str, serve: Any, sender: Sender) -> None:
    """The run is paused before its call. Then an operator stores a response, a retry takes over,
    the completer finds an inactive user, or the reaper gives up."""
    gate, charges, conflicts = Gate(), [], []

    def pay(key: Any) -> None:
        gate.wait_here()
        with key.call("charge"):
            charges.append(key.attempts)
        finish(key)

    def listen(code: str, **kwargs: Any) -> None:
        conflicts.append(code)

    key_conflict.connect(listen)

    serve(view=over_key(pay))
    with background(another_client(sender).send) as late:
        gate.wait_until_reached()
        make_older(91, "locked_until")
        key = IdempotencyKey.objects.get()
        if end == "answered":
            seen = {"at": key.recovery_point, "calls": interventions.calls_of(key.pk)}
            assert interventions.answer(
                key.pk, key.claim_token, HttpResponse(status=410), by="jane", **seen
            )
        elif end == "taken over":
            assert sender.send().status_code == 200
        elif end == "left to a retry":
            get_user_model().objects.update(is_active=False)
            abandon()
            expire_lock()
            assert complete_once() == CompletePass(stuck=1)
        else:
            make_older(73 * 3600, "created_at")
            assert reap_once() == ReapPass(stuck=1)
        gate.open()
        told = late.result(60).status_code
    assert (told, charges) == {
        "answered": (410, []),
        "taken over": (200, [2]),
        "left to a retry": (409, []),
        "given up": (409, []),
    }[end]
    codes = {"left to a retry": ["key_in_use"], "given up": ["key_stuck"]}
    assert conflicts == codes.get(end, [])


def test_an_answer_is_refused_when_a_call_was_begun_since_the_person_looked(
    serve: Any, sender: Sender
) -> None:
    before, during = Gate(), Gate()

    def pay(key: Any) -> None:
        before.wait_here()
        with key.call("charge"):
            during.wait_here()
        raise OSError("after the payment")

    def looked() -> dict[str, Any]:
        return {"by": "jane", "at": "started", "calls": interventions.calls_of(key.pk)}

    serve(view=over_key(pay))
    refusal = HttpResponse("not charged", status=409)
    with background(another_client(sender).send) as late:
        before.wait_until_reached()
        key = IdempotencyKey.objects.get()
        seen = looked()
        before.open()
        during.wait_until_reached()
        make_older(91, "locked_until")
        assert not interventions.answer(key.pk, key.claim_token, refusal, **seen)
        assert interventions.answer(key.pk, key.claim_token, refusal, **looked())
        during.open()
        late.result(60)


def test_the_admin_says_which_call_was_begun_and_when(sender: Sender, settings: Any) -> None:
    def pay(key: Any) -> None:
        if key.attempts == 1:
            with key.call("charge"):
                pass
            raise OSError
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse("done"))

    settings.ROOT_URLCONF = type(
        "Urls", (), {"urlpatterns": [path("view/", over_key(pay)), *urlpatterns]}
    )
    sender.send()
    jane, key = Client(), IdempotencyKey.objects.get()
    jane.force_login(UserFactory(is_staff=True, is_superuser=True))
    page = jane.get(f"{KEYS}{key.pk}/change/").text
    assert re.search(r"call charge begun [\d.]+ m?s ago", page)
    link = unescape(re.search(r'href="([^"]*/press/answer/[^"]*)"', page)[1])  # type: ignore[index]
    assert re.search(r"call charge begun [\d.]+ m?s ago", jane.get(link).text)
    assert sender.send().status_code == 200
    assert "call charge begun" not in jane.get(f"{KEYS}{key.pk}/change/").text.replace(
        "<strong>call begun", ""
    )


def test_beside_a_call_in_doubt_nothing_is_begun(serve: Any, sender: Sender) -> None:
    charged: list[int] = []

    def pay(key: Any) -> None:
        try:
            with key.call("charge", at_most_once=True):
                raise TimeoutError
        except TimeoutError:
            with key.call("charge"):
                charged.append(1)

    serve(view=over_key(pay))
    assert problem(sender.send())["code"] == "key_stuck"
    assert (charged, IdempotencyKey.objects.get().stuck_code) == ([], "call_in_doubt")


def test_in_a_phase_it_is_refused(serve: Any, sender: Sender) -> None:
    def pay(key: Any) -> None:
        with atomic_phase(key), key.call("charge"):
            raise AssertionError

    serve(view=over_key(pay))
    assert sender.send().status_code == 500
    assert IdempotencyKey.objects.get().last_error.startswith("RuntimeError")


def test_after_the_stored_response_it_is_refused(serve: Any, sender: Sender) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))
        with pytest.raises(RuntimeError, match="finished"), key.call("charge"):
            raise AssertionError
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 201


def test_without_a_phased_request_it_is_refused(serve: Any, sender: Sender) -> None:
    @idempotent
    def plain(request: HttpRequest) -> HttpResponse:
        with pytest.raises(RuntimeError), request.idempotency_key.call("charge"):
            pass
        return HttpResponse("done")

    serve(view=plain)
    assert sender.send().status_code == 200


def overdue(serve: Any, sender: Sender, on_abandon: Any) -> None:
    """Create a key past its retention, whose view has ``on_abandon``."""

    @idempotent(recovery_points=[], on_abandon=on_abandon)
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(status=503)

    serve(view=view)
    sender.send()
    make_older(73 * 3600, "created_at", "last_run_at")


def test_on_abandon_makes_its_calls_in_it(serve: Any, sender: Sender) -> None:
    refunds: list[str] = []

    def give_back(key: IdempotencyKey) -> HttpResponse:
        with key.call("refund") as call:
            refunds.append(call.key)
        return HttpResponse("given back", status=410)

    overdue(serve, sender, give_back)
    assert reap_once() == ReapPass(settled=1)
    assert (len(refunds), sender.send().status_code) == (1, 410)


def test_on_abandon_makes_a_call_at_most_once(serve: Any, sender: Sender) -> None:
    refunds: list[str] = []

    def give_back(key: IdempotencyKey) -> HttpResponse:
        with key.call("refund", at_most_once=True) as call:
            if call.due:
                refunds.append("refunded")
                call.record(len(refunds))
        return HttpResponse(f"refund {call.result}", status=410)

    overdue(serve, sender, give_back)
    assert reap_once() == ReapPass(settled=1)
    assert (refunds, sender.send().content) == (["refunded"], b"refund 1")


def test_on_abandon_does_not_finish_a_key_whose_call_is_in_doubt(
    serve: Any, sender: Sender
) -> None:
    def give_back(key: IdempotencyKey) -> HttpResponse:
        with suppress(TimeoutError), key.call("refund", at_most_once=True):
            raise TimeoutError
        return HttpResponse("given back", status=410)

    overdue(serve, sender, give_back)
    assert reap_once() == ReapPass(stuck=1)
    key = IdempotencyKey.objects.get()
    assert (key.stuck_code, key.finished_at) == ("on_abandon", None)
    assert "CallInDoubt" in key.stuck_reason


def test_on_abandon_makes_no_call_in_a_transaction(serve: Any, sender: Sender) -> None:
    """A rollback would erase that the call was begun."""

    def give_back(key: IdempotencyKey) -> HttpResponse:
        with transaction.atomic(), key.call("refund"):
            raise AssertionError

    overdue(serve, sender, give_back)
    assert reap_once() == ReapPass(stuck=1)
    key = IdempotencyKey.objects.get()
    assert key.stuck_reason.startswith("on_abandon failed: RuntimeError: ")
    assert "transaction.atomic()" in key.stuck_reason


def test_an_on_abandon_that_comes_late_begins_no_call(serve: Any, sender: Sender) -> None:
    refunds: list[str] = []

    def give_back(key: IdempotencyKey) -> HttpResponse:
        row = IdempotencyKey.objects.get()
        assert interventions.answer(row.pk, row.claim_token, HttpResponse(status=410), by="jane")
        with key.call("refund") as call:
            refunds.append(call.key)
        return HttpResponse("given back", status=410)

    overdue(serve, sender, give_back)
    assert reap_once() == ReapPass()
    assert refunds == []
