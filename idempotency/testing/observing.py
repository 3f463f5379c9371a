"""Observe one run of a request: record each place that the run reaches, and simulate a crash at one
of them.

A simulated crash raises a BaseException. After it the open transactions of the run are lost, no new
connection opens, and each further statement, COMMIT or downstream call raises the exception again.
So ``finally`` and ``except`` cannot write to the database. A simulated crash does not clear the
memory of the process: module globals and caches keep their values.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from idempotency.models import IdempotencyKey
from idempotency.signals import phase_committed
from idempotency.testing.places import KEYS, Place, What, When, shortened, users_line
from idempotency.testing.services import Address

_GAP = r"(?:\s|/\*(?:(?!\*/).)*\*/|--[^\n]*\n)+"
_NAME = r'"(?:[^"]|"")+"|`[^`]+`|\w+'
#: A write, with the schema, if it names one, and the table.
_WRITE = re.compile(
    rf"\b(?:INTO|UPDATE|DELETE{_GAP}FROM|TRUNCATE)(?:{_GAP}TABLE)?(?:{_GAP}ONLY)?{_GAP}(?:({_NAME})\.)?({_NAME})",
    re.IGNORECASE | re.DOTALL,
)


class Died(BaseException):
    """The process is dead. This class is not an Exception, so that ``except Exception`` in a view
    does not handle it."""


class Run:
    """One run of the request. ``at`` is called at each place, and may call ``die()``, or wait."""

    def __init__(self, at: Callable[["Run", Place], None] = lambda run, place: None) -> None:
        self._at = at
        self.places: list[Place] = []
        #: The address and the user's line of each call to a downstream service inside a
        #: transaction.
        self.calls_in_transactions: set[tuple[Address, str]] = set()
        self.dead = False
        #: The results of ``key.derive()``.
        self.derived: set[str] = set()
        #: The database, the schema or "", and the table of each write.
        self.written: set[tuple[str, str, str]] = set()
        #: The number of the last place of each phase that ended with no_op().
        self.no_ops: list[int] = []
        #: The connections that were cut; for each, the connection of the driver, and the id of the
        #: server process.
        self.cut: list[tuple[BaseDatabaseWrapper, Any, int | None]] = []
        #: The connections of the thread that sends the request.
        self.connections: list[BaseDatabaseWrapper] = []
        self._recovery_point = "started"
        self._awaiting = False

    def reach(
        self,
        when: When,
        what: What,
        detail: str = "",
        *,
        connection: BaseDatabaseWrapper | None = None,
    ) -> None:
        """Record that the run has reached a place."""
        if self.dead:
            raise Died
        in_transaction = any(
            map(_in_transaction, [connection] if connection else _open_connections())
        )
        place = Place(
            len(self.places) + 1,
            when,
            what,
            shortened(detail),
            users_line(),
            in_transaction,
            KEYS in detail,
        )
        self.places.append(place)
        self._at(self, place)

    def die(self) -> None:
        """Simulate a crash at this place. Open transactions and their locks are lost; committed
        data stays."""
        self.dead = True
        for connection in _open_connections():
            is_postgresql = connection.vendor == "postgresql"
            pid = connection.connection.info.backend_pid if is_postgresql else None
            self.cut.append((connection, connection.connection, pid))
            _cut(connection)
        raise Died

    def noticed_phase(self, key: IdempotencyKey, **kwargs: Any) -> None:
        """Record a committed phase that kept the recovery point."""
        if key.recovery_point == self._recovery_point:
            self.no_ops.append(len(self.places))
        self._recovery_point = key.recovery_point

    def calls(self, address: Address) -> None:
        """Record a call to a downstream service if a transaction is open.

        An async view runs in another thread than its statements, so the connections are those of
        the thread that sends the request.
        """
        if any(
            connection.connection is not None and _in_transaction(connection)
            for connection in self.connections
        ):
            self.calls_in_transactions.add((address, users_line()))

    def sends(self, data: Any) -> None:
        """Record that data is sent to a downstream service."""
        if not self._awaiting:
            self.reach(
                "before", "downstream call", bytes(data[:200]).split(b"\r\n")[0].decode("latin-1")
            )
        self._awaiting = True

    def receives(self) -> None:
        """Record that a downstream service has answered."""
        if self._awaiting:
            self._awaiting = False
            self.reach("after", "downstream call", "over a socket")


_active: ContextVar[Run | None] = ContextVar("run under observation", default=None)


def active_run() -> Run | None:
    """Return the run that is observed here, if there is one."""
    return _active.get()


def reach(when: When, what: What, detail: str) -> None:
    """Record that the observed run, if there is one, has reached a place."""
    if (run := _active.get()) is not None:
        run.reach(when, what, detail)


@contextmanager
def observed(run: Run) -> Iterator[None]:
    """Observe the block as one run of a request. Afterwards the connections work again, however the
    block ended."""
    run.connections = [connections[alias] for alias in connections]
    token = _active.set(run)
    phase_committed.connect(run.noticed_phase, weak=False)
    with ExitStack() as stack:
        for connection in run.connections:
            stack.enter_context(_wrapped(connection, run))
        try:
            yield
        finally:
            phase_committed.disconnect(run.noticed_phase)
            _active.reset(token)
            stack.close()
            _revive(run)


def _open_connections() -> list[BaseDatabaseWrapper]:
    every = connections.all(initialized_only=True)
    return [connection for connection in every if connection.connection is not None]


def _in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the connection is in a transaction. Django's own flag is not enough: when
    Django commits, it has already left its atomic block."""
    if connection.vendor == "postgresql":
        return bool(connection.connection.info.transaction_status)
    return bool(getattr(connection.connection, "in_transaction", connection.in_atomic_block))


@contextmanager
def _wrapped(connection: BaseDatabaseWrapper, run: Run) -> Iterator[None]:
    """Record that the run reaches a place, before and after each statement and COMMIT of a
    connection."""
    commit, connect, open_cursor = connection._commit, connection.connect, connection._cursor  # type: ignore[attr-defined]

    def around_statement(execute: Callable[..., Any], sql: Any, *arguments: Any) -> Any:
        # composed by psycopg
        text = sql.as_string(connection.connection) if hasattr(sql, "as_string") else str(sql)
        run.written |= _written_tables(text, connection)
        run.reach("before", "statement", text, connection=connection)
        result = execute(sql, *arguments)
        run.reach("after", "statement", text, connection=connection)
        return result

    def around_commit() -> None:
        if not _in_transaction(connection):
            commit()
            return
        run.reach("before", "COMMIT", connection=connection)
        commit()
        run.reach("after", "COMMIT", connection=connection)

    def only_alive(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if run.dead:
                raise Died
            return function(*args, **kwargs)

        return guarded

    with (
        connection.execute_wrapper(around_statement),
        patch.object(connection, "_commit", around_commit),
        patch.object(connection, "connect", only_alive(connect)),
        patch.object(connection, "_cursor", only_alive(open_cursor)),
    ):
        yield


def _written_tables(sql: str, connection: BaseDatabaseWrapper) -> set[tuple[str, str, str]]:
    """Return the database, the schema or "", and the table of each write of a statement, as the
    catalogue spells them."""

    def spelt(name: str) -> str:
        if name[:1] in ('"', "`"):
            return name[1:-1].replace('""', '"')
        return name.lower() if connection.vendor == "postgresql" else name

    return {
        (connection.alias, spelt(schema), spelt(table)) for schema, table in _WRITE.findall(sql)
    }


def _cut(connection: BaseDatabaseWrapper) -> None:
    """End the open transaction of a connection, as the database does if the client process ends."""
    if connection.vendor == "sqlite":
        # A rollback has the same effect as a new connection after a crash. The connection must stay
        # open, because a database in memory ends with its connection.
        connection.connection.rollback()
    else:
        connection.connection.close()


def _revive(run: Run) -> None:
    """Replace each connection that was cut by a new connection, as in a new process. Wait until the
    server has ended the old connections."""
    for connection, cut, pid in run.cut:
        if connection.connection is not None and connection.vendor != "sqlite":
            connection._close()  # type: ignore[attr-defined]
        connection.connect()
        if connection.vendor == "sqlite":
            cut.close()
        with connection.cursor() as cursor:
            gone = pid is None
            while not gone:
                cursor.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid])
                gone = cursor.fetchone() is None
