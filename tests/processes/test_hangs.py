"""A run that hangs occupies one thread of a loop. Its key is marked, and the process ends and is
started again."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest
from django.test import Client, override_settings
from pytest_django import Settings

from idempotency import interventions
from idempotency.completer import CompletePass, complete_once
from idempotency.models import DownstreamCall, IdempotencyKey, ProcessHeartbeat
from tests.kit import commands
from tests.kit.ageing import expire_lock, make_older, past_the_retention
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

#: The exit status that the reference documents.
HUNG = 3
COMPLETER = ["complete_keys", "--loop", "--interval", "0.1"]


@pytest.fixture(autouse=True)
def _views(settings: Settings) -> None:
    settings.ROOT_URLCONF = "tests.processes.hanging"


def leave(*keys: str, url: str = "/view/", lease: int = 2) -> None:
    """Leave keys that are abandoned at once, with the lease of the loop."""
    with override_settings(IDEMPOTENCY={"LOCK_TIMEOUT_SECONDS": lease}):
        for key in keys:
            assert Client().post(url, headers={"Idempotency-Key": key}).status_code == 503
    IdempotencyKey.objects.filter(idempotency_key__in=keys, attempts=1).update(refused_at=None)
    make_older(60, "created_at", "last_run_at")


def state(key: str) -> IdempotencyKey:
    return IdempotencyKey.objects.get(idempotency_key=key)


def is_finished(*keys: str) -> bool:
    return IdempotencyKey.objects.finished().filter(idempotency_key__in=keys).count() == len(keys)


def runs(key: str) -> bool:
    """Return whether the completer runs the key."""
    return state(key).attempts == 2 and state(key).locked_until is not None


def events(key: str) -> list[str]:
    return [event["event"] for event in state(key).history]


@contextmanager
def loop(*arguments: str, lease: int = 2) -> Iterator[Any]:
    """Run a loop with a short lease."""
    changes = {
        "DJANGO_SETTINGS_MODULE": "tests.processes.hanging_settings",
        "TEST_LOCK_TIMEOUT": str(lease),
    }
    with commands.start(*arguments, **changes) as process:
        yield process


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Return a function that starts a loop, which is killed after the test."""
    with ExitStack() as loops:
        yield lambda *arguments, lease=2: loops.enter_context(loop(*arguments, lease=lease))


@pytest.mark.processes
def test_one_run_that_hangs_delays_no_other_key_and_ends_the_process(start: Any) -> None:
    process = start(*COMPLETER, "--concurrency", "2", lease=4)
    leave("hang", lease=4)
    eventually(lambda: runs("hang"))
    for number in range(3):
        leave(f"good-{number}", lease=4)
        eventually(lambda number=number: is_finished(f"good-{number}"))
    assert runs("hang")
    eventually(lambda: "hung" in events("hang"))
    assert process.poll() is None
    leave("slow", lease=4)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == HUNG
    assert is_finished("slow"), "the process waits for a call that may be made once only"
    key = state("hang")
    assert (key.hangs, key.stuck_code, key.locked_until, key.attempts) == (1, "", None, 2)
    assert "hanging.py" in key.last_error
    assert "wait_for_the_provider" in errors
    assert (key.next_run_at - key.last_run_at).total_seconds() > 8, (
        "the next completer does not claim it at once"
    )


@pytest.mark.processes
def test_no_other_completer_claims_the_key_before_it_is_marked(start: Any) -> None:
    first = start(*COMPLETER)
    leave("hang")
    eventually(lambda: runs("hang"))
    start(*COMPLETER)
    leave("good")
    eventually(lambda: is_finished("good"))
    eventually(lambda: "hung" in events("hang"))
    assert first.wait(30) == HUNG
    until_mark = events("hang")[: events("hang").index("hung")]
    assert (until_mark.count("claimed"), "run lost" in until_mark) == (2, False)


@pytest.mark.processes
@pytest.mark.parametrize("query", ["query", "locked"])
def test_a_query_that_hangs_is_cancelled_and_the_process_stays(query: str, start: Any) -> None:
    process = start(*COMPLETER)
    leave(query)
    eventually(lambda: "hung" in events(query))
    leave("good")
    eventually(lambda: is_finished("good"))
    process.terminate()
    assert process.wait(30) == 0


@pytest.mark.processes
def test_after_three_hangs_the_key_is_stuck_and_the_worker_serves_the_others(start: Any) -> None:
    leave("hang", "good-1", "good-2", lease=1)
    process = start("idempotency_worker", "--complete-interval", "0.1", lease=1)
    eventually(lambda: state("hang").stuck_code == "hung", 90)
    leave("good-3", lease=1)
    eventually(lambda: is_finished("good-1", "good-2", "good-3"))
    assert events("hang").count("hung") == 3
    assert DownstreamCall.objects.count() == 3
    assert Client().post("/view/", headers={"Idempotency-Key": "hang"}).status_code == 409
    eventually(lambda: alive(process) == {"complete_keys", "enqueue_jobs", "reap_keys"})
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.count("complete_keys ended with the status 3") == 3


def alive(worker: Any) -> set[str]:
    """Return the loops of a worker that run and have a heartbeat."""
    pids = {child.pid for child in psutil.Process(worker.pid).children()}
    return {row.name for row in ProcessHeartbeat.objects.filter(pid__in=pids)}


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_a_bounded_time_for_a_run_that_hangs(number: int, start: Any) -> None:
    process = start(*COMPLETER)
    leave("hang")
    eventually(lambda: runs("hang"))
    process.send_signal(number)
    assert process.wait(30) == HUNG
    key = state("hang")
    assert (key.hangs, key.locked_until is not None) == (
        0,
        True,
    ), "its lease ends, and another run continues"


@pytest.mark.processes
def test_an_on_abandon_that_hangs_is_left_to_a_person_and_the_others_are_settled(
    start: Any,
) -> None:
    leave("hang", "good-1", "good-2", url="/undo/")
    past_the_retention()
    IdempotencyKey.objects.filter(idempotency_key="hang").update(
        created_at=state("good-1").created_at
    )
    with loop("reap_keys", "--loop", "--interval", "0.1") as process:
        eventually(lambda: "hung" in events("hang"))
        assert process.wait(30) == HUNG
    key = state("hang")
    assert (key.stuck_code, "hanging.py" in key.stuck_reason) == ("on_abandon", True)
    start("reap_keys", "--loop", "--interval", "0.1")
    eventually(lambda: is_finished("good-1", "good-2"))
    assert events("hang").count("hung") == 1


@pytest.mark.processes
def test_the_worker_starts_a_loop_again_that_was_killed(start: Any) -> None:
    process = start("idempotency_worker")
    eventually(lambda: len(alive(process)) == 3)
    (row,) = ProcessHeartbeat.objects.filter(name="complete_keys")
    psutil.Process(row.pid).kill()
    ProcessHeartbeat.objects.all().delete()
    eventually(lambda: "complete_keys" in alive(process))
    process.terminate()
    assert process.wait(30) == 0


@pytest.mark.processes
def test_the_loops_of_a_killed_worker_end(start: Any) -> None:
    process = start("idempotency_worker")
    eventually(lambda: len(alive(process)) == 3)
    children = psutil.Process(process.pid).children()
    process.kill()
    eventually(lambda: not any(child.is_running() for child in children))
    assert not ProcessHeartbeat.objects.exists()


def test_the_completer_waits_longer_than_a_client_for_a_lock_that_expired(
    settings: Settings,
) -> None:
    """The loop that holds the lock may still find that its run hangs."""
    leave("good", lease=90)
    IdempotencyKey.objects.update(
        created_at="2020-01-01T00:00Z", claim_token="7c9e6679-7425-40de-944b-e07fc1f90ae7"
    )
    for seconds in (91, 181, 224):
        expire_lock(seconds)
        assert not IdempotencyKey.objects.abandoned().exists()
        assert complete_once() == CompletePass()
    expire_lock(226)
    IdempotencyKey.objects.update(last_run_at="2020-01-01T00:00Z")
    assert complete_once() == CompletePass(finished=1)


def test_a_key_that_is_handed_back_may_hang_as_often_as_at_first() -> None:
    leave("good")
    IdempotencyKey.objects.update(
        hangs=3, stuck_at="2020-01-01T00:00Z", stuck_code="hung", stuck_reason="It hung."
    )
    key = state("good")
    assert interventions.hand_back(key.pk, key.claim_token, by="ann")
    assert (state("good").hangs, state("good").stuck_code) == (0, "")
