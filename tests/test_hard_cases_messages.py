"""Messages, foreign calls and abandoned requests: cases that would cost money; known limits are marked as expected failures."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.conf import settings as settings_of_django
from django.db import connection, connections
from django.db.transaction import TransactionManagementError
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.test import Client
from django.urls import path
from pytest_django import Settings

from idempotency.abandonment import settle
from idempotency.completer import complete_once
from idempotency.decorators import idempotent
from idempotency.exceptions import MessageInProgress
from idempotency.inbox import process_once
from idempotency.models import IdempotencyKey, ProcessedMessage
from idempotency.phases import atomic_phase, foreign_call
from idempotency.reaper import reap_once
from tests.factories import IdempotencyKeyFactory
from tests.kit import commands
from tests.kit.ageing import make_older
from tests.kit.serving import Sender
from tests.kit.threads import background
from tests.kit.waiting import eventually
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


class Trouble(Exception):
    """What goes wrong in these tests."""


# A consumer on asyncio: its database calls share one thread, and so one connection


def consume(consumer: Callable[[], Any]) -> Any:
    """Run an async consumer to its end; the connection of its thread ends with it."""

    async def run() -> Any:
        try:
            return await consumer()
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(run())


@pytest.mark.postgres
def test_a_message_is_refused_while_another_task_of_the_thread_works_on_one() -> None:
    """Else the work on a message that was taken would be lost with that on the other, which fails."""

    async def failing(entered: asyncio.Event, other_done: asyncio.Event) -> None:
        async with process_once("queue", "1"):
            await Entry.objects.acreate(name="1")
            entered.set()
            await asyncio.wait_for(other_done.wait(), 60)
            raise Trouble

    async def consumer() -> None:
        entered, other_done = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(failing(entered, other_done))
        await entered.wait()
        with pytest.raises(RuntimeError):
            async with process_once("queue", "2"):
                pytest.fail("its work would be in the transaction of the other message")
        other_done.set()
        with pytest.raises(Trouble):
            await first

    consume(consumer)
    assert not Entry.objects.exists()
    assert not ProcessedMessage.objects.exists()


@pytest.mark.postgres
def test_messages_in_threads_of_their_own_know_nothing_of_each_other() -> None:
    """What a consumer that takes several messages at once must do."""

    async def take(name: str, fails: bool, all_entered: asyncio.Barrier) -> None:
        async with ThreadSensitiveContext():
            try:
                async with process_once("queue", name):
                    await Entry.objects.acreate(name=name)
                    await asyncio.wait_for(all_entered.wait(), 60)
                    if fails:
                        raise Trouble
            finally:
                await sync_to_async(connections.close_all)()

    async def consumer() -> list[Any]:
        all_entered = asyncio.Barrier(4)
        return await asyncio.gather(*(take(f"{n}", n % 2 == 1, all_entered) for n in range(4)), return_exceptions=True)

    assert [type(end) for end in asyncio.run(consumer())] == [type(None), Trouble] * 2
    assert sorted(Entry.objects.values_list("name", flat=True)) == ["0", "2"]


@pytest.mark.postgres
@pytest.mark.processes
def test_a_wait_for_a_message_that_was_cancelled_takes_no_other_message_with_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    def first_delivery() -> None:
        with suppress(Trouble), process_once("queue", "1"):
            entered.set()
            assert leave.wait(60)
            raise Trouble

    async def consumer() -> None:
        # The error is held, as a log or a monitor holds it, and with it the frames it went through.
        with pytest.raises(TimeoutError) as held:
            async with asyncio.timeout(0.3), process_once("queue", "1"):
                pytest.fail("the first delivery holds the message")
        leave.set()
        async with process_once("queue", "2"):
            await Entry.objects.acreate(name="2")
        assert held.value

    with background(first_delivery):
        assert entered.wait(60)
        consume(consumer)
    assert Entry.objects.filter(name="2").exists()


@pytest.mark.postgres
def test_an_end_that_was_cancelled_while_it_waited_for_the_thread_is_still_an_end() -> None:
    """Else the transaction stays open, and what others write after it is never committed."""

    async def consumer() -> None:
        begun, leave, at_its_end = threading.Event(), threading.Event(), asyncio.Event()

        def keep_the_thread() -> None:
            begun.set()
            assert leave.wait(60)

        async def take() -> None:
            async with process_once("queue", "1"):
                await Entry.objects.acreate(name="1")
                busy.append(asyncio.create_task(sync_to_async(keep_the_thread)()))
                while not begun.is_set():
                    await asyncio.sleep(0.01)
                at_its_end.set()

        busy: list[Any] = []
        taking = asyncio.create_task(take())
        await at_its_end.wait()
        for _ in range(3):  # Once is not enough to be impatient.
            taking.cancel()
            await asyncio.sleep(0.01)
        leave.set()
        with pytest.raises(asyncio.CancelledError) as held:
            await taking
        await busy[0]
        await Entry.objects.acreate(name="other work")
        async with process_once("queue", "2"):
            await Entry.objects.acreate(name="2")
        assert held.value

    consume(consumer)
    assert sorted(Entry.objects.values_list("name", flat=True)) == ["1", "2", "other work"]


# Code that ends the transaction behind Django's back


@pytest.mark.postgres
def test_a_message_whose_work_rolls_back_by_itself_fails_and_leaves_nothing() -> None:
    def legacy_job() -> None:
        with process_once("queue", "1") as first:
            if first:
                connection.cursor().execute("ROLLBACK")
                Entry.objects.create(name="paid")

    for _ in range(2):
        with pytest.raises(TransactionManagementError):
            legacy_job()
        assert not Entry.objects.exists()
        assert not ProcessedMessage.objects.exists()


# Processes that stand still, or are killed

TAKE_AND_STAND_STILL = """
import django, sys, threading
django.setup()
from django.conf import settings
from idempotency.inbox import process_once
settings.IDEMPOTENCY = {"INBOX_IDLE_SECONDS": 1}
with process_once("queue", "1"):
    print("taken", flush=True)
    threading.Event().wait()
"""


@pytest.mark.postgres
@pytest.mark.processes
def test_a_delivery_that_stands_still_does_not_hold_its_message_for_ever() -> None:
    with commands.start(python=TAKE_AND_STAND_STILL) as process:
        assert process.stdout.readline() == "taken\n"
        process.send_signal(signal.SIGSTOP)
        with process_once("queue", "1") as first:
            assert first


#: Where the world outside the database is written down: what is there, was done, whoever died of it.
WORLD = "HARD_CASES_WORLD"


def done_outside(what: str) -> None:
    """Do something that no database takes back."""
    with Path(os.environ[WORLD]).open("a") as world:
        world.write(f"{what}\n")


def deliver(message_id: str) -> bool:
    """Take a message of which an entry is to be made."""
    with process_once("queue", message_id) as first:
        if first:
            Entry.objects.create(name=message_id)
        return first


def refund(key: IdempotencyKey) -> HttpResponseBase:
    """Pay back what an abandoned request has cost."""
    done_outside(key.idempotency_key)
    return JsonResponse({"refunded": True}, status=410)


@idempotent(recovery_points=["begun", "texted"], scope=lambda request: "account:1", on_abandon=refund)
def texting(request: HttpRequest) -> HttpResponseBase:
    """Write an entry, text through a service that knows no keys, write another one."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    Entry.objects.create(name=key.idempotency_key)
                    phase.set_recovery_point("begun")
            case "begun":
                with foreign_call(key, "sms") as call:
                    if call.due:
                        done_outside(key.idempotency_key)
                        call.record("receipt")
                with atomic_phase(key) as phase:
                    phase.set_recovery_point("texted")
            case "texted":
                with atomic_phase(key) as phase:
                    phase.set_response(JsonResponse({"receipt": key.foreign_calls.get().result}))
    return key.response()


def send_text(name: str) -> Any:
    """Send the request of this name to the view above; return its answer."""
    return Client().post("/", {}, content_type="application/json", headers={"Idempotency-Key": name})


def serve_texting(settings: Any) -> None:
    """Put the view above where ``send_text`` sends to."""
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("", texting)]})


def die_in() -> None:
    """Fork a child for each line ``WORK NAME NUMBER``, which is killed at its NUMBERth point before or after a statement."""
    from tests.conformance.dying import _die_at

    serve_texting(settings_of_django)
    works = {"deliver": deliver, "text": send_text, "settle": lambda pk: settle(int(pk), using="default")}
    for line in sys.stdin:
        work, name, number = line.split()
        if not (child := os.fork()):
            _die_at(int(number))
            works[work](name)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


@pytest.fixture
def killed(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that does a work in a process that is killed at its n-th point; False when it has no such point."""
    monkeypatch.setenv(WORLD, str(tmp_path / "world"))
    (tmp_path / "world").touch()
    serve_texting(settings)
    code = "import django; django.setup(); from tests.test_hard_cases_messages import die_in; die_in()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=commands.environment(),
        cwd=settings.BASE_DIR,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def die(work: str, name: str, number: int) -> bool:
            process.stdin.write(f"{work} {name} {number}\n")
            process.stdin.flush()
            return int(process.stdout.readline()) == signal.SIGKILL

        yield die
        process.stdin.close()
        process.wait(60)


def world() -> list[str]:
    """Return what was done outside."""
    return Path(os.environ[WORLD]).read_text().split()


def unless_refused(work: Callable[[], Any]) -> Any:
    """Do the work again until nobody who has died is in the way: the database notices soon."""

    def attempt() -> Any:
        try:
            done = work()
        except MessageInProgress:
            return None
        return None if getattr(done, "status_code", 0) == 409 and done.json()["code"] == "key_in_use" else [done]

    return eventually(attempt)[0]


@pytest.mark.postgres
@pytest.mark.processes
def test_a_delivery_that_is_killed_at_any_point_takes_effect_once(killed: Any) -> None:
    number = 1
    while killed("deliver", f"d{number}", number):
        name = f"d{number}"
        unless_refused(partial(deliver, name))
        assert Entry.objects.filter(name=name).count() == 1
        number += 1
    assert number > 8


@pytest.mark.postgres
@pytest.mark.processes
def test_a_run_that_is_killed_at_any_point_calls_once_or_a_person_hears_of_it(killed: Any) -> None:
    number, ends = 1, set()
    while killed("text", f"t{number}", number):
        name = f"t{number}"
        make_older(91, "locked_at")
        answer = unless_refused(partial(send_text, name))
        ends.add((answer.json().get("code", answer.status_code), world().count(name)))
        assert Entry.objects.filter(name=name).count() == 1
        number += 1
    assert number > 15
    assert ends == {(200, 1), ("key_stuck", 0), ("key_stuck", 1)}
    assert {key.stuck_code for key in IdempotencyKey.objects.exclude(stuck_at=None)} == {"call_in_doubt"}


@pytest.mark.postgres
@pytest.mark.processes
def test_an_on_abandon_that_is_killed_at_any_point_runs_once_or_a_person_hears_of_it(killed: Any) -> None:
    number, ends = 1, set()
    while True:
        name = f"a{number}"
        key = IdempotencyKeyFactory(idempotency_key=name, request_path="/", recovery_point="begun")
        make_older(73 * 3600, "created_at")
        if not killed("settle", str(key.pk), number):
            break
        make_older(91, "locked_at")
        settle(key.pk, using="default")
        key.refresh_from_db()
        ends.add((key.response_code or key.stuck_code, world().count(name)))
        number += 1
    assert number > 5
    assert ends == {(410, 1), ("on_abandon", 0), ("on_abandon", 1)}


# Calls to services that know no keys


Serve = Callable[..., None]


def calling(block: Callable[[IdempotencyKey], Any], **options: Any) -> Any:
    """Return a view that runs ``block`` between its beginning and its only phase."""

    @idempotent(recovery_points=[], **options)
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            result = block(key)
            with atomic_phase(key) as phase:
                phase.set_response(JsonResponse({"result": result}))
        return key.response()

    return view


def test_a_request_whose_call_took_no_effect_is_not_finished(serve: Serve, sender: Sender) -> None:
    def refused(key: IdempotencyKey) -> Any:
        with foreign_call(key, "sms") as call:
            call.retryable()  # and forgets to raise
        return call.result

    serve(view=calling(refused))

    assert sender.send().status_code == 500


def test_two_calls_of_one_name_are_not_taken_for_one(serve: Serve, sender: Sender) -> None:
    sent: list[str] = []

    def text_both(key: IdempotencyKey) -> Any:
        for person in ("pilot", "rider"):
            with foreign_call(key, "sms") as call:
                if call.due:
                    sent.append(person)
                    call.record(person)

    serve(view=calling(text_both))

    assert (sender.send().status_code, sent) == (500, ["pilot"])


@pytest.mark.postgres
@pytest.mark.parametrize("result", [Decimal("20.00"), {"text": "a\0b"}, float("nan")], ids=str)
def test_a_call_that_returned_is_not_in_doubt(result: Any, serve: Serve, sender: Sender) -> None:
    def call_once(key: IdempotencyKey) -> None:
        with foreign_call(key, "sms") as call:
            if call.due:
                call.record(result)

    serve(view=calling(call_once))

    sender.send()
    sender.send()
    assert IdempotencyKey.objects.get().stuck_code != "call_in_doubt"


# The end of a request that nobody could finish


def test_a_call_in_doubt_is_not_settled_without_a_person(serve: Serve, sender: Sender) -> None:
    paid_out: list[int] = []

    def pay_out(key: IdempotencyKey) -> None:
        with foreign_call(key, "pay out") as call:
            if call.due:
                paid_out.append(2000)
                raise Trouble  # the line broke before the answer

    def cancel(key: IdempotencyKey) -> HttpResponseBase:
        return JsonResponse({"cancelled": "nothing was paid out"}, status=410)

    serve(view=calling(pay_out, on_abandon=cancel))
    sender.send()
    make_older(73 * 3600, "created_at", "last_run_at")
    reap_once()

    assert paid_out == [2000]
    assert sender.send().status_code == 409


def test_on_abandon_settles_what_the_completer_gave_up(serve: Serve, sender: Sender, settings: Settings) -> None:
    settings.IDEMPOTENCY = {"RETENTION_HOURS": 168}

    def down(key: IdempotencyKey) -> None:
        raise Trouble

    serve(view=calling(down, on_abandon=lambda key: JsonResponse({}, status=410)))
    sender.send()
    for _ in range(26):
        make_older(5 * 3600, "created_at", "last_run_at", "next_run_at")
        complete_once()
    make_older(168 * 3600, "created_at")
    reap_once()

    assert sender.send().status_code == 410


class OfTheShop:
    """The URLs of another host."""

    urlpatterns: list[Any] = []


def urls_by_host(get_response: Any) -> Any:
    """Choose the URLs by the host, as Django lets a middleware do."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        if request.get_host() == "shop.example.com":
            request.urlconf = OfTheShop
        return get_response(request)

    return middleware


@pytest.mark.parametrize("later", [complete_once, reap_once])
def test_a_request_of_another_host_is_not_ended_by_a_view_of_this_one(
    later: Callable[[], Any], serve: Serve, sender: Sender, settings: Settings
) -> None:
    ran: list[str] = []

    def down(key: IdempotencyKey) -> None:
        raise Trouble

    def here(key: IdempotencyKey) -> HttpResponseBase:
        ran.append("here")
        return JsonResponse({}, status=410)

    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.urls_by_host"]
    settings.ALLOWED_HOSTS = ["*"]
    serve(view=calling(here, on_abandon=here))
    OfTheShop.urlpatterns = [path("view/", calling(down))]
    assert sender.send(headers={"Host": "shop.example.com"}).status_code == 500
    make_older(73 * 3600, "created_at", "last_run_at", "next_run_at")
    later()

    assert ran == []
