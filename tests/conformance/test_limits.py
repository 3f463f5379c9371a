"""Number 58: the limits of time that the project, its roles or the OPTIONS of a database set."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from pytest_django import Settings

from idempotency import inbox
from idempotency.exceptions import MessageInProgress
from idempotency.inbox import process_once
from tests.kit.serving import Sender
from tests.kit.threads import Gate, background, elsewhere
from tests.kit.views import View, both_kinds, phased
from tests.models import Entry

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]
Kind = Callable[..., View]
Serve = Callable[..., None]

LIMITS = (
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "statement_timeout",
    "transaction_timeout",
)
IDLE = "idle_in_transaction_session_timeout"
#: Milliseconds: no limit, a stricter one than any of the app, and a looser one.
NONE, STRICT, LOOSE = 0, 3_000, 86_400_000


def read() -> dict[str, int]:
    """Return the limits that hold now, in milliseconds."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT name, setting::int FROM pg_settings WHERE name = ANY(%s)", [[*LIMITS]]
        )
        return dict(cursor.fetchall())


@contextmanager
def role_with(milliseconds: int) -> Iterator[None]:
    """Give the role of the tests these limits in this database, on a new connection."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT format('ALTER ROLE %I IN DATABASE %I', current_user, current_database())"
        )
        (alter,) = cursor.fetchone()
        known = list(read())
        for name in known:
            cursor.execute(f"{alter} SET {name} = {milliseconds}")
    connection.close()
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            for name in known:
                cursor.execute(f"{alter} RESET {name}")
        connection.close()


def seen_by(kind: Kind, serve: Serve, sender: Sender, key: str) -> dict[str, int]:
    """Return the limits in the view or phase of a request."""
    seen: list[dict[str, int]] = []

    def work(request: HttpRequest) -> HttpResponseBase:
        seen.append(read())
        return HttpResponse(status=201)

    serve(view=kind(work))
    assert sender.send(key=key).status_code == 201
    return seen[0]


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "one by one"])
@pytest.mark.parametrize("limit", [NONE, STRICT, LOOSE], ids=["none", "strict", "loose"])
@both_kinds
def test_58_a_request_only_lowers_the_limits_of_the_role(
    kind: Kind, limit: int, merged: bool, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"MERGE_ROUND_TRIPS": merged}
    expected = dict.fromkeys(LIMITS, limit)
    own = {IDLE: 90_000} | ({"lock_timeout": 90_000} if kind is phased else {})
    if limit != STRICT:
        expected |= own
    with role_with(limit):
        before = read()
        for number in range(3):
            seen = seen_by(kind, serve, sender, f"key-{number}")
            assert seen == {name: expected[name] for name in seen}
        assert read() == before


@both_kinds
def test_58_the_limits_follow_the_lease_of_the_view(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    seen = seen_by(partial(kind, lease_seconds=600), serve, sender, "key")
    assert seen[IDLE] == 600_000
    assert kind is not phased or seen["lock_timeout"] == 600_000
    connection.close()


@both_kinds
def test_58_a_limit_that_changes_between_requests_is_not_raised(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    for number, limit in enumerate([STRICT, NONE, LOOSE, STRICT // 2, STRICT, NONE, NONE]):
        with connection.cursor() as cursor:
            cursor.execute(f"SET {IDLE} = {limit}")
            cursor.execute(f"SET lock_timeout = {limit}")
        seen = seen_by(kind, serve, sender, f"key-{number}")
        lowered = min(limit or 90_000, 90_000)
        assert (seen[IDLE], seen["lock_timeout"]) == (lowered, lowered if kind is phased else limit)
    connection.close()


@pytest.mark.parametrize(("limit", "idle"), [(NONE, 60_000), (STRICT, STRICT), (LOOSE, 60_000)])
def test_58_a_message_only_lowers_the_limits_of_the_role(
    limit: int, idle: int, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"INBOX_IDLE_SECONDS": 60}
    with role_with(limit):
        with process_once("stripe", "evt_1") as first:
            assert first
            seen = read()
        assert seen == dict.fromkeys(seen, limit) | {IDLE: idle}


def test_58_a_delivery_waits_for_another_one_no_longer_than_the_role_allows() -> None:
    gate = Gate()

    def deliver() -> None:
        with process_once("stripe", "evt_1"):
            gate.wait_here()

    with background(deliver):
        gate.wait_until_reached()
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '50ms'")
        began = time.monotonic()
        with pytest.raises(MessageInProgress), process_once("stripe", "evt_1"):
            pytest.fail("This delivery must not run.")
        waited = time.monotonic() - began
        gate.open()
    assert waited < inbox.WAIT_SECONDS
    connection.close()


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_58_the_limits_take_no_snapshot(isolation: Any, serve: Serve, sender: Sender) -> None:
    """What is committed before the first statement of a phase is seen in it, as after LOCK
    TABLE."""
    seen: list[int] = []

    def work(request: HttpRequest) -> HttpResponseBase:
        elsewhere(lambda: Entry.objects.create(name="before the first statement"))
        seen.append(Entry.objects.count())
        return HttpResponse(status=201)

    serve(view=phased(work, isolation=isolation))
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '3s'")
    for number in range(2):
        assert sender.send(key=f"key-{number}").status_code == 201
    assert seen == [1, 2]
    connection.close()
