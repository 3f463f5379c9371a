"""The sessions of the database on which a request runs, and their loss.

A middleware may have set up the session: a search path, the tenant of row policies, a role. After a
loss Django opens a new connection that has nothing of this, so no run of the request continues on
it; a retry of the client may. A session that the server has ended at ``idle_session_timeout`` is
replaced, because a retry would meet the same limit; so is one that the project has closed.

Outside of a request, each outermost block ``with one_session`` begins anew: a task or a command may
go on after a loss.
"""

import os
import threading
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from idempotency._engine.database_product import psycopg_connection
from idempotency._engine.errors import TIMED_OUT, SessionLost


class _Request:
    """The mark of a request in its ``environ`` or ``scope``."""


class _Thread(threading.local):
    def __init__(self) -> None:
        #: A weak reference to the request. Some servers never send ``request_finished``.
        self.request: Any = None
        #: The number of runs inside one another.
        self.depth = 0
        #: The connection of psycopg of each alias.
        self.known: dict[str, Any] = {}
        #: The aliases of lost sessions that Django has replaced.
        self.replaced: set[str] = set()

    def is_in_request(self) -> bool:
        return self.request is not None and self.request() is not None


_thread = _Thread()
# A child that was forked in a request is not in it.
os.register_at_fork(after_in_child=_thread.__init__)  # type: ignore[misc]


def begin_request(
    environ: MutableMapping[str, Any] | None = None,
    scope: MutableMapping[str, Any] | None = None,
    **_: Any,
) -> None:
    """Begin anew: Django has closed the connections that are known to be lost."""
    _thread.__init__()  # type: ignore[misc]
    request = scope if environ is None else environ
    if request is not None:
        request["idempotency.request"] = mark = _Request()
        _thread.request = weakref.ref(mark)
        for connection in connections.all(initialized_only=True):
            remember(connection)


def end_request(**_: Any) -> None:
    _thread.request = None


class _OneSession:
    """A block in which no run continues on a session that replaced a lost one. Inside a request or
    another such block it changes nothing."""

    def __enter__(self) -> None:
        if not _thread.depth and not (_thread.request and _thread.request()):
            _thread.known, _thread.replaced = {}, set()
        _thread.depth += 1

    def __exit__(self, *_: object) -> None:
        _thread.depth -= 1


one_session = _OneSession()


@contextmanager
def another_request() -> Iterator[None]:
    """Run the block like a request of its own, also inside of one."""
    outer = dict(vars(_thread))
    _thread.__init__()  # type: ignore[misc]
    _thread.depth = 1
    try:
        yield
    finally:
        outer["replaced"] |= _thread.replaced
        vars(_thread).update(outer)


def remember(connection: Any) -> None:
    """Remember the session, unless nothing of the request can have set it up: it is lost already,
    or Django will check it before its first statement."""
    own, alias = connection.connection, connection.alias
    unchecked = connection.health_check_enabled and not connection.health_check_done
    lost = connection.errors_occurred and getattr(own, "closed", False)
    if not (own is None or unchecked or lost or alias in _thread.known):
        _thread.known[alias] = own


def note_connected(connection: BaseDatabaseWrapper, **_: Any) -> None:
    """Note a new connection, and whether it replaces a lost one of the same request or run. Other
    objects may connect to the same database for a purpose of their own."""
    alias = connection.alias
    if not (_thread.depth or _thread.is_in_request()):
        return
    if connection in connections.all(initialized_only=True):
        if _was_lost(_thread.known.get(alias)):
            _thread.replaced.add(alias)
        _thread.known[alias] = connection.connection


def is_lost(connection: BaseDatabaseWrapper) -> bool:
    """Return whether this request or run has lost a session of the connection. Django closes the
    lost sessions that it knows of at the beginning of a request."""
    in_request, alias = _thread.is_in_request(), connection.alias
    if not (_thread.depth or in_request):
        return False
    unknown = connection.connection if in_request else None
    return alias in _thread.replaced or _was_lost(_thread.known.get(alias, unknown))


def any_is_lost() -> bool:
    """Return whether this request or run has lost a session of any database."""
    return any(map(is_lost, connections.all(initialized_only=True)))


def _was_lost(own: Any) -> bool:
    # neither closed by this process, nor ended at ``idle_session_timeout``
    return getattr(own, "broken", False) and not hasattr(own, TIMED_OUT)


def refuse_replaced() -> None:
    """Raise SessionLost if a lost session of this request or run was replaced, in any database: the
    run may use several."""
    if _thread.replaced:
        raise SessionLost


def open_same(connection: BaseDatabaseWrapper) -> None:
    """Open the connection, with Django's health check if it is due. Raise SessionLost like
    ``refuse_replaced``."""
    if connection.vendor == "postgresql":
        psycopg_connection(connection)
    refuse_replaced()
