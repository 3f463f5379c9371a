"""Engines that use PostgreSQL's protocol but are not PostgreSQL are refused, because they break
guarantees.

A schema before ``pg_catalog`` in the search path simulates another engine: its ``version()`` and
its tables are found first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import (
    DatabaseError,
    IntegrityError,
    InternalError,
    OperationalError,
    connection,
    transaction,
)
from psycopg import Cursor
from pytest_django import Settings

from idempotency._engine import database_product
from idempotency._engine.cursors import own_cursor
from idempotency._engine.errors import connection_lost, serialization_failed
from idempotency._engine.replication import confirm
from idempotency._engine.transactions import durable_transaction
from idempotency.admin import traffic
from idempotency.exceptions import NotReplicated
from idempotency.inbox import process_once
from idempotency.models import IdempotencyKey, ProcessedMessage
from tests.kit.claims import claim, claim_plain
from tests.kit.database import statements
from tests.kit.serving import Sender
from tests.kit.views import create, plain
from tests.models import Entry

SUPPORTED = {
    "Debian": (
        "PostgreSQL 15.18 (Debian 15.18-0+deb12u1) on x86_64-pc-linux-gnu, compiled by gcc (Debian"
        " 12.2.0-14+deb12u1) 12.2.0, 64-bit"
    ),
    "Alpine": (
        "PostgreSQL 18.0 on aarch64-unknown-linux-musl, compiled by gcc (Alpine 14.2.0) 14.2.0,"
        " 64-bit"
    ),
    "beta": "PostgreSQL 19beta1 on x86_64-pc-linux-gnu, compiled by gcc (GCC) 15.1.0, 64-bit",
    "Windows": "PostgreSQL 16.4, compiled by Visual C++ build 1940, 64-bit",
    "Windows, since 17": "PostgreSQL 17.2 on x86_64-windows, compiled by msvc-19.42.34435, 64-bit",
    "Aurora PostgreSQL": (
        "PostgreSQL 15.4 on x86_64-pc-linux-gnu, compiled by x86_64-pc-linux-gnu-gcc (GCC) 9.5.0,"
        " 64-bit"
    ),
    "AlloyDB": (
        "PostgreSQL 14.4 on x86_64-pc-linux-gnu, compiled by Debian clang version 12.0.1, 64-bit"
    ),
    "EDB": (
        "PostgreSQL 16.2 (EnterpriseDB Advanced Server 16.2.0) on x86_64-pc-linux-gnu, compiled by"
        " gcc (GCC) 8.5.0, 64-bit"
    ),
}
REFUSED = {
    "CockroachDB": (
        "CockroachDB CCL v25.4.5 (x86_64-pc-linux-gnu, built 2026/01/20 08:53:43, go1.23.7)"
    ),
    "YugabyteDB": (
        "PostgreSQL 15.12-YB-2.25.2.0-b0 on x86_64-pc-linux-gnu, compiled by clang version 19.1.0"
        " (...), 64-bit"
    ),
    "Amazon Redshift": (
        "PostgreSQL 8.0.2 on i686-pc-linux-gnu, compiled by GCC gcc (GCC) 3.4.2 20041017, Redshift"
        " 1.0.12103"
    ),
    "Greenplum": (
        "PostgreSQL 12.12 (Greenplum Database 7.1.0 build commit:e7c2b1f) on x86_64-pc-linux-gnu,"
        " compiled by gcc"
    ),
    "Materialize": "PostgreSQL 9.5 on x86_64-unknown-linux-gnu (Materialize v0.130.1)",
    "RisingWave": "PostgreSQL 13.14.0-RisingWave-2.1.0 (c1d9fb6)",
    "QuestDB": "PostgreSQL 12.3, compiled by Visual C++ build 1914, 64-bit, QuestDB",
    "openGauss": (
        "(openGauss 6.0.0 build aee4abd5) compiled at 2024-09-29 on x86_64-unknown-linux-gnu,"
        " compiled by g++"
    ),
    "CrateDB": (
        "CrateDB 5.9.2 (built 6b1a1b5/2024-11-05T09:44:27Z, Linux 5.15 amd64, OpenJDK 64-Bit Server"
        " VM 22)"
    ),
    "emulator of 16": "PostgreSQL 16",
    "emulator of 14.1": "PostgreSQL 14.1",
}


@pytest.mark.parametrize("version", SUPPORTED.values(), ids=SUPPORTED)
def test_postgresql_is_supported_whoever_has_built_it(version: str) -> None:
    assert database_product.problem_of_version(version) == ""


@pytest.mark.parametrize("version", REFUSED.values(), ids=REFUSED)
def test_other_engines_are_refused_with_the_consequence(version: str) -> None:
    consequence = f"is not PostgreSQL, but {version!r}: {database_product._CONSEQUENCE}"
    assert database_product.problem_of_version(version) == consequence


@contextmanager
def another_engine(*definitions: str) -> Iterator[None]:
    """Let the session find these definitions before those of PostgreSQL."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE SCHEMA another_engine")
        cursor.execute("SET search_path TO another_engine, pg_catalog, public")
        for definition in definitions:
            cursor.execute(definition)
    database_product._is_citus.clear()
    try:
        yield
    finally:
        database_product._is_citus.clear()
        with connection.cursor() as cursor:
            cursor.execute("RESET search_path")
            cursor.execute("DROP SCHEMA another_engine CASCADE")


def version_is(text: str) -> str:
    return (
        "CREATE FUNCTION another_engine.version() RETURNS text LANGUAGE sql AS $$ SELECT"
        f" '{text}' $$"
    )


CITUS = "CREATE TABLE another_engine.pg_extension AS SELECT 'citus'::text AS extname"
COCKROACHDB = version_is(REFUSED["CockroachDB"])


def citus_with(method: str, replication: str) -> tuple[str, ...]:
    """Return the catalogue of Citus with the table of keys."""
    table = IdempotencyKey._meta.db_table
    return (
        CITUS,
        (
            "CREATE TABLE another_engine.pg_dist_partition AS SELECT"
            f" 'public.{table}'::regclass::oid AS logicalrelid, '{method}'::\"char\" AS partmethod,"
            f" '{replication}'::\"char\" AS repmodel"
        ),
    )


USES: dict[str, Callable[[], object]] = {
    "claim": claim,
    "inbox": lambda: process_once("stripe", "evt_1").__enter__(),
}
on_postgresql = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


class TestOnPostgresql:
    """The check at the first use of a connection."""

    pytestmark = on_postgresql

    @pytest.mark.parametrize("use", USES)
    def test_the_first_use_refuses_another_engine_and_writes_nothing(self, use: str) -> None:
        with another_engine(COCKROACHDB):
            for _ in range(2):
                with pytest.raises(
                    ImproperlyConfigured, match=r"'default'.* but 'CockroachDB .*idempotency\.E013"
                ):
                    USES[use]()
        assert not IdempotencyKey.objects.exists()
        assert not ProcessedMessage.objects.exists()

    def test_a_plain_request_is_refused_and_its_view_does_not_run(
        self, serve: Callable[..., None], sender: Sender
    ) -> None:
        serve(view=plain(create))
        with another_engine(COCKROACHDB):
            assert sender.send().status_code == 500
        assert not Entry.objects.exists()
        assert sender.send().status_code == 201

    def test_an_engine_without_a_table_of_extensions_is_refused(self) -> None:
        hidden = "CREATE VIEW another_engine.pg_extension AS SELECT 1 AS nothing"
        with (
            another_engine(hidden),
            pytest.raises(ImproperlyConfigured, match="no table of extensions"),
        ):
            claim()

    def test_a_project_that_silences_the_check_takes_the_risk(self, settings: Settings) -> None:
        settings.SILENCED_SYSTEM_CHECKS = [database_product.CHECK_ID]
        with another_engine(COCKROACHDB):
            assert claim().key is not None

    def test_check_and_migrate_report_it(self) -> None:
        with another_engine(COCKROACHDB):
            assert [message.id for message in run_checks(databases=["default"])] == [
                database_product.CHECK_ID
            ]
            with pytest.raises(SystemCheckError, match="CockroachDB"):
                call_command("migrate", verbosity=0, skip_checks=False)
            assert database_product.CHECK_ID not in [
                message.id for message in run_checks(databases=[])
            ]
        assert database_product.CHECK_ID not in [
            message.id for message in run_checks(databases=["default"])
        ]

    @pytest.mark.parametrize(("method", "replication"), [("h", "s"), ("a", "c"), ("n", "t")])
    def test_citus_with_rows_on_several_nodes_is_refused(
        self, method: str, replication: str
    ) -> None:
        with (
            another_engine(*citus_with(method, replication)),
            pytest.raises(
                ImproperlyConfigured,
                match=r"is Citus, and public\.idempotency_idempotencykey .* schema for each",
            ),
        ):
            claim()

    def test_citus_with_a_schema_for_each_tenant_is_supported(self) -> None:
        with another_engine(*citus_with("n", "s")):
            assert claim().key is not None
            assert database_product.is_citus(connection)

    def test_the_engine_is_examined_once(self) -> None:
        with another_engine(version_is(SUPPORTED["EDB"])):
            claim()
            with connection.cursor() as cursor:
                cursor.execute("DROP FUNCTION another_engine.version()")
                cursor.execute(COCKROACHDB)
            with statements() as executed:
                claim()
        assert len(executed) == 1

    def test_a_broken_transaction_is_not_asked(self) -> None:
        with another_engine(COCKROACHDB), transaction.atomic():
            with (
                pytest.raises(DatabaseError, match="division by zero"),
                connection.cursor() as cursor,
            ):
                cursor.execute("SELECT 1 / 0")
            with pytest.raises(DatabaseError, match="transaction is aborted"):
                claim_plain()
            transaction.set_rollback(True)

    def test_citus_cannot_confirm_the_standbys_of_its_workers(self, settings: Settings) -> None:
        with another_engine(*citus_with("n", "s")):
            claim()
            settings.IDEMPOTENCY = {"CONFIRM_REPLICATED": True}
            with pytest.raises(NotReplicated, match="Citus"):
                confirm("default")
            settings.IDEMPOTENCY = {"CONFIRM_REPLICATED": "storage"}
            confirm("default")

    def test_the_time_limits_for_workers_end_with_the_transaction(self) -> None:
        def limits() -> tuple[str, str]:
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT current_setting('lock_timeout'),"
                    " current_setting('citus.propagate_set_commands', true)"
                )
                return cursor.fetchone()

        with another_engine(*citus_with("n", "s")):
            claim()
            with durable_transaction(None, using="default", of_phase=True):
                assert limits() == ("90s", "local")
                with process_once("stripe", "evt_1") as first:
                    assert first
                    assert limits() == ("90s", "local")
            traffic.count_request(outcome=traffic.RequestOutcome.REPLAYED, seconds=0.1)
            traffic.write()
            assert limits()[0] == "0"
            assert limits()[1] != "local"


#: The messages of the coordinator of Citus if a worker refuses a COMMIT.
REFUSE_COMMIT = """
CREATE FUNCTION another_engine.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE WARNING 'the cause' USING ERRCODE = '{cause}';
    RAISE WARNING 'failed to commit transaction on worker:5432';
    RAISE EXCEPTION 'could not commit transaction for shard 102008 on any active node'
        USING ERRCODE = 'XX000';
END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON public.{table} DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION another_engine.refuse()
"""


@contextmanager
def refused_commit(cause: str, *, citus: bool = True) -> Iterator[None]:
    """Let the COMMIT of each message fail, as if a worker refused it with the error ``cause``."""
    catalogue = citus_with("n", "s") if citus else ()
    refuse = REFUSE_COMMIT.format(cause=cause, table=ProcessedMessage._meta.db_table)
    with another_engine(*catalogue, refuse):
        yield


def commit() -> None:
    with durable_transaction(None, using="default"):
        ProcessedMessage.objects.create(source="stripe", message_id="evt_1")


class TestErrorsOfWorkers:
    """COMMIT on Citus fails with XX000; the cause is in a warning."""

    pytestmark = on_postgresql

    def test_a_serialization_failure_is_retried(self) -> None:
        with refused_commit("40001"), pytest.raises(OperationalError, match="the cause") as caught:
            commit()
        assert serialization_failed(caught.value)

    def test_a_violated_constraint_is_one(self) -> None:
        with refused_commit("23503"), pytest.raises(IntegrityError, match="the cause"):
            commit()

    def test_a_lost_worker_is_a_lost_connection(self) -> None:
        with refused_commit("08006"), pytest.raises(OperationalError) as caught:
            commit()
        assert connection_lost(caught.value, "default")
        assert not ProcessedMessage.objects.exists()

    @pytest.mark.parametrize(
        ("message", "sqlstate"),
        [
            ("failure on connection marked as essential: 10.0.0.2:5432", "XX000"),
            ("failed to COPY to shard 102010 on 10.0.0.2:5432", "58030"),
        ],
    )
    def test_a_worker_that_was_lost_before_a_statement_is_a_lost_connection(
        self, message: str, sqlstate: str
    ) -> None:
        fail = f"DO $$ BEGIN RAISE '{message}' USING ERRCODE = '{sqlstate}'; END $$"
        with another_engine(*citus_with("n", "s")):
            claim()
            with pytest.raises(OperationalError) as caught, own_cursor("default", Cursor) as cursor:
                cursor.execute(fail)
            assert connection_lost(caught.value, "default")

    @pytest.mark.parametrize("cause", ["01000", "99999", "XX000"])
    def test_an_internal_error_without_a_cause_is_a_lost_connection(self, cause: str) -> None:
        with refused_commit(cause), pytest.raises(OperationalError, match="shard 102008") as caught:
            commit()
        assert connection_lost(caught.value, "default")

    def test_an_internal_error_of_postgresql_stays_one(self) -> None:
        with (
            refused_commit("40001", citus=False),
            pytest.raises(InternalError, match="shard 102008"),
        ):
            commit()

    def test_the_next_transaction_knows_nothing_of_it(self) -> None:
        with refused_commit("40001"):
            for _ in range(2):
                with pytest.raises(OperationalError):
                    commit()
            assert connection.connection._notice_handlers == []
