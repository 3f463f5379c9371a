"""Each model is compared in the database of its router; a write elsewhere, or to another table, is not passed over."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.testing import CannotProve, DoesNotSurvive, assert_survives
from tests.kit.serving import Sender
from tests.models import Account, Entry

OTHER = "shard_b"

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True, databases=["default", OTHER])]


class Router:
    """Sends accounts to the other database."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        """Return the other database for accounts."""
        return OTHER if model is Account else None

    db_for_read = db_for_write


@idempotent
def writes_elsewhere(request: HttpRequest) -> HttpResponseBase:
    """Write a row in another database, which has a transaction of its own."""
    Account.objects.using(OTHER).create(name=f"account {Account.objects.using(OTHER).count()}")
    Entry.objects.create(name="made")
    return JsonResponse({}, status=201)


@pytest.fixture
def send(serve: Callable[..., None], sender: Sender) -> Callable[[str], Any]:
    """Return what sends a request to the view."""
    serve(view=writes_elsewhere)
    return lambda key: sender.send(key=key)


def test_a_write_to_a_database_that_is_not_compared_proves_nothing(send: Callable[[str], Any]) -> None:
    with pytest.raises(CannotProve, match=r"tests\.Account in the database 'shard_b'"):
        assert_survives(send, races=False)


def test_a_model_that_its_router_sends_there_is_compared(send: Callable[[str], Any], settings: Settings) -> None:
    settings.DATABASE_ROUTERS = [Router()]
    with pytest.raises(DoesNotSurvive, match=r"rows of tests\.Account"):
        assert_survives(send, races=False)
    assert not Account.objects.exists()


def test_a_model_that_is_ignored_may_be_written_anywhere(send: Callable[[str], Any]) -> None:
    assert_survives(send, races=False, ignore=["tests.Account"])


def test_a_state_of_the_test_replaces_the_comparison(send: Callable[[str], Any]) -> None:
    accounts = Account.objects.using(OTHER)

    def empty() -> None:
        accounts.all().delete()

    with pytest.raises(DoesNotSurvive, match="state / accounts"):
        assert_survives(send, races=False, state=lambda: {"accounts": accounts.count()}, reset=empty)


@idempotent
def writes_without_a_model(request: HttpRequest) -> HttpResponseBase:
    """Write a row to a table that no model describes."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO legacy_entry (name) VALUES ('made')")
    return JsonResponse({}, status=201)


@pytest.fixture
def legacy_table(transactional_db: None) -> Iterator[None]:
    """Create the table for one test."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE legacy_entry (id bigserial PRIMARY KEY, name text)")
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE legacy_entry")


def test_a_write_to_a_table_without_a_model_proves_nothing(
    serve: Callable[..., None], sender: Sender, legacy_table: None
) -> None:
    serve(view=writes_without_a_model)

    def send(key: str) -> Any:
        return sender.send(key=key)

    with pytest.raises(CannotProve, match="legacy_entry in the database 'default'"):
        assert_survives(send, races=False)
    assert_survives(send, races=False, ignore=["legacy_entry"])
