"""The sessions of the database on which a request runs, and their loss.

A middleware may have set up the session: a search path, the tenant of row policies, a role. After a
loss Django opens a new connection that has nothing of this, so the rest of the request must not run
on it; a retry of the client may. A session that the server has ended at ``idle_session_timeout`` is
replaced, because a retry would meet the same limit; so is one that the project has closed.

Outside of a request, each outermost block ``with one_session`` begins anew: a task or a command may
go on after a loss.
"""

import threading
from typing import Any

from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from idempotency._engine.database_product import psycopg_connection
from idempotency._engine.errors import TIMED_OUT


class _Thread(threading.local):
    def __init__(self) -> None:
        #: Of a request, and of the runs inside one another.
        self.is_request, self.depth = False, 0
        self.forget()

    def forget(self) -> None:
        """Forget the sessions of earlier requests and runs of this thread."""
        #: The connection of psycopg of each alias.
        self.known: dict[str, Any] = {}
        #: The aliases of lost sessions that Django has replaced.
        self.replaced: set[str] = set()


_thread = _Thread()


def begin_request(**_: Any) -> None:
    _thread.is_request = True
    _thread.forget()


def end_request(**_: Any) -> None:
    _thread.is_request = False


class _OneSession:
    """A block in which no run continues on the session that replaced a lost one."""

    def __enter__(self) -> None:
        if not _thread.depth and not _thread.is_request:
            _thread.forget()
        _thread.depth += 1

    def __exit__(self, *_: object) -> None:
        _thread.depth -= 1


one_session = _OneSession()


def remember(connection: Any) -> None:
    """Remember the session, unless nothing of the request can have set it up: it is lost already,
    or Django will check it before its first statement."""
    own, alias = connection.connection, connection.alias
    unchecked = connection.health_check_enabled and not connection.health_check_done
    lost = connection.errors_occurred and getattr(own, "closed", False)
    if not (own is None or unchecked or lost or alias in _thread.known):
        _thread.known[alias] = own


def note_connected(connection: BaseDatabaseWrapper, **_: Any) -> None:
    """Note a new connection, and whether it replaces a lost one of the same request or run."""
    alias = connection.alias
    if _thread.is_request or _thread.depth:
        if _was_lost(_thread.known.get(alias)):
            _thread.replaced.add(alias)
        _thread.known[alias] = connection.connection


def is_lost(connection: BaseDatabaseWrapper) -> bool:
    """Return whether this request or run has lost a session of the connection. Django closes lost
    sessions at the beginning of a request, so an unknown one was lost in it."""
    unknown = connection.connection if _thread.is_request else None
    return connection.alias in _thread.replaced or _was_lost(
        _thread.known.get(connection.alias, unknown)
    )


def _was_lost(own: Any) -> bool:
    # neither closed by this process, nor ended at ``idle_session_timeout``
    return getattr(own, "broken", False) and not hasattr(own, TIMED_OUT)


def refuse_replaced(connection: BaseDatabaseWrapper) -> None:
    """Raise OperationalError if the connection has replaced a lost one of this request or run."""
    if connection.alias in _thread.replaced:
        raise OperationalError("The connection was lost during the request. A retry may succeed.")


def open_same(connection: BaseDatabaseWrapper) -> None:
    """Open the connection, and call ``refuse_replaced``."""
    if connection.vendor == "postgresql":
        psycopg_connection(connection)
    refuse_replaced(connection)


def any_is_lost() -> bool:
    """Return whether this request or run has lost a session of any database."""
    return any(map(is_lost, connections.all(initialized_only=True)))
