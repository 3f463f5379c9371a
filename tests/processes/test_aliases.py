"""Two aliases of one database: what names the second one is refused or reported, because it would
share no transaction."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import connection, connections
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from pytest_django import Settings

from idempotency._engine.aliases import share_tables
from idempotency.decorators import idempotent
from idempotency.management.commands.idempotency_worker import _LOOPS
from idempotency.models import IdempotencyKey
from idempotency.monitoring.doctor import diagnose
from rides_demo.processes.ports import free_port
from tests.factories import IdempotencyKeyFactory
from tests.kit.commands import run_here

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])

LOOPS = [*_LOOPS, "idempotency_worker"]


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return the settings of the alias "direct", which is the default database."""
    settings = {**connection.settings_dict, "OPTIONS": {**connection.settings_dict["OPTIONS"]}}
    monkeypatch.setitem(connections.settings, "direct", settings)
    wrapper = connections["direct"]

    def ensure_connection() -> None:
        if wrapper.connection is None:
            with wrapper.wrap_database_errors:
                wrapper.connect()

    # Django permits a test to use only the databases that are named before it begins.
    monkeypatch.setattr(wrapper, "ensure_connection", ensure_connection)
    yield settings
    wrapper.close()
    if hasattr(wrapper, "close_pool"):
        wrapper.close_pool()
    del connections["direct"]


class ToDirect:
    """A router that sends all queries to the alias "direct"."""

    def db_for_write(self, *args: Any, **hints: Any) -> str:
        return "direct"


def second_alias(alias: str) -> bool:
    """Return whether the doctor reports that the router writes to this database under another
    alias."""
    return "second_alias" in [finding.code for finding in diagnose(using=alias).findings]


@pytest.mark.parametrize("command", LOOPS)
def test_no_loop_starts_on_a_second_alias(command: str, direct: Any) -> None:
    refused = run_here(command, "--database", "direct")
    assert refused.returncode == 2
    assert "--database default" in refused.stderr
    assert second_alias("direct")
    assert not second_alias("default")


def test_no_request_is_completed_on_a_second_alias(direct: Any) -> None:
    """Its phases would share no transaction with the queries of its view."""
    key = IdempotencyKeyFactory(
        stuck_at=timezone.now(), stuck_code="view_gave_up", stuck_reason="it gave up"
    )
    refused = run_here("idempotency_keys", "complete", str(key.pk), "--yes", "--database", "direct")
    assert refused.returncode == 2
    assert "--database default" in refused.stderr
    key.refresh_from_db()
    assert key.stuck_code == "view_gave_up"


def test_the_alias_to_which_the_router_writes_may_be_any_of_the_two(
    direct: Any, settings: Settings
) -> None:
    settings.DATABASE_ROUTERS = [ToDirect()]
    assert run_here("enqueue_jobs", "--database", "direct").returncode == 0
    assert run_here("enqueue_jobs", "--database", "default").returncode == 2


def test_two_databases_of_one_server_are_two() -> None:
    assert run_here("reap_keys", "--database", "shard_b").returncode == 0
    assert not second_alias("shard_b")


@pytest.mark.postgres
def test_two_schemas_of_one_database_are_two(direct: Any) -> None:
    table = connection.ops.quote_name(IdempotencyKey._meta.db_table)
    direct["OPTIONS"]["options"] = "-c search_path=tenant_b"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA tenant_b CREATE TABLE {table} (id bigint)")
    try:
        with connections["direct"].cursor() as cursor:
            cursor.execute(
                "SELECT to_regclass(%s)::oid = to_regclass('tenant_b.' || %s)::oid", [table, table]
            )
            assert cursor.fetchone() == (True,)
        assert not share_tables("default", "direct")
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP SCHEMA tenant_b CASCADE")


@pytest.mark.postgres
def test_a_role_that_may_read_nothing_but_the_tables_is_enough(direct: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE ROLE clerk LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO clerk"
        )
        cursor.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
    direct["USER"] = "clerk"
    try:
        with connections["direct"].cursor() as cursor:
            cursor.execute(
                "SELECT current_user, has_function_privilege('pg_control_system()', 'EXECUTE')"
            )
            assert cursor.fetchone() == ("clerk", False)
        assert run_here("enqueue_jobs", "--database", "direct").returncode == 2
    finally:
        connections["direct"].close()
        with connection.cursor() as cursor:
            cursor.execute(
                "GRANT EXECUTE ON FUNCTION pg_control_system() TO PUBLIC; DROP OWNED BY clerk; DROP"
                " ROLE clerk"
            )


@pytest.mark.postgres
def test_a_shard_goes_on_if_the_database_of_the_router_cannot_be_reached(
    settings: Settings, direct: dict[str, Any]
) -> None:
    settings.DATABASE_ROUTERS = [ToDirect()]
    direct.update(HOST="127.0.0.1", PORT=free_port())
    direct["OPTIONS"].pop("host", None)
    passed = run_here("enqueue_jobs", "--database", "shard_b")
    assert (passed.returncode, "cannot tell" in passed.stderr) == (0, True)
    assert any("another alias" in unknown for unknown in diagnose(using="shard_b").cannot_tell)


@idempotent(using="direct", scope=lambda request: "everybody")
def charge(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=201)


@pytest.mark.parametrize(
    ("databases", "ids"),
    [(["default", "direct"], ["idempotency.W018"]), (["default"], []), ([], [])],
)
def test_a_view_that_names_a_second_alias_is_a_warning(
    databases: Any, ids: Any, direct: Any, serve: Any
) -> None:
    serve(view=charge)
    found = run_checks(databases=databases)
    assert [message.id for message in found if message.id == "idempotency.W018"] == ids
