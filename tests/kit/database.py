"""The sessions of the test's database: their statements, round trips, isolation and locks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from tempfile import TemporaryFile

from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from idempotency._engine.database_product import is_citus
from idempotency.models import IdempotencyKey
from tests.kit.threads import Gate, background


def statements() -> CaptureQueriesContext:
    """Return a context that records the statements on the default database."""
    return CaptureQueriesContext(connection)


@contextmanager
def session_setting(name: str, value: str) -> Iterator[None]:
    """Set a setting of this thread's session; reset it at the end, because a pool reuses the
    connection."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET {name} TO {value}")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"RESET {name}")


@contextmanager
def database_setting(name: str, value: str) -> Iterator[None]:
    """Set a setting of new sessions of the database; close the connection of this thread before and
    after the block."""
    database = connection.ops.quote_name(connection.settings_dict["NAME"])

    def alter(change: str) -> None:
        connection.close()
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER DATABASE {database} {change}")
        connection.close()

    alter(f"SET {name} TO '{value}'")
    try:
        yield
    finally:
        alter(f"RESET {name}")


@contextmanager
def no_migration() -> Iterator[None]:
    """Hide the table of the keys, as before the first migration."""

    def rename(table: str, to: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} RENAME TO {to}")

    table = IdempotencyKey._meta.db_table
    rename(table, "hidden")
    try:
        yield
    finally:
        rename("hidden", table)


def default_isolation(level: str) -> AbstractContextManager[None]:
    """Set the default isolation level of this thread's transactions."""
    return session_setting("default_transaction_isolation", f"'{level}'")


def waits_for_a_lock() -> bool:
    """Return whether a session waits for a lock of another session (on Citus, on a worker)."""
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname ="
        " current_database()"
    )
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM citus_lock_waits" if is_citus(connection) else waits)
        return bool(cursor.fetchone()[0])


@contextmanager
def held_transaction(first: Callable[[], object]) -> Iterator[None]:
    """Call ``first`` in a transaction of another session, which commits at the end of the block."""
    gate = Gate()

    def hold() -> None:
        with transaction.atomic():
            first()
            gate.wait_here()

    with background(hold):
        gate.wait_until_reached()
        try:
            yield
        finally:
            gate.open()


def lock_table(name: str) -> None:
    """Lock a table against all other sessions until the open transaction ends."""
    with connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {connection.ops.quote_name(name)} IN ACCESS EXCLUSIVE MODE")


def messages(work: Callable[[], object]) -> int:
    """Return how often libpq waited for the server during ``work``: after each simple query and
    each Sync."""
    connection.ensure_connection()
    server = connection.connection.pgconn
    with TemporaryFile("w+") as lines:
        server.trace(lines.fileno())
        try:
            work()
        finally:
            server.untrace()
        lines.seek(0)
        sent = [line.split("\t") for line in lines]
    return sum(parts[1] == "F" and parts[3].strip() in ("Query", "Sync") for parts in sent)
