"""Suspensions: a web worker stops for longer than the lock timeout, then resumes.

This simulates a host that loses its network. The connections of the worker stay open without
traffic, so its transactions keep their locks until PostgreSQL ends them. After the lock timeout,
other runs claim the keys of the suspended requests. A worker within a transaction is preferred;
``pg_stat_activity`` lists the transactions.
"""

import time
from collections.abc import Callable
from contextlib import suppress

import psutil
from django.conf import settings
from django.db import Error, connection

from rides_demo.simulator.crashes import Crashes

VANISH = "vanish-web"
#: The worker was suspended within a transaction; the transaction was still open after the lock
#: timeout.
IN_TRANSACTION, STILL_OPEN = (
    "vanish-web in a transaction",
    "vanish-web, transaction not ended in time",
)
#: The number of attempts, because another fault may kill the worker. The first ``CHOOSY_TRIES`` of
#: them immediately resume a worker that has no open transaction.
TRIES, CHOOSY_TRIES = 12, 6
#: A session that has been idle in a transaction for this time belongs to the suspended worker.
SILENT_SECONDS = 0.5
CERTAIN_SECONDS = 1.0
#: The suspension exceeds the lock timeout by this time.
MARGIN_SECONDS = 2.0

Session = tuple[int, object]


class Suspensions:
    """Suspend web workers of one run."""

    def __init__(self, crashes: Crashes, stopped: Callable[[float], bool]) -> None:
        """``stopped`` waits for the given seconds; if the simulation ends, it returns True
        immediately."""
        self._crashes, self._stopped = crashes, stopped
        #: The last statement of each transaction that was still open after the lock timeout.
        self.still_open: list[str] = []

    def inject(self) -> list[str]:
        """Suspend a web worker until after the lock timeout; return the observed faults.

        If the worker is killed during the suspension, another worker is suspended.
        """
        for attempt in range(TRIES):
            if (worker := self._crashes.web_worker()) is None:
                self._stopped(SILENT_SECONDS)
                continue
            began = time.monotonic()
            try:
                worker.suspend()
                silent = self._silent_sessions()
                if (silent or attempt >= CHOOSY_TRIES) and (
                    struck := self._outlast(worker, began, silent)
                ):
                    return struck
            except psutil.NoSuchProcess:
                continue
            finally:
                with suppress(psutil.NoSuchProcess):
                    worker.resume()
        return []

    def _outlast(self, worker: psutil.Process, began: float, silent: set[Session]) -> list[str]:
        seconds = settings.IDEMPOTENCY.get("LOCK_TIMEOUT_SECONDS", 90) + MARGIN_SECONDS
        if (
            self._stopped(seconds - (time.monotonic() - began))
            or worker.status() != psutil.STATUS_STOPPED
        ):
            return []
        open_still = _sessions_in_transactions(0)
        left = [open_still[session] for session in silent & open_still.keys()]
        self.still_open += left
        return [VANISH] + [IN_TRANSACTION] * bool(silent) + [STILL_OPEN] * bool(left)

    def _silent_sessions(self) -> set[Session]:
        """Return the sessions that stay idle in a transaction."""
        self._stopped(SILENT_SECONDS * 1.2)
        if not (found := _sessions_in_transactions(SILENT_SECONDS)):
            return set()
        self._stopped(CERTAIN_SECONDS)
        return found.keys() & _sessions_in_transactions(SILENT_SECONDS + CERTAIN_SECONDS).keys()


def _sessions_in_transactions(silent_seconds: float) -> dict[Session, str]:
    """Return the last statement of each transaction that has been idle for ``silent_seconds``."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pid, xact_start, query FROM pg_stat_activity WHERE datname ="
                " current_database() AND state LIKE 'idle in transaction%%' AND state_change <"
                " clock_timestamp() - make_interval(secs => %s)",
                [silent_seconds],
            )
            return {(pid, began): statement for pid, began, statement in cursor.fetchall()}
    except Error:
        return {}
    finally:
        # The connection belongs to this thread, and the database may restart before the next call.
        connection.close()
