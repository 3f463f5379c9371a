"""Each model is compared in the database of its router; a write elsewhere, or to another table, is
not passed over."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from psycopg import sql
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.testing import CannotProve, DoesNotSurvive, assert_survives
from tests.kit.serving import Sender
from tests.models import Account, Entry

OTHER = "shard_b"

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.django_db(transaction=True, databases=["default", OTHER]),
]


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


def test_a_write_to_a_database_that_is_not_compared_proves_nothing(
    send: Callable[[str], Any],
) -> None:
    with pytest.raises(CannotProve, match=r"tests\.Account in the database 'shard_b'"):
        assert_survives(send, races=False)


def test_a_model_that_its_router_sends_there_is_compared(
    send: Callable[[str], Any], settings: Settings
) -> None:
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
        assert_survives(
            send, races=False, state=lambda: {"accounts": accounts.count()}, reset=empty
        )


@pytest.fixture
def legacy_table(transactional_db: None) -> Iterator[None]:
    """Create a table that no model describes, and one in another schema, for one test."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE legacy_entry (id bigserial PRIMARY KEY, name text)")
        cursor.execute('CREATE TABLE "legacy-log" (id bigserial PRIMARY KEY, name text)')
        cursor.execute("CREATE SCHEMA audit CREATE TABLE log (id bigserial PRIMARY KEY, name text)")
    yield
    with connection.cursor() as cursor:
        cursor.execute('DROP TABLE legacy_entry, "legacy-log"')
        cursor.execute("DROP SCHEMA audit CASCADE")


@pytest.mark.parametrize(
    ("table", "write"),
    [
        ("legacy_entry", "INSERT INTO legacy_entry (name) VALUES ('made')"),
        ("legacy_entry", """INSERT INTO public."legacy_entry" (name) VALUES ('made')"""),
        ("legacy_entry", "UPDATE ONLY legacy_entry SET name = ''"),
        ("legacy_entry", "TRUNCATE TABLE ONLY legacy_entry"),
        ("audit.log", """INSERT INTO "audit"."log" (name) VALUES ('made')"""),
        ("audit.log", "DELETE FROM ONLY audit.log"),
        ("legacy_entry", "INSERT INTO LEGACY_ENTRY (name) VALUES ('made')"),
        ("legacy_entry", "INSERT INTO /* the ledger */ legacy_entry (name) VALUES ('made')"),
        (
            "legacy_entry",
            sql.SQL("INSERT INTO {} (name) VALUES ('made')").format(sql.Identifier("legacy_entry")),
        ),
        ("legacy-log", """INSERT INTO "legacy-log" (name) VALUES ('made')"""),
    ],
)
def test_a_write_to_a_table_without_a_model_proves_nothing(
    serve: Callable[..., None], sender: Sender, legacy_table: None, table: str, write: Any
) -> None:
    @idempotent
    def view(request: HttpRequest) -> HttpResponseBase:
        with connection.cursor() as cursor:
            cursor.execute(write)
        return JsonResponse({}, status=201)

    serve(view=view)

    def send(key: str) -> Any:
        return sender.send(key=key)

    with pytest.raises(CannotProve, match=f"writes {table} in the database 'default'"):
        assert_survives(send, races=False)
    assert_survives(send, races=False, ignore=[table])


def test_a_model_s_table_may_be_written_with_its_schema(
    serve: Callable[..., None], sender: Sender
) -> None:
    @idempotent
    def view(request: HttpRequest) -> HttpResponseBase:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO public.tests_entry (name) VALUES ('made')")
        return JsonResponse({}, status=201)

    serve(view=view)
    assert_survives(lambda key: sender.send(key=key), races=False)
