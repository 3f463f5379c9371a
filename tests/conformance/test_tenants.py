"""Number 51: tenants that have a schema each, in one database."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponseBase
from pytest_django import Settings

from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import WAIT_SECONDS, Gate, in_background
from tests.kit.views import both_kinds, create, phased, plain
from tests.models import Entry

Serve = Callable[..., None]

pytestmark = pytest.mark.postgres
TABLES = (IdempotencyKey._meta.db_table, Entry._meta.db_table)


class TenantMiddleware:
    """Choose the schema of the tenant whom a header names, as django-tenants does by the host."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Look for tables in the tenant's schema first, then in the shared one."""
        with connection.cursor() as cursor:
            cursor.execute("SET search_path TO %s, public", [request.headers["X-Tenant"]])
        try:
            return self.get_response(request)
        finally:
            with connection.cursor() as cursor:
                cursor.execute("RESET search_path")


@pytest.fixture
def tenants(transactional_db: None, settings: Settings) -> Iterator[None]:
    """Make schemas: ``one`` and ``two`` have tables of keys and entries; ``three`` and ``four`` use
    those of ``public``."""
    schemas = ("one", "two", "three", "four")
    with connection.cursor() as cursor:
        for schema in schemas:
            cursor.execute(f"CREATE SCHEMA {schema}")
        for schema in schemas[:2]:
            for table in TABLES:
                cursor.execute(f"CREATE TABLE {schema}.{table} (LIKE public.{table} INCLUDING ALL)")
    settings.MIDDLEWARE = [f"{__name__}.TenantMiddleware", *settings.MIDDLEWARE]
    yield
    with connection.cursor() as cursor:
        for schema in schemas:
            cursor.execute(f"DROP SCHEMA {schema} CASCADE")


def made_in(schema: str) -> int:
    """Return how many entries the schema has."""
    with connection.cursor() as cursor:
        cursor.execute(f"TABLE {schema}.{Entry._meta.db_table}")
        return len(cursor.fetchall())


def stopping(gate: Gate) -> Callable[[HttpRequest], HttpResponseBase]:
    """Return work whose first run stops at the gate."""

    def work(request: HttpRequest) -> HttpResponseBase:
        response = create(request)
        gate.wait_here()
        return response

    return work


@both_kinds
@pytest.mark.parametrize("body", [{"a": 1}, {"a": 2}], ids=["same body", "other body"])
def test_51_one_key_of_two_tenants_is_two_keys(
    body: Any, kind: Callable[..., View], tenants: None, serve: Serve, sender: Sender
) -> None:
    gate = Gate()
    serve(view=kind(stopping(gate)))
    running = in_background(
        lambda: another_client(sender).send(body={"a": 1}, headers={"X-Tenant": "one"})
    )
    gate.wait_until_reached()
    other = another_client(sender)
    met = in_background(lambda: other.send(body=body, headers={"X-Tenant": "two"})).result(
        WAIT_SECONDS
    )
    gate.open()
    assert [answer.status_code for answer in (met, running.result(WAIT_SECONDS))] == [201, 201]
    assert (made_in("one"), made_in("two")) == (1, 1)


@pytest.mark.parametrize(("running_kind", "asking_kind"), [(plain, phased), (phased, plain)])
def test_51_views_of_two_kinds_of_two_tenants_do_not_meet(
    running_kind: Callable[..., View],
    asking_kind: Callable[..., View],
    tenants: None,
    serve: Serve,
    sender: Sender,
) -> None:
    gate = Gate()
    serve(running=running_kind(stopping(gate)), asking=asking_kind(create))
    running = in_background(
        lambda: another_client(sender).send("/running/", headers={"X-Tenant": "one"})
    )
    gate.wait_until_reached()
    other = another_client(sender)
    met = in_background(lambda: other.send("/asking/", headers={"X-Tenant": "two"})).result(
        WAIT_SECONDS
    )
    gate.open()
    assert [answer.status_code for answer in (met, running.result(WAIT_SECONDS))] == [201, 201]


@both_kinds
@pytest.mark.parametrize(
    "tenants_of_one_table",
    [("one", "one"), ("three", "four")],
    ids=["one tenant", "a shared table"],
)
def test_51_one_key_in_one_table_is_one_key(
    tenants_of_one_table: tuple[str, str],
    kind: Callable[..., View],
    tenants: None,
    serve: Serve,
    sender: Sender,
) -> None:
    gate = Gate()
    serve(view=kind(stopping(gate)))
    first, second = tenants_of_one_table
    running = in_background(lambda: another_client(sender).send(headers={"X-Tenant": first}))
    gate.wait_until_reached()
    again = another_client(sender)
    same, another = (
        in_background(lambda body=body: again.send(body=body, headers={"X-Tenant": second})).result(
            WAIT_SECONDS
        )
        for body in ({"a": 1}, {"a": 2})
    )
    gate.open()
    assert [problem(answer)["code"] for answer in (same, another)] == ["key_in_use", "key_reused"]
    assert running.result(WAIT_SECONDS).status_code == 201
    assert again.send(headers={"X-Tenant": second})["Idempotent-Replayed"] == "true"
    assert made_in("one" if first == "one" else "public") == 1


def test_51_a_statement_that_is_prepared_for_one_tenant_locks_for_the_next(
    tenants: None, serve: Serve, sender: Sender
) -> None:
    """One session serves both; it has prepared the claim before it meets the second tenant."""
    gate, threshold = Gate(), connection.settings_dict["OPTIONS"].get("prepare_threshold")
    connection.ensure_connection()
    connection.connection.prepare_threshold = 0
    serve(warm=plain(create), view=plain(stopping(gate)))
    for tenant in ("one", "two"):
        assert sender.send("/warm/", key="warm", headers={"X-Tenant": tenant}).status_code == 201
    running = in_background(lambda: another_client(sender).send(headers={"X-Tenant": "one"}))
    gate.wait_until_reached()
    answers = [sender.send(headers={"X-Tenant": tenant}).status_code for tenant in ("two", "one")]
    gate.open()
    connection.connection.prepare_threshold = threshold
    assert (answers, running.result(WAIT_SECONDS).status_code) == ([201, 409], 201)
