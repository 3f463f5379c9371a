"""Two at once: a request in a thread of its own, with connections of its own, held up where the other one shall get ahead."""

import threading
import time
from collections.abc import Callable

from django.db import connections

from idempotency.testing.comparing import Answer
from idempotency.testing.observing import Died, Run, observed
from idempotency.testing.places import Place

#: How long an attempt that neither ends, stops nor waits for a lock is watched before the other one goes on.
_PATIENCE_SECONDS = 2.0
#: Nothing takes so long; a deadlock of the kit's own making would.
_LIMIT_SECONDS = 20.0
_LOOK_SECONDS = 0.002


class Attempt:
    """One of two requests with the same key. It is held up at its boundaries with the numbers ``stops``, until it is let go."""

    def __init__(self, ask: Callable[[], Answer], *stops: int, in_transactions: bool) -> None:
        self.run = Run(self._at)
        self.answer: Answer | None = None
        self.held: Place | None = None
        self._ask, self._stops, self._in_transactions = ask, stops, in_transactions
        self._boundaries = 0
        self._go = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def go_on(self) -> None:
        """Let it go on, to where it is held up next."""
        if self.held is not None:
            self.held = None
            self._go.set()

    def settle(self) -> None:
        """Return when it has ended, or stands at its boundary, or waits for a lock of the other one."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._thread.is_alive() and self.held is None:
            if _somebody_waits() or time.monotonic() > deadline:
                return
            self._thread.join(_LOOK_SECONDS)

    def result(self) -> Answer:
        """Return what its client got. Raises what went wrong in the kit itself."""
        self._stops = ()
        self.go_on()
        self._thread.join(_LIMIT_SECONDS)
        if self._failure is not None:
            raise self._failure
        assert self.answer is not None, "an attempt did not come to its end"  # nosec B101  # of the test kit
        return self.answer

    def _at(self, run: Run, place: Place) -> None:
        if not may_be_held(place, in_transactions=self._in_transactions):
            return
        self._boundaries += 1
        if self._boundaries - 1 in self._stops:
            self._go.clear()
            self.held = place
            if not self._go.wait(_LIMIT_SECONDS):
                raise Died

    def _work(self) -> None:
        try:
            with observed(self.run):
                self.answer = self._ask()
                self.run.reach("before", "response")
        except BaseException as error:
            self._failure = error
        finally:
            connections.close_all()


def may_be_held(place: Place, *, in_transactions: bool) -> bool:
    """Tell whether an attempt can be held up at a place while another one is at work.

    SQLite has one writer, and an INSERT with RETURNING has not let go of the file when it has returned.
    """
    free = in_transactions or place.number == 1 or not (place.in_transaction or place.what == "statement")
    return place.boundary and free


def _somebody_waits() -> bool:
    """Tell whether a session of this database waits for a lock of another."""
    for connection in connections.all(initialized_only=True):
        # Where this thread is not connected, nobody waits for what it holds.
        if connection.vendor == "postgresql" and connection.connection is not None:
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database() "
                    "AND wait_event_type = 'Lock' AND cardinality(pg_blocking_pids(pid)) > 0)"
                )
                if cursor.fetchone()[0]:
                    return True
    return False
