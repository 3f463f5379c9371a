"""A call in doubt cannot be bypassed: not by a phase, by a call to another service, or by an
operator."""

import asyncio
import re
import threading
from contextlib import nullcontext, suppress
from html import unescape
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.db import DataError, OperationalError, connection, connections, transaction
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.utils.functional import lazystr
from django.views.decorators.csrf import csrf_exempt

from idempotency import interventions
from idempotency._engine import calls
from idempotency.admin.actions import TOO_LATE
from idempotency.completer import complete_once
from idempotency.decorators import idempotent
from idempotency.models import DownstreamCall, IdempotencyKey
from idempotency.phases import AtMostOnceCall, atomic_phase
from idempotency.reaper import reap_once
from rides_demo.urls import urlpatterns
from tests.factories import UserFactory
from tests.kit.ageing import make_older
from tests.kit.asgi import ask, run
from tests.kit.database import waits_for_a_lock
from tests.kit.serving import Sender, another_client, problem
from tests.kit.threads import Gate, background
from tests.kit.views import over_key
from tests.kit.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = "/admin/idempotency/idempotencykey/"


class Killed(BaseException):
    """Simulates the end of the process."""


@pytest.fixture
def charged() -> list[str]:
    """Return the charges that the services of a test have made."""
    return []


def finish(key: Any, body: str = "done", status: int = 200) -> None:
    """Store a response."""
    with atomic_phase(key) as phase:
        phase.set_response(HttpResponse(body, status=status))


def charge(key: Any, name: str, charged: list[str], end: BaseException | None = None) -> None:
    """Charge at one service; raise ``end``, if given, after the call took effect."""
    with key.call(name, at_most_once=True) as call:
        if call.due:
            charged.append(name)
            if end is not None:
                raise end
            call.record("paid")


def stuck_code() -> str:
    """Return the stuck code of the only key."""
    return IdempotencyKey.objects.get().stuck_code


def test_no_call_is_made_whose_begin_has_failed(serve: Any, sender: Sender) -> None:
    made: list[int] = []
    failures: list[Exception] = [DataError("refused")]

    def fail_once(execute: Any, sql: str, *arguments: Any) -> Any:
        if "call_begun_at = " in sql and failures:
            raise failures.pop()
        return execute(sql, *arguments)

    def pay(key: Any) -> None:
        with key.call("payment"):
            made.append(1)
        finish(key)

    serve(view=over_key(pay))
    with connection.execute_wrapper(fail_once):
        assert [sender.send().status_code for _ in range(2)] == [500, 200]
    assert (failures, made) == ([], [1])


def test_an_intent_that_appears_during_the_run_is_in_doubt_too(
    serve: Any, sender: Sender, charged: list[str]
) -> None:
    """After a failover a former run writes the intent that was lost."""

    def pay(key: Any) -> None:
        DownstreamCall.objects.create(key_id=key.pk, name="payment", token=uuid4())
        charge(key, "payment", charged)
        finish(key)

    serve(view=over_key(pay))
    assert problem(sender.send())["code"] == "key_stuck"
    assert (stuck_code(), charged) == ("call_in_doubt", [])


@pytest.mark.parametrize("by", ["its client", "the completer"])
def test_a_run_that_takes_another_way_is_stopped(
    by: str, serve: Any, sender: Sender, charged: list[str]
) -> None:
    rooms = [1]

    def book(key: Any) -> None:
        if rooms:
            charge(key, "payment", charged, Killed())
        finish(key, "not charged", 409)

    serve(view=over_key(book))
    with pytest.raises(Killed):
        sender.send()
    rooms.clear()
    if by == "its client":
        assert problem(sender.send())["code"] == "key_stuck"
    else:
        make_older(400, "created_at", "last_run_at")
        assert complete_once().stuck == 1
    assert stuck_code() == "call_in_doubt"


@pytest.mark.parametrize("end", [TimeoutError("no answer"), Killed()], ids=["no answer", "killed"])
def test_another_service_is_not_asked_instead(
    end: BaseException, serve: Any, sender: Sender, charged: list[str]
) -> None:
    def pay(key: Any) -> None:
        try:
            charge(key, "payment by A", charged, end)
        except Exception:
            charge(key, "payment by B", charged)
        finish(key)

    serve(view=over_key(pay))
    if isinstance(end, Killed):
        with pytest.raises(Killed):
            sender.send()
    assert problem(sender.send())["code"] == "key_stuck"
    assert (charged, stuck_code()) == (["payment by A"], "call_in_doubt")
    assert "'payment by A'" in IdempotencyKey.objects.get().stuck_reason


def test_a_doubt_outlives_the_retries_inside_the_process(
    serve: Any, sender: Sender, charged: list[str]
) -> None:
    """After a serialization failure the view runs again, and this time it skips the first
    service."""
    broken: list[str] = []

    def pay(key: Any) -> None:
        if not broken:
            with suppress(TimeoutError):
                charge(key, "payment by A", charged, TimeoutError("no answer"))
            broken.append("the breaker of A is open")
            raise OperationalError("database is locked")
        charge(key, "payment by B", charged)
        finish(key)

    serve(view=over_key(pay))
    assert problem(sender.send())["code"] == "key_stuck"
    assert (charged, stuck_code()) == (["payment by A"], "call_in_doubt")


def test_a_service_that_refused_and_one_that_is_under_way_are_no_doubt(
    serve: Any, sender: Sender, charged: list[str]
) -> None:
    def pay(key: Any) -> None:
        with key.call("payment", at_most_once=True) as outer:
            charge(key, "text", charged)
            if outer.due:
                outer.record("paid")
        with key.call("points", at_most_once=True) as refused:
            if refused.due:
                refused.record("refused")
        finish(key)

    serve(view=over_key(pay))
    assert sender.send().status_code == 200
    assert set(DownstreamCall.objects.values_list("name", "result")) == {
        ("payment", "paid"),
        ("text", "paid"),
        ("points", "refused"),
    }


def test_a_result_that_came_late_ends_the_doubt(
    serve: Any, sender: Sender, charged: list[str]
) -> None:
    gate = Gate()

    def pay(key: Any) -> None:
        with key.call("payment", at_most_once=True) as call:
            if call.due:
                gate.wait_here()
                call.record("paid")
        finish(key, call.result)

    serve(view=over_key(pay))
    with background(another_client(sender).send) as late:
        gate.wait_until_reached()
        make_older(91, "locked_until")
        refused = sender.send()
        gate.open()
        late.result(60)
    assert problem(refused)["code"] == "key_stuck"
    assert stuck_code() == "call_in_doubt"
    key = IdempotencyKey.objects.get()
    assert interventions.complete_now(key.pk, key.claim_token, by="jane") == "finished"
    assert sender.send().content == b"paid"


def test_a_doubt_that_is_over_when_the_call_is_asked_for_is_none(
    serve: Any, sender: Sender, charged: list[str]
) -> None:
    def pay(key: Any) -> None:
        if key.attempts == 1:
            charge(key, "payment", charged, Killed())
        # the late run gets its response
        DownstreamCall.objects.update(result="paid", recorded_at=Now())
        charge(key, "payment", charged)
        finish(key)

    serve(view=over_key(pay))
    with pytest.raises(Killed):
        sender.send()
    assert sender.send().status_code == 200
    assert charged == ["payment"]


def test_a_phase_inside_the_block_of_a_call_is_refused_and_the_result_kept(
    serve: Any, sender: Sender, charged: list[str]
) -> None:
    refused: list[type] = []

    def pay(key: Any) -> None:
        with key.call("payment", at_most_once=True) as call:
            if call.due:
                call.record("paid")
                with pytest.raises(RuntimeError) as caught:
                    finish(key)
                refused.append(caught.type)
        finish(key)

    serve(view=over_key(pay))
    assert sender.send().status_code == 200
    assert refused == [RuntimeError]
    assert DownstreamCall.objects.get().result == "paid"


def test_a_run_that_does_not_know_that_it_is_through_makes_no_call(
    serve: Any, sender: Sender, charged: list[str], monkeypatch: Any
) -> None:
    """COMMIT succeeded and its acknowledgement was lost: the view must not make the call that
    handles a failure."""

    def commit() -> None:
        monkeypatch.undo()
        connection.commit()
        raise OperationalError("server closed the connection unexpectedly")

    def buy(key: Any) -> None:
        try:
            with atomic_phase(key) as phase:
                monkeypatch.setattr(connections["default"], "commit", commit)
                phase.set_response(HttpResponse("ticket"))
        except OperationalError:
            charge(key, "refund", charged)

    serve(view=over_key(buy))
    assert sender.send().content == b"ticket"
    assert charged == []


def test_a_run_that_was_given_up_makes_no_call(
    serve: Any, sender: Sender, charged: list[str]
) -> None:
    """An operator reviews a key whose run seems dead; the displayed state must remain true."""
    gate = Gate()

    def pay(key: Any) -> None:
        gate.wait_here()
        charge(key, "payment", charged)
        finish(key)

    serve(view=over_key(pay))
    with background(another_client(sender).send) as late:
        gate.wait_until_reached()
        make_older(73 * 3600, "created_at", "last_run_at", "locked_until")
        assert reap_once().stuck == 1
        gate.open()
        assert problem(late.result(60))["code"] == "key_stuck"
    assert (charged, stuck_code()) == ([], "retention_passed")


class Troubled:
    """An object that raises ``error`` when it is used."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error

    __repr__ = __str__


def label(error: BaseException) -> Any:
    """Return a lazy text whose evaluation fails."""
    return lazystr(Troubled(error))


@pytest.mark.parametrize(
    ("error", "recorded"),
    [(KeyError("label"), True), (Killed(), False)],
    ids=["its own code fails", "time is over"],
)
def test_a_result_that_fails_to_become_json_is_never_kept_as_none(
    error: BaseException, recorded: bool, serve: Any, sender: Sender
) -> None:
    def pay(key: Any) -> None:
        with key.call("payment", at_most_once=True) as call:
            if call.due:
                call.record({"label": label(error)})
        finish(key)

    serve(view=over_key(pay))
    if isinstance(error, Killed):
        with pytest.raises(Killed):
            sender.send()
    else:
        assert sender.send().status_code == 500
    row = DownstreamCall.objects.get()
    assert (row.recorded_at is not None) is recorded
    assert bool(row.result) is recorded


@pytest.mark.parametrize(
    ("result", "kept"),
    [
        ("a\\u0000b", True),
        ("a\\\\u0000", True),
        ("a\0b", False),
        ("a\\\0b", False),
        ("\\\\\0", False),
    ],
)
def test_only_a_real_nul_is_refused(result: str, kept: bool) -> None:
    call = AtMostOnceCall("downstream key")
    with nullcontext() if kept else pytest.raises(TypeError):
        call.record([result])
    assert (call.result == [result]) is kept


@pytest.mark.postgres
def test_a_result_is_kept_when_the_database_comes_back(serve: Any, sender: Sender) -> None:
    name = connection.settings_dict["NAME"]
    back = threading.Event()

    def allow(value: bool) -> None:
        with connection._nodb_cursor() as cursor:
            cursor.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS {value}')
            if not value:
                cursor.execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname"
                    " = %s",
                    [name],
                )

    def come_back() -> None:
        threading.Event().wait(1.2)
        allow(True)
        back.set()

    def pay(key: Any) -> None:
        with key.call("payment", at_most_once=True) as call:
            if call.due:
                call.record("paid")
                allow(False)
                threading.Thread(target=come_back).start()

    serve(view=over_key(pay))
    try:
        sender.send()
    finally:
        assert back.wait(60)
    connection.close()
    assert DownstreamCall.objects.get().result == "paid"


@pytest.mark.parametrize(
    ("failures", "tries", "end"),
    [(0, 1, nullcontext()), (2, 3, nullcontext()), (3, 3, pytest.raises(OperationalError))],
)
def test_a_write_is_tried_until_it_is_done_and_given_up_when_the_database_stays_away(
    failures: int, tries: int, end: Any
) -> None:
    made: list[int] = []

    def write() -> None:
        made.append(1)
        if len(made) <= failures:
            raise OperationalError("the server is not there")

    with end:
        calls._write_through_outage(write, "default", retries=2)
    assert len(made) == tries


@pytest.mark.postgres
def test_a_call_whose_task_is_cancelled_before_its_block_is_no_doubt(
    serve: Any, transactional_db: None, charged: list[str]
) -> None:
    """The thread continues and commits the intent, although the event loop has cancelled the
    task."""
    gate = Gate()

    def hold_the_row() -> None:
        with transaction.atomic():
            IdempotencyKey.objects.select_for_update().get()
            gate.wait_here()

    def until_it_waits() -> None:
        eventually(waits_for_a_lock)
        connection.close()

    @csrf_exempt
    @idempotent(recovery_points=[], scope=lambda request: "everybody")
    async def view(request: HttpRequest) -> HttpResponse:
        async def pay() -> None:
            async with request.idempotency_key.call("payment", at_most_once=True):
                charged.append("payment")

        with background(hold_the_row):
            gate.wait_until_reached()
            task = asyncio.create_task(pay())
            await sync_to_async(until_it_waits, thread_sensitive=False)()
            task.cancel()
            await asyncio.sleep(0)
            gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        return HttpResponse(status=503)

    async def scenario() -> None:
        assert (await ask("/view/", "key-1"))[0] == 503

    serve(view=view)
    run(scenario)
    assert (charged, DownstreamCall.objects.count()) == ([], 0)


def boss() -> Client:
    """Return a client of a superuser, who may use each button."""
    client = Client()
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    return client


def test_the_admin_answers_what_the_person_saw_on_the_page_with_the_button(
    sender: Sender, charged: list[str], settings: Any
) -> None:
    up: list[bool] = []

    def pay(key: Any) -> None:
        if up:
            charge(key, "payment", charged)
        raise OSError("something else is down")

    settings.ROOT_URLCONF = type(
        "Urls", (), {"urlpatterns": [path("view/", over_key(pay)), *urlpatterns]}
    )
    assert sender.send().status_code == 500
    key, jane = IdempotencyKey.objects.get(), boss()
    page = jane.get(f"{KEYS}{key.pk}/change/").text
    link = unescape(re.search(r'href="([^"]*/press/answer/[^"]*)"', page)[1])  # type: ignore[index]
    question = jane.get(link).text
    hidden = {
        name: unescape(value)
        for name, value in re.findall(r'hidden" name="(seen|at|calls)" value="([^"]*)"', question)
    }
    up.append(True)
    make_older(400, "created_at", "last_run_at")
    assert complete_once().failed == 1
    assert str(TOO_LATE) in jane.get(link, follow=True).text
    answer = {**hidden, "status": 409, "kind": "text", "body": "nothing was done"}
    for step in ("preview", "store"):
        answered = jane.post(link, {**answer, "step": step, "previewed": "of now"}, follow=True)
        assert str(TOO_LATE) in answered.text
    assert IdempotencyKey.objects.get().finished_at is None


@pytest.mark.parametrize("seen", ["before the call", "during the call"])
def test_an_answer_is_refused_when_a_call_was_begun_or_recorded_since(
    seen: str, serve: Any, sender: Sender, charged: list[str]
) -> None:
    """The late run changes neither the claim nor the recovery point."""
    before, during = Gate(), Gate()

    def pay(key: Any) -> None:
        before.wait_here()
        with key.call("payment", at_most_once=True) as call:
            if call.due:
                charged.append("payment")
                during.wait_here()
                call.record("paid")
        raise OSError("after the payment")

    def look() -> tuple[Any, str]:
        key = IdempotencyKey.objects.get()
        return key, interventions.calls_of(key.pk)

    serve(view=over_key(pay))
    with background(another_client(sender).send) as late:
        before.wait_until_reached()
        key, calls = look()
        before.open()
        during.wait_until_reached()
        if seen == "during the call":
            key, calls = look()
        during.open()
        late.result(60)
    refusal = HttpResponse("not charged", status=409)
    answered = {"by": "jane", "at": "started"}
    assert not interventions.answer(key.pk, key.claim_token, refusal, calls=calls, **answered)  # type: ignore[arg-type]
    assert interventions.answer(key.pk, key.claim_token, refusal, calls=look()[1], **answered)  # type: ignore[arg-type]
