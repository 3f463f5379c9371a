"""The machine-independent costs of an operation: statements, commits, round trips and WAL."""

from collections.abc import Callable
from itertools import count as numbers
from typing import Any

import pytest
from django.db import connection

from benchmarks.counts import Counts, count, count_least
from idempotency.models import IdempotencyKey
from tests.kit.database import messages
from tests.kit.tables import truncate
from tests.models import Account, Entry
from tests.operations import charge, note, pay

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

Call = Callable[[str], Any]
_numbers = numbers()


def plain(key: str) -> Any:
    return note.once(key, name=key)


def with_a_call(key: str) -> Any:
    return charge.once(key, name=key, cents=1)


def with_two_transactions(key: str) -> Any:
    return pay.once(key, name=key, cents=1)


@pytest.fixture(autouse=True)
def _tables(transactional_db: None) -> None:
    truncate(connection, IdempotencyKey, Entry, Account)
    # Statements are prepared after the fifth use.
    for call in (plain, with_a_call, with_two_transactions):
        for _ in range(8):
            call(f"before {next(_numbers)}")


def costs(call: Call) -> tuple[Counts, int]:
    """Return the costs of a first call, and its round trips."""
    return count(lambda: call("counted")), messages(lambda: call("traced"))


def costs_of_repeat(call: Call) -> tuple[Counts, int]:
    for _ in range(8):
        call("repeated")
    return count_least(lambda: call("repeated")), messages(lambda: call("repeated"))


@pytest.mark.parametrize(
    ("call", "statements", "commits"),
    [(plain, 3, 1), (with_a_call, 4, 2), (with_two_transactions, 8, 4)],
    ids=["plain", "with a call", "with two transactions"],
)
def test_costs_of_a_first_call(call: Call, statements: int, commits: int) -> None:
    counts, trips = costs(call)
    assert (len(counts.statements), counts.commits, trips) == (statements, commits, statements)


@pytest.mark.parametrize(
    ("call", "statements"),
    [(plain, 2), (with_a_call, 1), (with_two_transactions, 1)],
    ids=["plain", "with a call", "with two transactions"],
)
def test_costs_of_a_repeat(call: Call, statements: int) -> None:
    counts, trips = costs_of_repeat(call)
    assert (len(counts.statements), trips) == (statements, statements)
    assert (counts.wal_records, counts.wal_bytes, counts.rows_written) == (0, 0, 0)


def test_every_update_of_a_plain_key_is_hot() -> None:
    counts = [count(lambda: plain(f"key {next(_numbers)}")) for _ in range(20)]
    assert [(each.updates, each.hot_updates) for each in counts] == [(1, 1)] * 20


def test_the_only_update_of_a_key_with_a_call_finishes_it() -> None:
    counts = [count(lambda: with_a_call(f"key {next(_numbers)}")) for _ in range(20)]
    assert [each.updates for each in counts] == [1] * 20
