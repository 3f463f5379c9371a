"""Transactions on the connection of a key: their isolation level, their time limits, and what their failures mean."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import psycopg
from django.db import connections, transaction
from django.db.backends.utils import CursorWrapper
from django.db.utils import Error, InterfaceError, OperationalError
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus

from idempotency import conf
from idempotency.conf import Isolation

#: Serialization failure and deadlock: the transaction did nothing, and may do it all on the next try.
_RETRYABLE_SQLSTATES = frozenset({"40001", "40P01"})
_UNIQUE_VIOLATION = "23505"
_LEVELS: dict[Isolation, IsolationLevel] = {
    "read committed": IsolationLevel.READ_COMMITTED,
    "repeatable read": IsolationLevel.REPEATABLE_READ,
    "serializable": IsolationLevel.SERIALIZABLE,
}
#: No connection, no resources, shut down by an operator, ended for its silence.
_LOST_SQLSTATES = ("08", "53", "57P", "25P03", "25P04")


def refuse_outer_transaction(using: str) -> None:
    """Raise RuntimeError inside a transaction that this app did not open: its rollback would undo what was promised.

    The transaction that ``TestCase`` holds around each test is allowed, as Django's ``atomic(durable=True)`` does.
    """
    connection = connections[using]
    blocks = connection.atomic_blocks
    if not blocks and not connection.get_autocommit():
        raise RuntimeError(
            "This app needs Django's autocommit, which is off here: nothing would commit what it promises to keep."
        )
    if blocks and not getattr(blocks[-1], "_from_testcase", False):
        raise RuntimeError(
            "An @idempotent view, or an atomic_phase, was entered inside a transaction: a rollback there would undo what this "
            "app has promised to keep. Leave the outer transaction.atomic() first; a phase cannot be nested in another either."
        )


@contextmanager
def durable_transaction(isolation: Isolation | None, *, using: str) -> Iterator[None]:
    """Run the block in a transaction of its own at the level ``isolation``; None is the connection's own level.

    On return it is committed. On an exception it is rolled back. The level is set on the psycopg connection, which puts it
    into BEGIN and costs no statement, and the former one is restored. Inside ``TestCase`` it is a savepoint, at the level of
    the transaction around the test.
    """
    if isolation not in (None, *_LEVELS):
        raise ValueError(f"isolation must be one of {', '.join(map(repr, _LEVELS))}, or None, not {isolation!r}.")
    refuse_outer_transaction(using)
    # Django never forgets the error that once broke a transaction of this connection, and names it as the cause of later ones.
    connections[using].rollback_exc = None  # type: ignore[attr-defined]
    with _isolated(isolation, using), transaction.atomic(using=using, durable=True):
        yield


@contextmanager
def _isolated(isolation: Isolation | None, using: str) -> Iterator[None]:
    connection = connections[using]
    if isolation is None or connection.vendor != "postgresql" or connection.in_atomic_block:
        yield
        return
    if connection.connection is not None and connection.connection.closed:
        connection.close()
    connection.ensure_connection()
    psycopg_connection = connection.connection
    former = psycopg_connection.isolation_level
    psycopg_connection.isolation_level = _LEVELS[isolation]
    try:
        yield
    finally:
        # A connection that broke inside is closed, and its level with it.
        if psycopg_connection.info.transaction_status == TransactionStatus.IDLE:
            psycopg_connection.isolation_level = former


@contextmanager
def own_cursor(using: str) -> Iterator[CursorWrapper]:
    """Yield a cursor for this app's own statements, which PostgreSQL can prepare.

    Django binds parameters in the client by default, so that no two statements have the same text. These are bound in the
    server; ``prepare_threshold`` in the OPTIONS of the database then spares parsing and planning them each time.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        with connection.cursor() as cursor:
            yield cursor
        return
    connection.ensure_connection()
    psycopg_connection = connection.connection
    former = psycopg_connection.cursor_factory
    psycopg_connection.cursor_factory = psycopg.Cursor
    try:
        cursor = connection.cursor()
    finally:
        psycopg_connection.cursor_factory = former
    with cursor:
        yield cursor


def limit_idle_time(using: str) -> None:
    """Let the database end this transaction, and its locks, once its host has been silent for the lock timeout.

    A host that vanishes would hold its row locks until TCP gives up, which may take hours.
    """
    connection = connections[using]
    if connection.vendor == "postgresql":
        milliseconds = str(conf.get().LOCK_TIMEOUT_SECONDS * 1000)
        with own_cursor(using) as cursor:
            cursor.execute(
                "SELECT set_config('idle_in_transaction_session_timeout', %s, true), set_config('lock_timeout', %s, true)",
                [milliseconds, milliseconds],
            )


def retryable_failure(error: BaseException | None, isolation: Isolation | None) -> Literal["serialization", "unique"] | None:
    """Tell whether the same work may succeed on another try: "serialization", "unique", or None if not.

    "unique" is a unique violation under SERIALIZABLE, which ``get_or_create`` raises there where a lower level would have
    waited and found the row: worth another try or two, but it may be the view's own mistake.
    """
    while error is not None:
        if isinstance(error, Error):
            sqlstate = getattr(error.__cause__, "sqlstate", None)
            if sqlstate in _RETRYABLE_SQLSTATES or (sqlstate is None and "database is locked" in str(error)):
                return "serialization"
            if sqlstate == _UNIQUE_VIOLATION and isolation == "serializable":
                return "unique"
        error = error.__cause__
    return None


def connection_lost(error: BaseException, using: str) -> bool:
    """Tell whether ``error`` means that the database cannot be reached; if so the dead connection is dropped."""
    if not isinstance(error, Error):
        return False
    connection = connections[using]
    if connection.vendor == "sqlite":
        return any(word in str(error) for word in ("locked", "disk", "unable to open"))
    # The error decides: by now Django may have opened a new connection. A cut line has no SQLSTATE to tell.
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    cut = sqlstate is None and isinstance(error, OperationalError | InterfaceError)
    lost = cut or (sqlstate or "").startswith(_LOST_SQLSTATES)
    if lost and not connection.in_atomic_block:
        connection.close()
    return lost


def backoff_seconds(attempt: int) -> float:
    """Return how long to wait before try ``attempt`` (from 1), with full jitter so that rivals do not meet again."""
    return random.uniform(0, min(0.002 * 2**attempt, 0.25))
