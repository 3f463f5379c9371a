"""Work that is killed before or after any statement: it takes effect once, or its key is stuck for
manual review."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as settings_of_django
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.test import Client
from django.urls import path
from pytest_django import Settings

from idempotency._abandonment import settle
from idempotency.decorators import idempotent
from idempotency.exceptions import MessageInProgress
from idempotency.inbox import process_once
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.factories import IdempotencyKeyFactory
from tests.kit import commands
from tests.kit.ageing import make_older
from tests.kit.waiting import eventually
from tests.models import Entry

pytestmark = [pytest.mark.postgres, pytest.mark.processes, pytest.mark.django_db(transaction=True)]


#: Where the world outside the database is written down: what is there, was done, whoever died of
#: it.
WORLD = "TEST_WORLD"


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


@idempotent(
    recovery_points=["begun", "texted"], scope=lambda request: "account:1", on_abandon=refund
)
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
                with key.call("sms", at_most_once=True) as call:
                    if call.due:
                        done_outside(key.idempotency_key)
                        call.record("receipt")
                with atomic_phase(key) as phase:
                    phase.set_recovery_point("texted")
            case "texted":
                with atomic_phase(key) as phase:
                    phase.set_response(JsonResponse({"receipt": key.downstream_calls.get().result}))
    return key.response()


def send_text(name: str) -> Any:
    """Send the request of this name to the view above; return its answer."""
    return Client().post(
        "/", {}, content_type="application/json", headers={"Idempotency-Key": name}
    )


def serve_texting(settings: Any) -> None:
    """Put the view above where ``send_text`` sends to."""
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("", texting)]})


def die_in() -> None:
    """Fork a child for each line ``WORK NAME NUMBER``, which is killed at its NUMBERth point before
    or after a statement."""
    from tests.conformance.dying import signal_at

    serve_texting(settings_of_django)
    works = {
        "deliver": deliver,
        "text": send_text,
        "settle": lambda pk: settle(int(pk), using="default"),
    }
    for line in sys.stdin:
        work, name, number = line.split()
        if not (child := os.fork()):
            signal_at(int(number))
            works[work](name)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


@pytest.fixture
def killed(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that does a work in a process that is killed at its n-th point; False when
    it has no such point."""
    monkeypatch.setenv(WORLD, str(tmp_path / "world"))
    (tmp_path / "world").touch()
    serve_texting(settings)
    code = (
        "import django; django.setup(); from tests.processes.test_killed_at_any_point import"
        " die_in; die_in()"
    )
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
        return (
            None
            if getattr(done, "status_code", 0) == 409 and done.json()["code"] == "key_in_use"
            else [done]
        )

    return eventually(attempt)[0]


def test_a_delivery_that_is_killed_at_any_point_takes_effect_once(killed: Any) -> None:
    number = 1
    while killed("deliver", f"d{number}", number):
        name = f"d{number}"
        unless_refused(partial(deliver, name))
        assert Entry.objects.filter(name=name).count() == 1
        number += 1
    assert number > 8


def test_a_run_that_is_killed_at_any_point_calls_once_or_a_person_hears_of_it(killed: Any) -> None:
    number, ends = 1, set()
    while killed("text", f"t{number}", number):
        name = f"t{number}"
        make_older(91, "locked_until")
        answer = unless_refused(partial(send_text, name))
        ends.add((answer.json().get("code", answer.status_code), world().count(name)))
        assert Entry.objects.filter(name=name).count() == 1
        number += 1
    assert number > 15
    assert ends == {(200, 1), ("key_stuck", 0), ("key_stuck", 1)}
    assert {key.stuck_code for key in IdempotencyKey.objects.exclude(stuck_at=None)} == {
        "call_in_doubt"
    }


def test_an_on_abandon_that_is_killed_at_any_point_runs_once_or_a_person_hears_of_it(
    killed: Any,
) -> None:
    number, ends = 1, set()
    while True:
        name = f"a{number}"
        key = IdempotencyKeyFactory(idempotency_key=name, request_path="/", recovery_point="begun")
        make_older(73 * 3600, "created_at")
        if not killed("settle", str(key.pk), number):
            break
        make_older(91, "locked_until")
        settle(key.pk, using="default")
        key.refresh_from_db()
        ends.add((key.response_code or key.stuck_code, world().count(name)))
        number += 1
    assert number > 5
    assert ends == {(410, 1), ("on_abandon", 0), ("on_abandon", 1)}
