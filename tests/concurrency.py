"""Two at once: threads with a database connection of their own."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from django.db import connections

#: Longer than any state takes to come; a test that waits so long has failed.
WAIT_SECONDS = 60


@contextmanager
def background(work: Callable[[], Any]) -> Iterator["Future[Any]"]:
    """Run ``work`` in a thread while the block runs; its result is the future's, at the latest at the end of the block."""

    def with_own_connection() -> Any:
        try:
            return work()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(with_own_connection)
        yield future
        future.result(WAIT_SECONDS)


def all_at_once(work: Callable[[int], Any], count: int) -> list[Any]:
    """Call ``work(0)`` to ``work(count - 1)`` in threads that start together; return what they return."""
    barrier = threading.Barrier(count)

    def one(number: int) -> Any:
        try:
            barrier.wait(WAIT_SECONDS)
            return work(number)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


class Gate:
    """A place in a view where the first run waits until the test lets it go on."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()
        self._once = threading.Lock()

    def wait_here(self) -> None:
        """Wait, but only the first who comes."""
        if self._once.acquire(blocking=False):
            self._reached.set()
            assert self._open.wait(WAIT_SECONDS), "nobody opened the gate"

    def wait_until_reached(self) -> None:
        """Return when the first run stands at the gate."""
        assert self._reached.wait(WAIT_SECONDS), "nobody came to the gate"

    def open(self) -> None:
        """Let it go on."""
        self._open.set()
