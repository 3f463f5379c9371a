"""Numbers O5 and O6: operations in real processes, which are killed, or stopped past their lease,
before and after each exchange with the server and each transfer at the bank."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError
from pytest_django import Settings

from idempotency.exceptions import InProgress
from idempotency.models import IdempotencyKey
from tests.kit.ageing import abandon, expire_lock
from tests.kit.commands import environment
from tests.kit.faulty_service import FaultyService, serving
from tests.kit.waiting import eventually
from tests.models import Account, Entry
from tests.once.calling import Ended, Order, call
from tests.operations import book, pay

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]

#: The states that a dead process may leave: the recovery point, and the numbers of bookings,
#: transfers and accounts.
WHOLE = {
    "pay": {
        ("no row", 0, 0, 0),
        ("started", 0, 0, 0),
        ("booked", 1, 0, 0),
        ("booked", 1, 1, 0),
        ("finished", 1, 1, 1),
    },
    "book": {("no row", 0, 0, 0), ("finished", 1, 0, 0)},
}
OPERATIONS = {"pay": pay, "book": book}
LEASE_SECONDS = 2


class Caller:
    """A process that follows orders."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def __call__(self, order: Order | int, *, callers: int = 1) -> list[Ended]:
        """Give an order, and return the end of each call."""
        said = order if isinstance(order, int) else asdict(order)
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()
        return [Ended(**json.loads(self._process.stdout.readline())) for _ in range(callers)]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyService]:
    """Run the bank, on a socket."""
    with serving() as service:
        monkeypatch.setenv("TEST_BANK_URL", service.url)
        yield service


@pytest.fixture
def caller(service: FaultyService) -> Iterator[Caller]:
    """Return a process that calls operations."""
    with subprocess.Popen(
        [sys.executable, "-c", "from tests.once.calling import main; main()"],
        env=environment(),
        cwd=settings.BASE_DIR,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Caller(process)
        process.stdin.close()
        process.wait(60)


@pytest.fixture
def short_lease(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the locks of keys expire soon, here and in the process that calls."""
    monkeypatch.setenv("TEST_LEASE_SECONDS", str(LEASE_SECONDS))
    settings.IDEMPOTENCY = settings.IDEMPOTENCY | {"LOCK_TIMEOUT_SECONDS": LEASE_SECONDS}


def arguments_of(operation: str, number: int) -> dict[str, Any]:
    """Return arguments that no other call has."""
    arguments: dict[str, Any] = {"name": f"number {number}"}
    return arguments | ({"cents": 1000 + number} if operation == "pay" else {})


def state(operation: str, number: int, service: FaultyService) -> tuple[str, int, int, int]:
    """Return the state of the call with a number."""
    arguments = arguments_of(operation, number)
    row = IdempotencyKey.objects.filter(idempotency_key=f"key {number}").first()
    return (
        row.recovery_point if row else "no row",
        Entry.objects.filter(name__endswith=arguments["name"]).count(),
        sum(done.endswith(f" {arguments.get('cents')}".encode()) for done in service.done.values()),
        Account.objects.filter(name=arguments["name"]).count(),
    )


def repeated(operation: str, number: int, way: str = "once") -> Any:
    """Return the result of a repeat, as soon as no dead process is in its way."""
    arguments = arguments_of(operation, number)

    def attempt() -> Any:
        try:
            return [call(way, OPERATIONS[operation], f"key {number}", arguments)]
        except (InProgress, OperationalError):
            # The server may end the transaction of a stopped process later than the wait for it.
            return None

    return eventually(attempt)[0]


def completed(number: int) -> None:
    """Let the completer finish the key, if there is something to finish."""

    def attempt() -> bool:
        keys = IdempotencyKey.objects.filter(idempotency_key=f"key {number}", finished_at=None)
        if not keys.exists() or call("completer", None, f"key {number}", {}) == "finished":
            return True
        abandon()  # A run that waited for a lock of the stopped process delays the next one.
        return False

    eventually(attempt)


def check(operation: str, number: int, service: FaultyService, way: str = "once") -> None:
    """Check that a call had one effect and has one result."""
    result = repeated(operation, number, way)
    assert repeated(operation, number) == result
    assert state(operation, number, service) == max(WHOLE[operation], key=lambda s: s[1:])
    if operation == "pay":
        assert isinstance(result["transfer"], int)


@pytest.mark.parametrize("by_completer", [False, True], ids=["repeat", "completer"])
@pytest.mark.parametrize(
    ("operation", "way"),
    [
        pytest.param("pay", "once", marks=pytest.mark.sample),
        ("pay", "aonce"),
        ("pay", "command"),
        ("book", "once"),
    ],
)
def test_o06_killed_at_any_point_it_has_one_effect_and_one_result(
    operation: str, way: str, by_completer: bool, caller: Caller, service: FaultyService
) -> None:
    left, number = set(), 0
    while True:
        number += 1
        order = Order(
            way=way,
            operation=operation,
            key=f"key {number}",
            arguments=arguments_of(operation, number),
            at=number,
        )
        (end,) = caller(order)
        left.add(state(operation, number, service))
        if end.how != "killed":
            break
        abandon()
        expire_lock()
        if by_completer:
            completed(number)
        check(operation, number, service, way)
    assert end.how == "returned"
    assert end.value == repeated(operation, number)
    assert left == WHOLE[operation]
    assert number > (16 if operation == "pay" else 6)


def test_o06_a_completer_that_is_killed_at_any_point_is_repeated(
    caller: Caller, service: FaultyService
) -> None:
    def killed(way: str, number: int, at: int) -> Ended:
        order = Order(
            way=way,
            operation="pay",
            key=f"key {number}",
            arguments=arguments_of("pay", number),
            at=at,
        )
        (end,) = caller(order)
        abandon()
        expire_lock()
        return end

    claimed = 1
    while killed("once", 0, claimed) and state("pay", 0, service)[0] == "no row":
        claimed += 1
    end, number = Ended("killed"), 0
    while end.how == "killed":
        number += 1
        assert killed("once", number, claimed) == Ended("killed")
        end = killed("completer", number, number)
        check("pay", number, service)
    assert end == Ended("returned", "finished")
    assert number > 14


@pytest.mark.parametrize("by_completer", [False, True], ids=["repeat", "completer"])
@pytest.mark.parametrize("operation", ["pay", "book"])
def test_o05_stopped_past_its_lease_it_is_taken_over_and_fenced(
    operation: str,
    by_completer: bool,
    short_lease: None,
    caller: Caller,
    service: FaultyService,
) -> None:
    ends, number = set(), 0
    while True:
        number += 1
        order = Order(
            way="once",
            operation=operation,
            key=f"key {number}",
            arguments=arguments_of(operation, number),
            signal=signal.SIGSTOP,
            at=number,
        )
        (end,) = caller(order)
        if end.how != "stopped":
            break
        # The server ends the transaction of a silent session, and its locks, after the lease.
        abandon()
        expire_lock()
        if by_completer:
            completed(number)
        result = repeated(operation, number)
        (late,) = caller(end.value)
        assert late in (Ended("returned", result), Ended("raised", "Unavailable"))
        ends.add(late.how)
        check(operation, number, service)
    assert end.how == "returned"
    assert "returned" in ends or operation == "book"


@pytest.mark.parametrize(
    ("operation", "way"),
    [
        pytest.param("pay", "once", marks=pytest.mark.sample),
        ("pay", "aonce"),
        ("pay", "command"),
        ("book", "once"),
    ],
)
def test_o04_of_eight_callers_at_once_one_runs_and_each_gets_its_result(
    operation: str, way: str, caller: Caller, service: FaultyService
) -> None:
    for number in range(5):
        order = Order(
            way=way,
            operation=operation,
            key=f"key {number}",
            arguments=arguments_of(operation, number),
            callers=8,
        )
        ends = caller(order, callers=8)
        result = repeated(operation, number)
        for end in ends:
            assert end in (Ended("returned", result), Ended("raised", "InProgress"))
        assert Ended("returned", result) in ends
        check(operation, number, service)
