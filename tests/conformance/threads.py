"""Requests in threads, each with a database connection of its own."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from django.db import connections

Result = TypeVar("Result")

#: Longer than any state takes to come; a test that waits so long has failed.
PATIENCE_SECONDS = 60


def in_background(function: Callable[[], Result]) -> "Future[Result]":
    """Run ``function`` in a thread, and close its connections when it ends."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            connections.close_all()
            future.set_exception(error)
        else:
            connections.close_all()
            future.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return future


def elsewhere(function: Callable[[], Result]) -> Result:
    """Run ``function`` in a thread, hence on another connection, to its end."""
    return in_background(function).result(PATIENCE_SECONDS)


def at_once(functions: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run the functions at the same time, and return what they return, in their order."""
    barrier = threading.Barrier(len(functions))

    def start(function: Callable[[], Result]) -> Callable[[], Result]:
        def started() -> Result:
            barrier.wait(PATIENCE_SECONDS)
            return function()

        return started

    futures = [in_background(start(function)) for function in functions]
    return [future.result(2 * PATIENCE_SECONDS) for future in futures]


class Gate:
    """A place in a view where its first visitor stops until it is let go; later ones pass."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def stop_here(self) -> None:
        """Stop, if nobody has stopped here before."""
        if not self.entered.is_set():
            self.entered.set()
            assert self._open.wait(PATIENCE_SECONDS), "nobody opened the gate"

    def wait_for_visitor(self) -> None:
        """Return when somebody has stopped here."""
        assert self.entered.wait(PATIENCE_SECONDS), "nobody came to the gate"

    def open(self) -> None:
        """Let the visitor go."""
        self._open.set()
