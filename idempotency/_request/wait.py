"""Wait for the first request of a key, for views with ``wait_seconds``."""

import random
import threading
import time
from functools import cache

from django.db import connections

from idempotency import conf

_FIRST_WAIT_SECONDS = 0.02
_LONGEST_WAIT_SECONDS = 0.5


@cache
def places(number: int) -> threading.Semaphore:
    """Return the places of this process for waiting requests."""
    return threading.BoundedSemaphore(number)


class Patience:
    """The wait of one request: up to ``seconds``, and with at most MAX_WAITING_REQUESTS in this process. A request in the
    main thread never waits, because its worker has only this thread."""

    def __init__(self, seconds: float, *, using: str) -> None:
        self._deadline = time.monotonic() + seconds
        self._pause = _FIRST_WAIT_SECONDS
        self._using = using

    def waited(self) -> bool:
        """Wait with growing pauses and return True, to try again; return False when the time is over. Before a longer pause
        the connection is closed, so that waiting requests do not exhaust the connections of the database."""
        left = self._deadline - time.monotonic()
        free = places(conf.get().MAX_WAITING_REQUESTS)
        if left <= 0 or threading.current_thread() is threading.main_thread() or not free.acquire(blocking=False):
            return False
        try:
            connection = connections[self._using]
            if self._pause > _FIRST_WAIT_SECONDS and not connection.in_atomic_block:
                connection.close()
            time.sleep(min(left, random.uniform(self._pause / 2, self._pause)))  # nosec B311  # spreads waiters; no secret
            self._pause = min(self._pause * 2, _LONGEST_WAIT_SECONDS)
        finally:
            free.release()
        return True
