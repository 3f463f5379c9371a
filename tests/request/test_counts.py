"""The machine-independent costs of a protected request: statements, commits and WAL."""

from collections.abc import Iterator
from functools import wraps
from typing import Any, cast
from unittest.mock import patch

import pytest
from django.db import connection
from django.db.backends import utils
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from pytest_django import Settings
from sentry_sdk.integrations.django import install_sql_hook

from benchmarks import views
from benchmarks.counts import Counts, count, count_least, create_table
from idempotency._engine.phased_run import current_key
from idempotency.models import IdempotencyKey, StagedJob
from tests.kit.tables import truncate

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
def _table(transactional_db: None) -> Iterator[None]:
    truncate(connection, IdempotencyKey, StagedJob)
    create_table()
    for view in (views.bare, views.plain, views.ride):
        # The first request of a process also reads the catalogue, which is not part of the cost.
        for _ in range(2):
            view(views.request())
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE bench_row")


def first(view: views.View) -> Counts:
    """Return the costs of a request with a new key."""
    request = views.request()
    return count(lambda: view(request))


def replay(view: views.View) -> Counts:
    """Return the costs of a repeated request, after PostgreSQL has pruned the page that the first
    request wrote."""
    for _ in range(3):
        view(views.request("again"))
    counts = count_least(lambda: view(views.request("again")))
    assert view(views.request("again"))["Idempotent-Replayed"] == "true"
    return counts


def test_bare_view_is_one_statement_and_one_commit() -> None:
    counts = first(views.bare)
    assert (len(counts.statements), counts.commits, counts.rows_written) == (3, 1, 1)


def test_plain_view_adds_two_statements_and_no_commit() -> None:
    counts = first(views.plain)
    assert len(counts.besides_the_work) == 2
    assert len(counts.statements) == 3  # BEGIN with the claim, the work, the finish with COMMIT
    assert counts.commits == 1


@pytest.fixture
def _sentry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the SDK of Sentry patch Django for a test."""
    for owner, names in (
        (CursorWrapper, ("execute", "executemany")),
        (BaseDatabaseWrapper, ("connect", "_commit", "_rollback")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    install_sql_hook()


@pytest.mark.usefixtures("_sentry")
@pytest.mark.parametrize("view", [views.plain, views.ride], ids=["plain", "ride"])
def test_sentry_adds_no_statement(view: views.View, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_sentry() -> Counts:
        with monkeypatch.context() as patched:
            patched.setattr(CursorWrapper, "execute", CursorWrapper.execute.__wrapped__)  # type: ignore[attr-defined]
            return first(view)

    assert CursorWrapper.execute.__globals__ is not vars(utils)
    assert len(first(view).statements) == len(without_sentry().statements)


@pytest.mark.usefixtures("_sentry")
def test_a_package_beside_sentry_gets_each_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, seen = len(first(views.plain).statements), []
    with_sentry = CursorWrapper.execute

    @wraps(with_sentry)
    def outside(self: CursorWrapper, sql: Any, params: Any = None) -> Any:
        seen.append(sql)
        return with_sentry(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", outside)
    assert len(first(views.plain).statements) == alone + 2
    assert len([text for text in seen if "idempotency_idempotencykey" in text]) == 2
    install_sql_hook()  # now outside of the other package
    assert len(first(views.plain).statements) == alone + 2


def test_ride_is_four_commits() -> None:
    counts = first(views.ride)
    assert counts.commits == 4
    assert len(counts.besides_the_work) == 4  # the claim, and the end of each phase


def test_call_under_a_derived_key_is_one_statement_more() -> None:
    def with_a_call(key: IdempotencyKey) -> None:
        with key.call("charge"):
            pass

    cost = len(first(views.ride).statements)
    with patch.object(
        views, "charge", lambda: with_a_call(cast(IdempotencyKey, current_key.get()))
    ):
        counts = first(views.ride)
    assert (len(counts.statements), counts.commits) == (cost + 1, 5)
    assert (counts.updates, counts.hot_updates) == (4, 3)


def test_replay_of_a_plain_view_is_one_statement_in_a_transaction() -> None:
    claim, commit = replay(views.plain).statements
    assert (claim.partition(";")[0], commit) == ("BEGIN", "COMMIT")


def test_replay_of_a_phased_view_is_one_statement() -> None:
    assert len(replay(views.ride).statements) == 1


@pytest.mark.parametrize(
    ("view", "statements"), [(views.plain, 2), (views.ride, 1)], ids=["plain", "ride"]
)
def test_confirmed_replay_is_one_statement_more(
    view: views.View, statements: int, settings: Settings
) -> None:
    for value, more in ((False, 0), ("storage", 1)):
        settings.IDEMPOTENCY = {"CONFIRM_REPLICATED": value}
        counts = replay(view)
        assert len(counts.statements) == statements + more
        assert round(counts.wal_bytes, -2) == 100 * more


@pytest.mark.parametrize("view", [views.plain, views.ride], ids=["plain", "ride"])
def test_confirmation_adds_no_statement_to_a_first_request(
    view: views.View, settings: Settings
) -> None:
    costs = len(first(view).statements)
    settings.IDEMPOTENCY = {"CONFIRM_REPLICATED": "storage"}
    assert len(first(view).statements) == costs


@pytest.mark.parametrize("view", [views.plain, views.ride], ids=["plain", "ride"])
def test_replay_writes_nothing(view: views.View) -> None:
    counts = replay(view)
    assert (counts.wal_records, counts.wal_bytes, counts.rows_written) == (0, 0, 0)


def test_every_update_of_a_plain_key_is_hot() -> None:
    counts = [first(views.plain) for _ in range(20)]
    assert [(each.updates, each.hot_updates) for each in counts] == [(1, 1)] * 20


def test_every_update_of_a_phased_key_but_the_finish_is_hot() -> None:
    # The finish removes the key from the index of unfinished keys.
    counts = [first(views.ride) for _ in range(20)]
    assert [(each.updates, each.hot_updates) for each in counts] == [(3, 2)] * 20
