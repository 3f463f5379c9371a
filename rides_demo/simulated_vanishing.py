"""A host that vanishes: a web worker stands still for longer than the lock timeout, and then goes on where it was.

To the others it is gone. Its connections are not closed, they are silent: its transactions, and the locks they hold, stay until
PostgreSQL ends them. When it comes back its requests are late: others have taken their keys over. Preferably it is stopped in
the middle of a transaction; PostgreSQL's own list of sessions tells.
"""

import time
from collections.abc import Callable
from contextlib import suppress

import psutil
from django.conf import settings
from django.db import Error, connection

from rides_demo.simulated_crashes import Crashes

VANISH = "vanish-web"
#: The same, and it left a transaction open; then also, and it was still open when the lock timeout had long passed.
IN_TRANSACTION, HELD_ON = "vanish-web in a transaction", "vanish-web, transaction not ended in time"
#: Other faults may strike the one that was stopped; and that many times one without a transaction is let go.
TRIES, CHOOSY_TRIES = 12, 6
#: A session that has said nothing within a transaction for so long belongs to what was stopped.
SILENT_SECONDS = 0.5
CERTAIN_SECONDS = 1.0
#: So much longer than the lock timeout.
MARGIN_SECONDS = 2.0

Session = tuple[int, object]


class Vanishing:
    """Lets web workers of one run vanish for a while."""

    def __init__(self, crashes: Crashes, stopped: Callable[[float], bool]) -> None:
        """``stopped`` waits so many seconds, and returns at once, with True, when the simulation ends."""
        self._crashes, self._stopped = crashes, stopped
        #: The last statements of the transactions that were still open well after the lock timeout.
        self.held_on: list[str] = []

    def strike(self) -> list[str]:
        """Stop a web worker, let it go on after the lock timeout, and return all that struck, for the report.

        One that was killed meanwhile is not counted: another one is stopped.
        """
        for attempt in range(TRIES):
            if (worker := self._crashes.web_worker()) is None:
                self._stopped(SILENT_SECONDS)
                continue
            began = time.monotonic()
            try:
                worker.suspend()
                silent = self._silent_sessions()
                if (silent or attempt >= CHOOSY_TRIES) and (struck := self._outlast(worker, began, silent)):
                    return struck
            except psutil.NoSuchProcess:
                continue
            finally:
                with suppress(psutil.NoSuchProcess):
                    worker.resume()
        return []

    def _outlast(self, worker: psutil.Process, began: float, silent: set[Session]) -> list[str]:
        seconds = settings.IDEMPOTENCY.get("LOCK_TIMEOUT_SECONDS", 90) + MARGIN_SECONDS
        if self._stopped(seconds - (time.monotonic() - began)) or worker.status() != psutil.STATUS_STOPPED:
            return []
        open_still = _sessions_in_transactions(0)
        left = [open_still[session] for session in silent & open_still.keys()]
        self.held_on += left
        return [VANISH] + [IN_TRANSACTION] * bool(silent) + [HELD_ON] * bool(left)

    def _silent_sessions(self) -> set[Session]:
        """Return the sessions that stand still within a transaction, and go on doing so."""
        self._stopped(SILENT_SECONDS * 1.2)
        if not (found := _sessions_in_transactions(SILENT_SECONDS)):
            return set()
        self._stopped(CERTAIN_SECONDS)
        return found.keys() & _sessions_in_transactions(SILENT_SECONDS + CERTAIN_SECONDS).keys()


def _sessions_in_transactions(silent_seconds: float) -> dict[Session, str]:
    """Return the last statement of each transaction that has waited for its client for so long; none without a database."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pid, xact_start, query FROM pg_stat_activity WHERE datname = current_database() "
                "AND state LIKE 'idle in transaction%%' AND state_change < clock_timestamp() - make_interval(secs => %s)",
                [silent_seconds],
            )
            return {(pid, began): statement for pid, began, statement in cursor.fetchall()}
    except Error:
        return {}
    finally:
        # Of this thread alone; and the database may be gone at the next look.
        connection.close()
