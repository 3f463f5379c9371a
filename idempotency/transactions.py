"""Transactions on the connection of a key: their isolation level, their time limits, and what their failures mean."""

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
#: A write in a read-only transaction. A standby refuses SERIALIZABLE with the second one, before it sees a write.
_READ_ONLY, _NOT_SUPPORTED = "25006", "0A000"


class WriterBusy(OperationalError):
    """SQLite has waited for the connection's timeout, and another connection still writes. It is not worth another wait."""


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
def durable_transaction(isolation: Isolation | None, *, using: str, lock_timeout: bool = False) -> Iterator[None]:
    """Run the block in a transaction of its own at the level ``isolation``; None is the connection's own level.

    On return it is committed. On an exception it is rolled back. The database ends it, and its locks, once its host has been
    silent for the lock timeout of a key: one that vanishes would hold them until TCP gives up, which may take hours.
    ``lock_timeout``: no statement in it waits longer than that for a lock. Inside ``TestCase`` it is a savepoint, at the level
    of the transaction around the test.
    """
    if isolation not in (None, *_LEVELS):
        raise ValueError(f"isolation must be one of {', '.join(map(repr, _LEVELS))}, or None, not {isolation!r}.")
    refuse_outer_transaction(using)
    connection = connections[using]
    # Django never forgets the error that once broke a transaction of this connection, and names it as the cause of later ones.
    connection.rollback_exc = None  # type: ignore[attr-defined]
    if connection.vendor == "postgresql" and not connection.in_atomic_block:
        if connection.connection is not None and connection.connection.closed:
            connection.close()  # Django opens another one.
        vars(connection)[_BEGIN_HOOK] = partial(_begin, connection, isolation, lock_timeout)
    begun = False
    try:
        with transaction.atomic(using=using, durable=True):
            begun = True
            yield
    except DatabaseError as error:
        if not begun:  # On SQLite with ``transaction_mode``, BEGIN waits for the writer.
            refuse_second_wait(error)
        raise _as_lost(error, connection, own=False)  # noqa: B904 - its cause is set
    finally:
        vars(connection).pop(_BEGIN_HOOK, None)


@contextmanager
def atomic_request(view: Callable[..., Any], *, besides: str | None = None) -> Iterator[list[str]]:
    """Run the block in a transaction on each database with ATOMIC_REQUESTS, unless the view is out of it by its own word.

    Yield their aliases, to which ``besides`` does not belong: its transaction is open already, and commits after these.
    """
    left_out = getattr(view, "_non_atomic_requests", ())
    settings = connections.settings.items()
    aliases = [name for name, of in settings if of.get("ATOMIC_REQUESTS") and name != besides and name not in left_out]
    with ExitStack() as stack:
        for alias in aliases:
            stack.enter_context(transaction.atomic(using=alias))
        yield aliases


def prepare_commits(aliases: list[str], committed: list[str], *, last: str) -> None:
    """Check what could fail the COMMITs of ``aliases``, and then of ``last``, while all of them can still be rolled back.

    Raises the error of a deferred constraint, and of a transaction that is broken: its COMMIT would be a silent rollback. A
    serialization failure and a lost connection are left. ``committed`` gets each alias after its COMMIT; hooks that wait for
    that COMMIT are moved to the one of ``last``.
    """
    for alias in (last, *aliases):
        connections[alias].validate_no_broken_transaction()
        if connections[alias].features.can_defer_constraint_checks:
            connections[alias].check_constraints()
    for alias in aliases:
        connection = connections[alias]
        if len(connection.atomic_blocks) == 1:  # In a TestCase there are more, and no COMMIT.
            hooks, connection.run_on_commit = connection.run_on_commit, []
            for _, hook, robust in hooks:  # type: ignore[misc]  # the stubs know two of the three
                transaction.on_commit(hook, using=last, robust=robust)
            transaction.on_commit(partial(committed.append, alias), using=alias)


#: What ``atomic()`` calls, where a connection has it, to begin a transaction. Django's own backends use it for SQLite.
_BEGIN_HOOK = "_start_transaction_under_autocommit"


def _begin(connection: BaseDatabaseWrapper, isolation: Isolation | None, lock_timeout: bool) -> None:
    """Begin a transaction with its level and its limits, in one round trip: each costs as much as a small statement."""
    del vars(connection)[_BEGIN_HOOK]  # for this transaction alone
    own: psycopg.Connection[Any] = connection.connection
    level = _LEVELS[isolation] if isolation is not None else own.isolation_level
    milliseconds = conf.get().LOCK_TIMEOUT_SECONDS * 1000
    text = (
        "BEGIN"
        + (f" ISOLATION LEVEL {level.name.replace('_', ' ')}" if level is not None else "")
        + f"; SET LOCAL idle_in_transaction_session_timeout = {milliseconds}"
        + (f"; SET LOCAL lock_timeout = {milliseconds}" if lock_timeout else "")
    )
    with debug_transaction(connection, text), connection.wrap_database_errors:
        # psycopg would send a BEGIN of its own before the first statement, and takes one that is sent already.
        own.autocommit = False
        result = own.pgconn.exec_(text.encode())
        if result.status != ExecStatus.COMMAND_OK:
            # As psycopg's own cursors do: what has no SQLSTATE is a connection that broke. So is one to a standby.
            told = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
            known = told not in ("", _NOT_SUPPORTED)
            error = error_from_result(result) if known else psycopg.OperationalError(own.pgconn.get_error_message())
            drop_connection(connection)
            raise error


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
        try:
            yield cursor
        except DatabaseError as error:
            raise _as_lost(error, connection, own=True)  # noqa: B904 - its cause is set


def retryable_failure(error: BaseException | None, isolation: Isolation | None) -> Literal["serialization", "unique"] | None:
    """Tell whether the same work may succeed on another try: "serialization", "unique", or None if not.

    "unique" is a unique violation above READ COMMITTED, which ``get_or_create`` raises there where that level would have waited
    and found the row: worth another try or two, but it may be the view's own mistake.
    """
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
    """Raise WriterBusy if ``error``, of the first statement of a transaction, says that SQLite waited in vain for the writer.

    A later statement is refused without a wait when its transaction has read what has changed since: that is worth a retry.
    """
    if _is_locked(error):
        raise WriterBusy(*error.args) from error


def _is_locked(error: Error) -> bool:
    return _sqlstate(error) is None and "database is locked" in str(error)


def connection_lost(error: BaseException, using: str) -> bool:
    """Tell whether ``error`` means that the database cannot be reached; if so the dead connection is dropped."""
    if not isinstance(error, Error):
        return False
    connection = connections[using]
    if connection.vendor == "sqlite":
        return any(word in str(error) for word in ("locked", "disk", "unable to open"))
    # The error decides: by now Django may have opened a new connection. A cut line has no SQLSTATE to tell.
    error = _as_lost(error, connection, own=False)
    sqlstate = _sqlstate(error)
    # PgBouncer tells psycopg of a lost server by two results where it expects one.
    cut = sqlstate is None and isinstance(error, OperationalError | InterfaceError | InternalError)
    read_only = sqlstate in (_READ_ONLY, _NOT_SUPPORTED) and isinstance(error, OperationalError)
    lost = cut or read_only or (sqlstate or "").startswith(_LOST_SQLSTATES)
    if lost:
        drop_connection(connection)
    return lost


def is_read_only(error: BaseException) -> bool:
    """Tell whether a statement failed because it writes, and its transaction may only read."""
    return isinstance(error, Error) and _sqlstate(error) == _READ_ONLY


def takes_no_writes(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether the server of an open connection has said that it is a standby, or read-only by default."""
    own = connection.connection
    if connection.vendor != "postgresql" or own is None or own.closed:
        return False
    return any(own.info.parameter_status(name) == "on" for name in ("in_hot_standby", "default_transaction_read_only"))


def drop_connection(connection: BaseDatabaseWrapper) -> None:
    """Close the connection for good, unless it is in a transaction; Django opens another one."""
    if connection.in_atomic_block:
        return
    if connection.vendor == "postgresql" and connection.connection is not None:
        connection.connection.close()  # Django's pool would lend it to the next request.
    connection.close()


def _as_lost(error: Error, connection: BaseDatabaseWrapper, *, own: bool) -> Error:
    """Return an OperationalError for a write that a read-only server refuses, else the error itself.

    ``own``: a statement of this app is refused for no other reason. A view may have chosen a read-only transaction itself, so
    of its statements the server decides.
    """
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
    """Return how long to wait before try ``attempt`` (from 1), with full jitter so that rivals do not meet again."""
    return random.uniform(0, min(0.002 * 2**attempt, 1.0))  # nosec B311  # spreads retries; no secret
