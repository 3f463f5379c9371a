"""Anomalies between two requests with different keys at each level: the tables of
docs/explanation/isolation.md."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.db.models import F, Sum
from django.http import HttpRequest, HttpResponse, JsonResponse
from psycopg import IsolationLevel

from tests.kit.database import default_isolation, held_transaction, waits_for_a_lock
from tests.kit.serving import Sender, another_client
from tests.kit.threads import WAIT_SECONDS, Gate, at_once, elsewhere, in_background
from tests.kit.views import Counted, phased, plain
from tests.kit.waiting import eventually
from tests.models import Account, Entry

pytestmark = pytest.mark.postgres
PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "isolation.md").read_text()
LEVELS = ["read committed", "repeatable read", "serializable"]
Serve = Callable[..., None]


KINDS = {"plain": plain, "phased": phased}


class Meeting:
    """A point in a view where the first runs of two requests wait for each other; later runs do not
    wait."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._been_here = threading.local()

    def wait(self) -> None:
        """Return when both requests have reached this point."""
        if not hasattr(self._been_here, "once"):
            self._been_here.once = True
            self._barrier.wait(WAIT_SECONDS)


def name_of(request: HttpRequest) -> str:
    """Return the key that the client sent: "a" or "b"."""
    return str(request.idempotency_key.idempotency_key)


class Anomaly:
    """Two requests, "a" and "b", and a check whether their result is impossible in a serial
    execution."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.meeting = Meeting()
        for name in "ab":
            Account.objects.create(name=name, balance=100)

    def work(self, request: HttpRequest) -> HttpResponse:
        """Read, wait for the other request, then write a result of the read."""
        raise NotImplementedError

    def send(self, name: str) -> Any:
        """Send one of the two requests."""
        return another_client(self.sender).send(key=name, body={"name": name})

    def both(self) -> list[Any]:
        """Send both requests concurrently."""
        return at_once([lambda: self.send("a"), lambda: self.send("b")])


class LostUpdate(Anomaly):
    """Each request adds 10 to a balance that it has read."""

    def work(self, request: HttpRequest) -> HttpResponse:
        account = Account.objects.get(name="a")
        self.meeting.wait()
        account.balance += 10
        account.save()
        return HttpResponse()

    def happened(self) -> bool:
        assert [answer.status_code for answer in self.both()] == [200, 200]
        return Account.objects.get(name="a").balance == 110


class WriteSkew(Anomaly):
    """Each request takes 200 from its own account, if the sum of both accounts is at least 200."""

    def work(self, request: HttpRequest) -> HttpResponse:
        covered = Account.objects.aggregate(sum=Sum("balance"))["sum"] >= 200
        self.meeting.wait()
        if not covered:
            return HttpResponse(status=422)
        Account.objects.filter(name=name_of(request)).update(balance=F("balance") - 200)
        return HttpResponse()

    def happened(self) -> bool:
        answers = sorted(answer.status_code for answer in self.both())
        assert answers in ([200, 422], [200, 200])
        overdrawn: bool = Account.objects.aggregate(sum=Sum("balance"))["sum"] < 0
        assert overdrawn == (answers == [200, 200])
        return overdrawn


class DoubleBooking(Anomaly):
    """Each request takes a seat, if no row for this seat exists."""

    def work(self, request: HttpRequest) -> HttpResponse:
        taken = Entry.objects.filter(name="seat 1").exists()
        self.meeting.wait()
        if taken:
            return HttpResponse(status=422)
        Entry.objects.create(name="seat 1")
        return HttpResponse()

    def happened(self) -> bool:
        self.both()
        seats = Entry.objects.count()
        assert seats in (1, 2)
        return seats == 2


class ChangedRow(Anomaly):
    """One request reads a balance twice, and the other changes it in between."""

    def read(self) -> Any:
        return Account.objects.get(name="a").balance

    def write(self) -> None:
        Account.objects.filter(name="a").update(balance=F("balance") + 10)

    def work(self, request: HttpRequest) -> HttpResponse:
        if name_of(request) == "b":
            self.write()
            return HttpResponse()
        before = self.read()
        elsewhere(lambda: self.send("b"))
        return JsonResponse([before, self.read()], safe=False)

    def happened(self) -> bool:
        before, after = self.send("a").json()
        assert self.send("b")["Idempotent-Replayed"] == "true"
        return bool(before != after)


class Phantom(ChangedRow):
    """One request counts the seats twice, and the other takes a seat in between."""

    def read(self) -> Any:
        return Entry.objects.filter(name="seat 1").count()

    def write(self) -> None:
        Entry.objects.create(name="seat 1")


ANOMALIES: dict[str, type[Any]] = {
    "lost update": LostUpdate,
    "write skew across two keys": WriteSkew,
    "double booking": DoubleBooking,
    "changed row": ChangedRow,
    "phantom": Phantom,
}


def rows_of(heading: str) -> list[list[str]]:
    """Return the rows of the table that begins with ``heading``."""
    table = PAGE[PAGE.index(f"| {heading} |") :].partition("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]


PROMISES = {row[0]: dict(zip(LEVELS, row[2:], strict=True)) for row in rows_of("anomaly")}


def test_the_table_is_about_each_anomaly_and_level() -> None:
    assert list(PROMISES) == list(ANOMALIES)
    assert {promise for row in PROMISES.values() for promise in row.values()} == {
        "can happen",
        "cannot happen",
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("anomaly", ANOMALIES)
def test_the_table_of_anomalies_holds(
    anomaly: str, level: str, kind: str, serve: Serve, sender: Sender
) -> None:
    tried = ANOMALIES[anomaly](sender)
    serve(view=KINDS[kind](tried.work, isolation=level))
    assert tried.happened() is (PROMISES[anomaly][level] == "can happen")


# Protection below SERIALIZABLE


def add_in_the_database(request: HttpRequest) -> None:
    """Add in the UPDATE statement."""
    Account.objects.filter(name="a").update(balance=F("balance") + 10)


def lock_the_row(request: HttpRequest) -> None:
    """Lock the row before it is read."""
    account = Account.objects.select_for_update().get(name="a")
    account.balance += 10
    account.save()


def lock_all_that_was_read(request: HttpRequest) -> None:
    """Lock all rows that the decision depends on, not only the row that changes."""
    accounts = {
        account.name: account for account in Account.objects.select_for_update().order_by("pk")
    }
    if sum(account.balance for account in accounts.values()) >= 200:
        account = accounts[name_of(request)]
        account.balance -= 200
        account.save()


def name_it_uniquely(request: HttpRequest) -> None:
    """Let a unique constraint refuse the second row."""
    Account.objects.get_or_create(name="seat 1")


CURES: dict[str, tuple[Callable[[HttpRequest], None], Callable[[], bool]]] = {
    '`update(balance=F("balance") + 10)`': (
        add_in_the_database,
        lambda: Account.objects.get(name="a").balance == 120,
    ),
    "`select_for_update()` of the row": (
        lock_the_row,
        lambda: Account.objects.get(name="a").balance == 120,
    ),
    "`select_for_update()` of all rows that were read": (
        lock_all_that_was_read,
        lambda: Account.objects.aggregate(sum=Sum("balance"))["sum"] == 0,
    ),
    "a unique constraint": (
        name_it_uniquely,
        lambda: Account.objects.filter(name="seat 1").count() == 1,
    ),
}


def test_the_table_names_each_cure() -> None:
    assert [row[1] for row in rows_of("against")] == list(CURES)
    assert {row[0] for row in rows_of("against")} <= set(ANOMALIES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cure", CURES)
def test_the_second_waits_and_sees_what_the_first_did(
    cure: str, level: str, kind: str, serve: Serve, sender: Sender
) -> None:
    gate = Gate()
    step, right = CURES[cure]

    def work(request: HttpRequest) -> HttpResponse:
        step(request)
        gate.wait_here()
        return HttpResponse()

    tried = Anomaly(sender)
    serve(view=KINDS[kind](work, isolation=level))
    first = in_background(lambda: tried.send("a"))
    gate.wait_until_reached()
    second = in_background(lambda: tried.send("b"))
    eventually(waits_for_a_lock)
    gate.open()
    assert [answer.result(WAIT_SECONDS).status_code for answer in (first, second)] == [200, 200]
    assert right()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", [None, *LEVELS])
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_row_that_came_after_the_snapshot_is_found_by_another_run_whatever_the_settings_say(
    level: str, setting: str | None, kind: str, serve: Serve, sender: Sender, settings: Any
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        Account.objects.count()
        if counted.runs == 1:
            elsewhere(lambda: name_it_uniquely(request))
        name_it_uniquely(request)
        return HttpResponse()

    settings.IDEMPOTENCY = {"PHASE_ISOLATION": setting, "PLAIN_ISOLATION": setting}
    serve(view=KINDS[kind](counted := Counted(work), isolation=level))
    assert sender.send().status_code == 200
    assert counted.runs == 2


def close_with_pool() -> None:
    """Close the connection, and those that a pool keeps with the former options."""
    connection.close()
    if hasattr(connection, "close_pool"):
        connection.close_pool()


@contextmanager
def option_of_the_database(level: str) -> Iterator[None]:
    """Set the option ``isolation_level`` of the database, as a project does, for new
    connections."""
    options = connection.settings_dict["OPTIONS"]
    former = options.get("isolation_level")
    close_with_pool()
    options["isolation_level"] = getattr(IsolationLevel, level.replace(" ", "_").upper())
    try:
        yield
    finally:
        close_with_pool()
        del options["isolation_level"]
        if former is not None:
            options["isolation_level"] = former


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", [option_of_the_database, default_isolation])
@pytest.mark.parametrize(
    ("level", "runs"), [("read committed", 1), ("repeatable read", 2), ("serializable", 2)]
)
def test_level_that_the_project_sets_for_all_its_transactions_decides_what_is_run_again(
    level: str, runs: int, source: Callable[[str], Any], kind: str, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        Account.objects.count()
        if counted.runs == 1:
            elsewhere(lambda: name_it_uniquely(request))
        name_it_uniquely(request)
        return HttpResponse()

    serve(view=KINDS[kind](counted := Counted(work)))
    with source(level):
        assert sender.send().status_code == 200
    assert counted.runs == runs


# A lock that the transaction waits for


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", [None, *LEVELS])
def test_decision_after_a_lock_is_right_at_the_level_of_the_project(
    level: str | None, kind: str, serve: Serve, sender: Sender
) -> None:
    """Both sides lock the row of the last seat, and then count. Above READ COMMITTED the count is
    older than the lock."""

    def book(name: str) -> bool:
        Account.objects.select_for_update().get(name="row")
        if free := not Entry.objects.filter(name__startswith="seat").exists():
            Entry.objects.create(name=f"seat of {name}")
        return free

    def work(request: HttpRequest) -> HttpResponse:
        return HttpResponse(status=201 if book("the request") else 422)

    seats = 1 if (level or "read committed") == "read committed" else 2
    Account.objects.create(name="row")
    serve(view=KINDS[kind](work, **({} if level is None else {"isolation": level})))
    with held_transaction(lambda: book("other code")):
        answer = in_background(another_client(sender).send)
        eventually(waits_for_a_lock)
    assert answer.result(WAIT_SECONDS).status_code == (422 if seats == 1 else 201)
    assert Entry.objects.count() == seats


def test_the_same_key_never_meets_itself(serve: Serve, sender: Sender) -> None:
    gate = Gate()

    def work(request: HttpRequest) -> HttpResponse:
        gate.wait_here()
        Account.objects.update(balance=F("balance") + 10)
        return HttpResponse()

    Account.objects.create(name="a")
    serve(view=plain(counted := Counted(work), isolation="read committed"))
    first = in_background(another_client(sender).send)
    gate.wait_until_reached()
    assert sender.send().status_code == 409
    gate.open()
    assert first.result(WAIT_SECONDS).status_code == 200
    assert sender.send()["Idempotent-Replayed"] == "true"
    assert (counted.runs, Account.objects.get().balance) == (1, 10)
