"""The sessions of the database that a run uses, and their loss.

A middleware may have set up a session: a search path, the tenant of row policies, a role. After a
loss Django may open a new connection, which has nothing of this. The run does not continue on it; a
retry of the client may. A run continues after its session was closed by the project, or ended by
the server at ``idle_session_timeout`` before a phase, call or operation, because a retry would meet
the same limit.
"""

import time
from typing import Any

from django.db import connections

from idempotency._engine.errors import TIMED_OUT, SessionLost, broken_connections, last_loss_time


class Sessions:
    """The sessions of all databases that were open when the key was claimed, or at the beginning of
    a phase or call."""

    def __init__(self) -> None:
        self._noted: list[Any] = []
        #: The time of the first ``note()``, after the claim. Earlier losses do not count.
        self._begun = 0.0

    @property
    def is_one_lost(self) -> bool:
        lost = (own for own in self._noted if getattr(own, "broken", False))
        return not all(hasattr(own, TIMED_OUT) for own in lost)

    def require_all(self, *, status: int = 0, cause: Exception | None = None) -> None:
        """Raise SessionLost, from ``cause``, if a noted session was lost. Call it in the session
        that the run will use: Django may replace a lost one until BEGIN. With a ``status`` from
        400, also raise it if this thread has a broken connection, or if this app has closed one
        since the run began: the loss may be the reason for the error. A connection that Django has
        replaced at the end of ``atomic()`` is not known."""
        lost_since = status >= 400 and last_loss_time() > self._begun
        if status >= 400:
            self._noted += [connection.connection for connection in broken_connections()]
        if lost_since or (self._noted and self.is_one_lost):
            raise SessionLost from cause

    def note(self) -> None:
        """Note the sessions that are open now."""
        self._begun = self._begun or time.monotonic()
        connection: Any
        for connection in connections.all(initialized_only=True):
            own = connection.connection
            # One that was lost before the run fails by itself. SQLite has no sessions.
            if getattr(own, "closed", True) or own in self._noted:
                continue
            # Nothing has used a session that Django will check before the first statement.
            if connection.health_check_done or not connection.health_check_enabled:
                self._noted.append(own)
