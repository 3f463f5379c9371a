"""Transactions: their isolation level, their time limits, and their first and last statement."""

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError, Error, OperationalError
from psycopg import IsolationLevel

from idempotency import conf
from idempotency._engine import database_product, round_trips
from idempotency._engine.caught_errors import refuse_rollback
from idempotency._engine.cursors import classified_errors
from idempotency._engine.errors import (
    NOT_SUPPORTED,
    drop_connection,
    has_ended,
    raise_writer_busy,
    session_timed_out,
    sqlstate_of,
)
from idempotency._engine.limits import IDLE, LOCK, Limits, send_beginning
from idempotency._engine.outer_transactions import require_no_transaction
from idempotency._hidden import Hidden, Parameters
from idempotency.conf import Isolation
from idempotency.exceptions import TransactionEnded

_LEVELS: dict[Isolation, IsolationLevel] = {
    "read committed": IsolationLevel.READ_COMMITTED,
    "repeatable read": IsolationLevel.REPEATABLE_READ,
    "serializable": IsolationLevel.SERIALIZABLE,
}
#: A setting that lasts as long as the transaction. Its id is no marker on Citus, where the workers
#: write.
MARKER = "current_setting('idempotency.transaction', true)"
#: The square root of a negative number is the error of a statement in another transaction.
_OR_ENDED = f", sqrt(CASE WHEN {MARKER} = %(marker)s THEN 1 ELSE -1 END)"
_ENDED: round_trips.Meanings = {psycopg.errors.InvalidArgumentForPowerFunction: TransactionEnded}

_CURE = (
    " All its work is rolled back. In a view, @idempotent opens this transaction: run such code"
    " between two phases of a phased view (recovery_points=[...]). If it must not run twice, run it"
    " there in key.call(name, at_most_once=True)."
)
_DURABLE = "transaction.atomic(durable=True) was entered inside a transaction of this app." + _CURE
_CLOSED = (
    "The connection was closed inside a transaction of this app, for example by"
    " close_old_connections()." + _CURE
)

#: The last statement, its parameters, the receiver of its row, and the meanings of its errors.
_Last = tuple[str, Parameters, Callable[[Any], None], round_trips.Meanings]

#: A hook of Django that ``atomic()`` calls, if the connection has it, to begin a transaction.
_BEGIN_HOOK = "_start_transaction_under_autocommit"


@dataclass(slots=True, repr=False)
class First:
    """The first statement of a transaction. If it was sent with BEGIN, ``ran`` is true, and ``row``
    is its result."""

    text: str
    parameters: Parameters
    ran: bool = False
    row: tuple[Any, ...] | None = None


class OwnBlock(transaction.Atomic):
    """The block of a transaction of this app. A durable block directly inside it breaks the
    transaction, because the work may hide the error."""

    key_id: int | None = None  #: That of the plain run in this block.

    def __init__(self, using: str, *, durable: bool) -> None:
        self.is_broken = False
        super().__init__(using, savepoint=True, durable=durable)

    @property
    def _from_testcase(self) -> bool:
        # Django reads this of the innermost block before it enters a durable one.
        if sys._getframe(1).f_code is transaction.Atomic.__enter__.__code__:
            self.is_broken = True
            transaction.set_rollback(True, using=self.using)
            raise RuntimeError(_DURABLE)
        return False

    @_from_testcase.setter
    def _from_testcase(self, value: bool) -> None:
        """Ignore the value that ``Atomic`` sets."""


class OwnTransaction:
    """The transaction of ``durable_transaction``, or a savepoint of ``savepoints.savepoint``, which
    is not ``durable``."""

    def __init__(
        self,
        connection: BaseDatabaseWrapper,
        isolation: Isolation | None = None,
        *,
        of_phase: bool = False,
        first: First | None = None,
        durable: bool = True,
        lease_seconds: int | None = None,
    ) -> None:
        self.block = OwnBlock(connection.alias, durable=durable)
        self.connection, self._isolation, self._of_phase = connection, isolation, of_phase
        self._first, self._lease_seconds, self._begun = first, lease_seconds, False
        #: Empty in a plain run, whose row is gone after a ROLLBACK, and on SQLite.
        self._marker = ""
        self.last: _Last | None = None
        self.may_roll_back = False  #: Whether the owner of the block needs no COMMIT.

    @property
    def is_open(self) -> bool:
        """Return whether this thread is in the transaction."""
        return self.block in connections[self.connection.alias].atomic_blocks

    def begin(self) -> None:
        """Begin with the level, the time limits and the first statement, in one round trip if round
        trips are merged. After an error the connection is outside of a transaction, or closed.

        Without a first statement, begin on a new connection if the server has ended the session at
        ``idle_session_timeout``, for example during a call: a retry would repeat the call, and meet
        the same limit. After another loss a retry may succeed, in a session that the middleware of
        the project has set up again."""
        connection, first, is_second = self.connection, self._first, self._begun
        vars(connection).pop(_BEGIN_HOOK, None)  # for this transaction only
        self._begun = True
        limit = (self._lease_seconds or conf.get().LOCK_TIMEOUT_SECONDS) * 1000
        limits = Limits(connection, (IDLE, LOCK) if self._of_phase else (IDLE,), limit)
        level = None if self._isolation is None else _LEVELS[self._isolation]
        begin = [round_trips.begin(connection.connection, level), *limits.show, *limits.set]
        if self._of_phase:
            self._marker = uuid.uuid4().hex
            begin.insert(1, f"SET LOCAL idempotency.transaction = '{self._marker}'")
        try:
            with connection.wrap_database_errors:
                # Otherwise psycopg would send its own BEGIN before the first statement. It accepts
                # one that was sent.
                connection.connection.autocommit = False
            if first is not None and round_trips.can_be_merged(connection):
                first.ran = True
                with classified_errors(connection):
                    result = round_trips.run(connection, first.text, first.parameters, before=begin)
                first.row, shown = result.row, result.shown
            else:
                shown = send_beginning(connection, begin)
            if other := limits.corrections(shown):
                send_beginning(connection, other)
        except BaseException as failure:
            timed_out = session_timed_out(failure, connection.alias)
            _leave(connection)
            if isinstance(failure, Error) and sqlstate_of(failure) == NOT_SUPPORTED:
                drop_connection(connection)
                # A standby refused BEGIN: treat it as a broken connection.
                raise OperationalError(*failure.args) from None
            if first is not None or is_second or not timed_out:
                raise
            connection.ensure_connection()
            self.begin()

    def set_last(
        self,
        text: str,
        parameters: Parameters,
        then: Callable[[Any], None],
        meanings: round_trips.Meanings,
    ) -> bool:
        """Send this statement with COMMIT at the end of the block, and call ``then`` with its row
        after that. The statement must end with a list of columns. An error of it prevents the
        COMMIT, and is raised as ``meanings`` says. Return False, and do nothing, if the transaction
        does not end that way."""
        # Ask again: the work may have installed a wrapper.
        if not (self._begun and round_trips.can_be_merged(self.connection)):
            return False
        self.connection.validate_no_broken_transaction()
        if self._marker:
            parameters = Hidden({**parameters.value, "marker": self._marker})
            text += _OR_ENDED
        self.last = text, parameters, then, {**meanings, **_ENDED}
        return True

    def require_open(self) -> None:
        """Raise TransactionEnded if the work has ended the transaction of a phase. The merged end
        asks by itself."""
        connection = self.connection
        if self._marker:
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT {MARKER}")
                if cursor.fetchone() != (self._marker,):
                    raise TransactionEnded
        elif self._of_phase and has_ended(connection):
            raise TransactionEnded

    def end(self) -> None:
        """Send the last statement with COMMIT, if there is one. Django's own COMMIT then finds no
        transaction, and sends nothing. Nothing is committed on an error.
        Raises TransactionEnded if the work has ended the transaction of a phase.
        Raises TransactionManagementError if COMMIT would roll back, unless it ``may_roll_back``."""
        if self.last is not None:
            connection, (text, parameters, then, meanings) = self.connection, self.last
            with classified_errors(connection):
                result = round_trips.run(
                    connection, text, parameters, after=["COMMIT"], meanings=meanings
                )
                then(result.row)
        elif not self.may_roll_back:
            refuse_rollback(self.connection.alias)

    def raise_misuse(self, error: Exception) -> None:
        """Raise RuntimeError if the block has closed the connection or entered a durable block."""
        if self.connection.closed_in_transaction:
            raise RuntimeError(_CLOSED) from error
        if self.block.is_broken:
            raise RuntimeError(_DURABLE) from error


@contextmanager
def durable_transaction(
    isolation: Isolation | None,
    *,
    using: str,
    of_phase: bool = False,
    first: First | None = None,
    lease_seconds: int | None = None,
) -> Iterator[OwnTransaction]:
    """Run the block in its own transaction at the level ``isolation``; None is the connection's own
    level. On return it is committed; on an exception it is rolled back. After ``lease_seconds``
    without a statement, by default LOCK_TIMEOUT_SECONDS, the database ends the transaction.
    Otherwise the locks of a lost host would last until TCP gives up, perhaps hours. With
    ``of_phase``, each statement waits at most that long for a lock, and the end refuses a
    transaction that the work has ended. The statement ``first`` is sent with BEGIN where that is
    possible, else it must be the first of the block. In ``TestCase`` the block is a savepoint.
    Raises NotReplicated after a COMMIT whose wait for the standbys was cancelled, if
    CONFIRM_REPLICATED is set."""
    if isolation not in (None, *_LEVELS):
        some = ", ".join(map(repr, _LEVELS))
        raise ValueError(f"The isolation must be one of {some}, or None, not {isolation!r}.")
    connection = require_no_transaction(using)
    own = OwnTransaction(
        connection, isolation, of_phase=of_phase, first=first, lease_seconds=lease_seconds
    )
    # Django keeps the error that once broke a transaction, and would name it as the cause of later
    # errors.
    connection.rollback_exc = None  # type: ignore[attr-defined]
    begun = False
    try:
        if connection.vendor == "postgresql" and not connection.in_atomic_block:
            server = connection.connection
            if server is not None and server.closed and not server.broken:
                connection.close()  # Somebody has closed it: Django opens a new one.
            # Receivers of ``connection_created`` may begin transactions of theirs.
            database_product.psycopg_connection(connection)
            vars(connection)[_BEGIN_HOOK] = own.begin
        with classified_errors(connection, own=False), own.block:
            begun = True
            try:
                yield own
                own.end()
            except Exception as error:
                own.raise_misuse(error)
                raise
    except DatabaseError as error:
        if not begun:  # On SQLite with ``transaction_mode``, BEGIN takes the write lock.
            raise_writer_busy(error)
        raise
    finally:
        vars(connection).pop(_BEGIN_HOOK, None)


def _leave(connection: BaseDatabaseWrapper) -> None:
    """Roll back a transaction that Django does not know of, or close the connection."""
    own: psycopg.Connection[Any] | None = connection.connection
    if own is None:
        return
    try:
        own.rollback()
        own.autocommit = True
    except BaseException as error:
        drop_connection(connection)
        if not isinstance(error, psycopg.Error):
            raise
