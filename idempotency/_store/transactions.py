"""Transactions: their isolation level, their time limits, and the classification of their errors."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import psycopg
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper, debug_transaction
from django.db.utils import DatabaseError, Error, InterfaceError, InternalError, OperationalError
from psycopg import IsolationLevel
from psycopg.errors import error_from_result
from psycopg.pq import DiagnosticField, ExecStatus

from idempotency import conf
from idempotency._store import engine
from idempotency._store.replication import confirmed_commit
from idempotency.conf import Isolation

#: Serialization failure and deadlock: the transaction was rolled back and may succeed on a retry.
_RETRYABLE_SQLSTATES = frozenset({"40001", "40P01"})
_UNIQUE_VIOLATION = "23505"
_LEVELS: dict[Isolation, IsolationLevel] = {
    "read committed": IsolationLevel.READ_COMMITTED,
    "repeatable read": IsolationLevel.REPEATABLE_READ,
    "serializable": IsolationLevel.SERIALIZABLE,
}
#: Classes of errors of an unavailable server or a connection that it ended, also by a time limit.
_LOST_SQLSTATES = ("08", "53", "57P", "25P03", "25P04")
#: A write in a read-only transaction. A standby refuses SERIALIZABLE with the second code.
_READ_ONLY, _NOT_SUPPORTED = "25006", "0A000"


class WriterBusy(OperationalError):
    """The write lock of SQLite was not free within the connection's timeout. A retry would only wait again."""


def refuse_outer_transaction(using: str) -> None:
    """Raise RuntimeError inside a transaction, whose rollback would undo committed phases. As in Django's
    ``atomic(durable=True)``, the transaction of a ``TestCase`` is allowed."""
    connection = connections[using]
    blocks = connection.atomic_blocks
    if not blocks and not connection.get_autocommit():
        raise RuntimeError(
            "Django's autocommit is off on this connection. This app needs it, because it commits its own transactions."
        )
    if blocks and not getattr(blocks[-1], "_from_testcase", False):
        raise RuntimeError(
            "An @idempotent view or an atomic_phase was entered inside a transaction, whose rollback would undo its commits. "
            "Leave the outer transaction.atomic() first. A phase cannot be nested in another phase either."
        )


@contextmanager
def durable_transaction(isolation: Isolation | None, *, using: str, lock_timeout: bool = False) -> Iterator[None]:
    """Run the block in its own transaction at the level ``isolation``; None is the connection's own level. On return it is
    committed; on an exception it is rolled back. The database ends it after the lock timeout of a key without a statement:
    otherwise the locks of a lost host would last until TCP gives up, perhaps hours. With ``lock_timeout``, each statement
    waits at most that long for a lock. Inside ``TestCase`` the block is a savepoint.
    Raises NotReplicated after a COMMIT whose wait for the standbys was cancelled, if CONFIRM_REPLICATED is set."""
    if isolation not in (None, *_LEVELS):
        raise ValueError(f"The argument isolation must be one of {', '.join(map(repr, _LEVELS))}, or None, not {isolation!r}.")
    refuse_outer_transaction(using)
    connection = connections[using]
    workers = engine.WorkerErrors(connection)
    # Django keeps the error that once broke a transaction, and would name it as the cause of later errors.
    connection.rollback_exc = None  # type: ignore[attr-defined]
    if connection.vendor == "postgresql" and not connection.in_atomic_block:
        if connection.connection is not None and connection.connection.closed:
            connection.close()  # Django opens a new one.
        vars(connection)[_BEGIN_HOOK] = partial(_begin, connection, isolation, lock_timeout, workers)
    begun = False
    try:
        with confirmed_commit(connection), transaction.atomic(using=using, durable=True):
            begun = True
            yield
    except DatabaseError as error:
        if not begun:  # On SQLite with ``transaction_mode``, BEGIN takes the write lock.
            refuse_second_wait(error)
        raise _as_lost(workers.told(error), connection, own=False)  # noqa: B904 - its cause is set
    finally:
        vars(connection).pop(_BEGIN_HOOK, None)
        workers.stop()


@contextmanager
def atomic_request(view: Callable[..., Any], *, besides: str | None = None) -> Iterator[list[str]]:
    """Run the block in a transaction on each database with ATOMIC_REQUESTS, unless the view is ``non_atomic_requests``. Yield
    their aliases, without ``besides``: its transaction is already open, and commits after these."""
    left_out = getattr(view, "_non_atomic_requests", ())
    settings = connections.settings.items()
    aliases = [name for name, of in settings if of.get("ATOMIC_REQUESTS") and name != besides and name not in left_out]
    with ExitStack() as stack:
        for alias in aliases:
            stack.enter_context(transaction.atomic(using=alias))
        yield aliases


def prepare_commits(aliases: list[str], committed: list[str], *, last: str) -> None:
    """Check for errors of the COMMITs of ``aliases`` and ``last`` while all can still be rolled back.

    After its COMMIT, each alias is added to ``committed``. Its on_commit hooks are moved to the COMMIT of ``last``. A
    serialization failure or a lost connection can still make a COMMIT fail.
    Raises IntegrityError for a deferred constraint.
    Raises TransactionManagementError for a broken transaction, whose COMMIT would be a silent rollback.
    """
    for alias in (last, *aliases):
        connections[alias].validate_no_broken_transaction()
        if connections[alias].features.can_defer_constraint_checks:
            connections[alias].check_constraints()
    for alias in aliases:
        connection = connections[alias]
        if len(connection.atomic_blocks) == 1:  # More in a TestCase, which never commits.
            hooks, connection.run_on_commit = connection.run_on_commit, []
            for _, hook, robust in hooks:  # type: ignore[misc]  # the stubs know two of the three
                transaction.on_commit(hook, using=last, robust=robust)
            transaction.on_commit(partial(committed.append, alias), using=alias)


#: A hook of Django that ``atomic()`` calls, if the connection has it, to begin a transaction.
_BEGIN_HOOK = "_start_transaction_under_autocommit"


def _begin(
    connection: BaseDatabaseWrapper, isolation: Isolation | None, lock_timeout: bool, workers: engine.WorkerErrors
) -> None:
    """Begin a transaction with its level and time limits in one round trip; on Citus in two if there is a lock timeout."""
    del vars(connection)[_BEGIN_HOOK]  # for this transaction only
    engine.refuse_other_engines(connection)
    workers.watch()
    own: psycopg.Connection[Any] = connection.connection
    level = _LEVELS[isolation] if isolation is not None else own.isolation_level
    milliseconds = conf.get().LOCK_TIMEOUT_SECONDS * 1000
    begin = "BEGIN" + (f" ISOLATION LEVEL {level.name.replace('_', ' ')}" if level is not None else "")
    limits = [f"SET LOCAL idle_in_transaction_session_timeout = {milliseconds}"]
    limits += engine.lock_timeout(connection, f"{milliseconds}ms") if lock_timeout else []
    with connection.wrap_database_errors:
        # Otherwise psycopg would send its own BEGIN before the first statement. It accepts one that was sent.
        own.autocommit = False
    for text in ("; ".join([begin, *limits[:2]]), *limits[2:]):
        with debug_transaction(connection, text), connection.wrap_database_errors:
            result = own.pgconn.exec_(text.encode())
            if result.status != ExecStatus.COMMAND_OK:
                # As in psycopg's cursors, an error without SQLSTATE is a broken connection. Treat a standby alike.
                told = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
                known = told not in ("", _NOT_SUPPORTED)
                error = error_from_result(result) if known else psycopg.OperationalError(own.pgconn.get_error_message())
                drop_connection(connection)
                raise error


@contextmanager
def own_cursor(using: str) -> Iterator[CursorWrapper]:
    """Yield a cursor for this app's statements, which PostgreSQL can prepare. Django binds parameters in the client by
    default, so that each text differs. These are bound in the server. With ``prepare_threshold`` in the OPTIONS of the
    database, they are parsed and planned once."""
    connection = connections[using]
    if connection.vendor != "postgresql":
        with connection.cursor() as cursor:
            yield cursor
        return
    connection.ensure_connection()
    engine.refuse_other_engines(connection)
    psycopg_connection = connection.connection
    former = psycopg_connection.cursor_factory
    psycopg_connection.cursor_factory = psycopg.Cursor
    try:
        cursor = connection.cursor()
    finally:
        psycopg_connection.cursor_factory = former
    workers = engine.WorkerErrors(connection)
    workers.watch()
    with confirmed_commit(connection), cursor:
        try:
            yield cursor
        except DatabaseError as error:
            raise _as_lost(workers.told(error), connection, own=True)  # noqa: B904 - its cause is set
        finally:
            workers.stop()


def retryable_failure(error: BaseException | None, isolation: Isolation | None) -> Literal["serialization", "unique"] | None:
    """Return "serialization" or "unique" if a retry of the same work may succeed, else None. A unique violation above READ
    COMMITTED is "unique". It may come from ``get_or_create``, which would have waited and found the row at that level; but it
    may also be a bug of the view."""
    while error is not None and not isinstance(error, WriterBusy):
        if isinstance(error, Error):
            sqlstate = _sqlstate(error)
            if sqlstate in _RETRYABLE_SQLSTATES or _is_locked(error):
                return "serialization"
            if sqlstate == _UNIQUE_VIOLATION and isolation in ("repeatable read", "serializable"):
                return "unique"
        error = error.__cause__
    return None


def refuse_second_wait(error: Error) -> None:
    """Raise WriterBusy if ``error``, of the first statement of a transaction, is a timeout of SQLite's write lock. A later
    statement fails without a wait if its snapshot is outdated; a retry may succeed then."""
    if _is_locked(error):
        raise WriterBusy(*error.args) from error


def _is_locked(error: Error) -> bool:
    return _sqlstate(error) is None and "database is locked" in str(error)


def connection_lost(error: BaseException, using: str) -> bool:
    """Return whether ``error`` means that the database cannot be reached; if so, drop the connection."""
    if not isinstance(error, Error):
        return False
    connection = connections[using]
    if connection.vendor == "sqlite":
        return any(word in str(error) for word in ("locked", "disk", "unable to open"))
    # Decide by the error, because Django may have opened a new connection. A broken connection has no SQLSTATE.
    error = _as_lost(error, connection, own=False)
    sqlstate = _sqlstate(error)
    # PgBouncer reports a lost server with an unexpected second result, an InternalError.
    cut = sqlstate is None and isinstance(error, OperationalError | InterfaceError | InternalError)
    read_only = sqlstate in (_READ_ONLY, _NOT_SUPPORTED) and isinstance(error, OperationalError)
    lost = cut or read_only or (sqlstate or "").startswith(_LOST_SQLSTATES)
    if lost:
        drop_connection(connection)
    return lost


def is_read_only(error: BaseException) -> bool:
    return isinstance(error, Error) and _sqlstate(error) == _READ_ONLY


def takes_no_writes(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the server of an open connection is a standby or read-only by default."""
    own = connection.connection
    if connection.vendor != "postgresql" or own is None or own.closed:
        return False
    return any(own.info.parameter_status(name) == "on" for name in ("in_hot_standby", "default_transaction_read_only"))


def drop_connection(connection: BaseDatabaseWrapper) -> None:
    """Close the connection, also in the pool, unless it is in a transaction."""
    if connection.in_atomic_block:
        return
    if connection.vendor == "postgresql" and connection.connection is not None:
        connection.connection.close()  # Otherwise Django's pool would reuse it.
    connection.close()


def _as_lost(error: Error, connection: BaseDatabaseWrapper, *, own: bool) -> Error:
    """Return an OperationalError for a write that a read-only server refuses, else the error itself. A statement of this app
    (``own``) fails for no other reason. A view may choose a read-only transaction itself, so its statements need a check of
    the server."""
    sqlstate = _sqlstate(error)
    if not (own and sqlstate == _READ_ONLY) and not (sqlstate in (_READ_ONLY, _NOT_SUPPORTED) and takes_no_writes(connection)):
        return error
    lost = OperationalError(*error.args)
    lost.__cause__ = error.__cause__
    return lost


def _sqlstate(error: Error) -> str | None:
    sqlstate: str | None = getattr(error.__cause__, "sqlstate", None)
    return sqlstate


def backoff_seconds(attempt: int) -> float:
    """Return the wait before attempt ``attempt`` (from 1), with full jitter."""
    return random.uniform(0, min(0.002 * 2**attempt, 1.0))  # nosec B311  # spreads retries; no secret
