"""The classification of database errors: what may be retried, what means that the database is lost,
and what has ended."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import psycopg
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error, InterfaceError, InternalError, OperationalError
from psycopg.errors import InFailedSqlTransaction
from psycopg.pq import TransactionStatus

from idempotency._text import first_line
from idempotency.conf import Isolation
from idempotency.models import IdempotencyKey

#: Serialization failure and deadlock: the transaction was rolled back and may succeed on a retry.
_RETRYABLE_SQLSTATES = frozenset({"40001", "40P01"})
_UNIQUE_VIOLATION = "23505"
#: Classes of errors of an unavailable server or a connection that it ended, also by a time limit.
_LOST_SQLSTATES = ("08", "53", "57P", "25P03", "25P04")
#: The time limits of a transaction, at which PostgreSQL ends the session.
_TIME_LIMITS = {"25P03": "idle_in_transaction_session_timeout", "25P04": "transaction_timeout"}
_IDLE_SESSION = "57P05"
#: The attribute of a connection of psycopg whose session the server has ended for this reason.
TIMED_OUT = "_idempotency_timed_out"
#: A missing table and a missing column; the messages of SQLite.
_NOT_MIGRATED, _NOT_MIGRATED_WORDS = ("42P01", "42703"), ("no such table", "no such column")
#: A write in a read-only transaction. A standby refuses SERIALIZABLE with the second code.
_READ_ONLY, NOT_SUPPORTED = "25006", "0A000"
_this_thread = threading.local()


class WriterBusy(OperationalError):
    """The write lock of SQLite was not free within the connection's timeout. A retry would only
    wait again."""


class SessionLost(OperationalError):
    """A run has lost a session that a middleware may have set up; the database may be reachable."""

    def __str__(self) -> str:
        return "a connection was lost during the run, and the run does not continue"


def serialization_failed(error: BaseException | None) -> bool:
    """Return whether the transaction lost against a concurrent one: a retry of the same work may
    succeed."""
    return any(
        sqlstate_of(cause) in _RETRYABLE_SQLSTATES or _is_locked(cause) for cause in _causes(error)
    )


def retryable_failure(
    error: Exception, isolation: Isolation | None, *, using: str
) -> Literal["serialization", "unique"] | None:
    """Return "serialization" or "unique" if a retry of the same work may succeed, else None. A
    unique violation above READ COMMITTED is "unique". It may come from ``get_or_create``, which
    would have waited and found the row at that level; but it may also be a bug of the work."""
    if serialization_failed(error):
        return "serialization"
    unique = any(sqlstate_of(cause) == _UNIQUE_VIOLATION for cause in _causes(error))
    return (
        "unique" if unique and effective_isolation(isolation, using) != "read committed" else None
    )


def _causes(error: BaseException | None) -> Iterator[Error]:
    """Yield the errors of the database that have caused ``error``, up to one that must not be
    retried. Code that handles an error of a statement may send another one in the broken
    transaction, such as EXPLAIN or an INSERT of a log: the error of that one hides the first."""
    for cause in _chain(error, with_contexts=False):
        if isinstance(cause, WriterBusy):
            return
        if isinstance(cause, Error):
            yield cause


def _chain(error: BaseException | None, *, with_contexts: bool) -> Iterator[BaseException]:
    """Yield ``error`` and its causes, each once: ``raise error from error`` makes a cycle. If an
    error has no cause, its context is yielded next, but only ``with_contexts`` or if the error came
    from a broken transaction."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        hides = with_contexts or isinstance(error, InFailedSqlTransaction)
        error = error.__cause__ or (error.__context__ if hides else None)


def effective_isolation(isolation: Isolation | None, using: str) -> str:
    """Return the level of the transactions that begin with ``isolation`` on an open connection to
    PostgreSQL. If it is None, the level comes from the option ``isolation_level`` of the database,
    or else from a default of the session, the role or the server, which takes one query. If that
    query fails, return "read committed", at which the fewest errors are retried."""
    if isolation is not None:
        return isolation
    connection = connections[using]
    with suppress(Error):
        if (level := getattr(connection.connection, "isolation_level", None)) is not None:
            return str(level.name.replace("_", " ").lower())
        with connection.cursor() as cursor:
            cursor.execute("SHOW default_transaction_isolation")
            return str(cursor.fetchone()[0])
    return "read committed"


def raise_writer_busy(error: Error) -> None:
    """Raise WriterBusy if ``error``, of the first statement of a transaction, is a timeout of
    SQLite's write lock. A later statement fails without a wait if its snapshot is outdated; a retry
    may succeed then."""
    if _is_locked(error):
        raise WriterBusy(*error.args) from error


def _is_locked(error: Error) -> bool:
    return sqlstate_of(error) is None and "database is locked" in str(error)


def connection_lost(error: BaseException, using: str) -> bool:
    """Return whether ``error`` means that the database cannot be reached; if so, drop the
    connection unless it is usable: the error may be that of another one."""
    if not isinstance(error, Error):
        return False
    connection = connections[using]
    if connection.vendor == "sqlite" and not isinstance(error, SessionLost):
        return any(word in str(error) for word in ("locked", "disk", "unable to open"))
    # Decide by the error, because Django may have opened a new connection. A broken connection has
    # no SQLSTATE.
    error = as_lost(error, connection, own=False)
    sqlstate = sqlstate_of(error)
    # PgBouncer reports a lost server with an unexpected second result, an InternalError.
    cut = sqlstate is None and isinstance(error, OperationalError | InterfaceError | InternalError)
    read_only = sqlstate in (_READ_ONLY, NOT_SUPPORTED) and isinstance(error, OperationalError)
    lost = cut or read_only or (sqlstate or "").startswith(_LOST_SQLSTATES)
    if lost:
        drop_if_lost(connection)
    return lost


def session_timed_out(error: BaseException, using: str) -> bool:
    """Return whether the server has ended the session at ``idle_session_timeout``. If so, mark the
    session, so that no run counts it as lost, and close the connection."""
    timed_out = isinstance(error, Error) and sqlstate_of(error) == _IDLE_SESSION
    if timed_out and (session := connections[using].connection) is not None:
        setattr(session, TIMED_OUT, True)
        drop_connection(connections[using])
    return timed_out


def exceeded_time_limit(error: BaseException | None) -> str | None:
    """Return the time limit at which PostgreSQL has ended the transaction, also if a later
    statement met the closed connection."""
    states = (getattr(cause, "sqlstate", None) for cause in _chain(error, with_contexts=True))
    return next((_TIME_LIMITS[state] for state in states if state in _TIME_LIMITS), None)


def accepts_writes(alias: str) -> bool:
    """Return whether the database accepts writes. An error of a view or a path converter may be
    that of another database."""
    try:
        connections[alias].ensure_connection()
        return bool(connections[alias].is_usable()) and not takes_no_writes(connections[alias])
    except Error:
        return False


def is_read_only(error: BaseException) -> bool:
    return isinstance(error, Error) and sqlstate_of(error) == _READ_ONLY


def takes_no_writes(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the server of an open connection is a standby or read-only by default."""
    own = connection.connection
    if connection.vendor != "postgresql" or own is None or own.closed:
        return False
    return any(
        own.info.parameter_status(name) == "on"
        for name in ("in_hot_standby", "default_transaction_read_only")
    )


def broken_connections() -> list[Any]:
    """Return the connections of this thread that were lost, and that Django has not replaced."""
    initialized: Any = connections.all(initialized_only=True)
    return [each for each in initialized if getattr(each.connection, "broken", False)]


def last_loss_time() -> float:
    """Return when this app last closed a lost connection in this thread, on the monotonic clock; 0
    if it closed none. A session that is marked as timed out does not count."""
    return getattr(_this_thread, "last_loss_time", 0.0)


def drop_lost_connections() -> None:
    """Close the lost connections of this thread. In a task or thread there is no end of a request,
    at which Django would close them. A connection without autocommit is left to the owner of its
    transaction."""
    for connection in broken_connections():
        if connection.autocommit:
            drop_connection(connection)


def drop_if_lost(connection: BaseDatabaseWrapper) -> None:
    """Close the connection if it is not usable or its server takes no writes. A usable one may have
    replaced the lost one, or an outer run may have noted its session."""
    if connection.in_atomic_block or connection.connection is None:
        return
    if takes_no_writes(connection) or not connection.is_usable():
        drop_connection(connection)


def drop_connection(connection: BaseDatabaseWrapper) -> None:
    """Close the connection, also in the pool, unless it is in a transaction."""
    if connection.in_atomic_block:
        return
    if connection.vendor == "postgresql" and (own := connection.connection) is not None:
        if own.broken and not hasattr(own, TIMED_OUT):
            _this_thread.last_loss_time = time.monotonic()
        # Otherwise Django's pool would reuse it; close() may return it there.
        own.pgconn.finish()
    connection.close()


def as_lost(error: Error, connection: BaseDatabaseWrapper, *, own: bool) -> Error:
    """Return an OperationalError for a write that a read-only server refuses, else the error
    itself. A statement of this app (``own``) fails for no other reason. A view may choose a
    read-only transaction itself, so its statements need a check of the server."""
    sqlstate = sqlstate_of(error)
    if not (own and sqlstate == _READ_ONLY) and not (
        sqlstate in (_READ_ONLY, NOT_SUPPORTED) and takes_no_writes(connection)
    ):
        return error
    lost = OperationalError(*error.args)
    lost.__cause__ = error.__cause__
    return lost


def missing_migration(error: BaseException, using: str) -> str | None:
    """Return one line with the cure for an error of a missing table or column; None for any other
    error."""
    line = first_line(error)
    if getattr(error.__cause__, "sqlstate", None) in _NOT_MIGRATED or line.startswith(
        _NOT_MIGRATED_WORDS
    ):
        return f"{line}: run manage.py migrate --database {using}"
    return None


def name_missing_migration(error: Error, using: str) -> None:
    """Add the cure to an error of a missing table or column of this app."""
    line = missing_migration(error, using)
    if line is not None and f"{IdempotencyKey._meta.app_label}_" in line:
        error.args = (line,)


def hide_row(error: Error, *, own: bool = True) -> None:
    """Remove the details from an error of a constraint of this app's tables: PostgreSQL quotes the
    row, with its body, its seed or its arguments. Citus names the table of a shard, or none; then
    the error of a statement of this app (``own``) is one of its tables."""
    cause, prefix = error.__cause__, f"{IdempotencyKey._meta.app_label}_"
    if isinstance(cause, psycopg.IntegrityError) and (
        (cause.diag.table_name or (prefix if own else "")).startswith(prefix)
    ):
        cause.args = error.args = (cause.diag.message_primary or type(cause).__name__,)


def sqlstate_of(error: Error) -> str | None:
    sqlstate: str | None = getattr(error.__cause__, "sqlstate", None)
    return sqlstate


def has_ended(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a transaction in which a statement was sent is not open any more. A closed
    connection gets the error of its next statement."""
    own = connection.connection
    if own is None or connection.closed_in_transaction:
        return False
    if connection.vendor == "postgresql":
        return bool(own.info.transaction_status == TransactionStatus.IDLE)
    return connection.vendor == "sqlite" and not own.in_transaction  # Other drivers do not tell.
