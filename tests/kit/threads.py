"""Threads with separate database connections, and a gate that holds one of them at a point of the
code under test."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from django.db import connections

Result = TypeVar("Result")

#: Longer than any expected state takes; a test that waits this long fails.
WAIT_SECONDS = 60


def in_background(work: Callable[[], Result]) -> "Future[Result]":
    """Start ``work`` in a thread. The test must call ``result()`` of the future to get an error of
    the thread."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            connections.close_all()
            future.set_exception(error)
        else:
            connections.close_all()
            future.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def background(work: Callable[[], Result]) -> Iterator["Future[Result]"]:
    """Run ``work`` in a thread during the block; the end of the block raises an error of the
    thread."""
    future = in_background(work)
    try:
        yield future
    finally:
        wait([future], WAIT_SECONDS)
    future.result(0)


def elsewhere(work: Callable[[], Result]) -> Result:
    """Run ``work`` to its end in a thread, and so on another connection; return its result."""
    return in_background(work).result(WAIT_SECONDS)


def at_once(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call the functions in threads that start together; return their results in order."""
    barrier = threading.Barrier(len(works))

    def start(work: Callable[[], Result]) -> Result:
        barrier.wait(WAIT_SECONDS)
        return work()

    futures = [in_background(partial(start, work)) for work in works]
    wait(futures, 2 * WAIT_SECONDS)
    return [future.result(0) for future in futures]


def all_at_once(work: Callable[[int], Result], count: int) -> list[Result]:
    """Call ``work(0)`` to ``work(count - 1)`` in threads that start together; return the results in
    order."""
    return at_once([partial(work, number) for number in range(count)])


class Gate:
    """A point in the code under test where the first run waits until the test opens the gate; later
    runs do not wait."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()
        self._once = threading.Lock()

    def wait_here(self) -> None:
        """Wait until the gate is open, in the first call; return immediately in later calls."""
        if self._once.acquire(blocking=False):
            self._reached.set()
            assert self._open.wait(WAIT_SECONDS), "nobody opened the gate"

    def wait_until_reached(self) -> None:
        """Return after the first run has reached the gate."""
        assert self._reached.wait(WAIT_SECONDS), "nobody came to the gate"

    def open(self) -> None:
        """Let the waiting run continue."""
        self._open.set()
