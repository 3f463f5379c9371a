"""Run two requests at once, each in its own thread with its own connections. Each request pauses
at the boundary where the other request must run first."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from idempotency._engine.errors import drop_connection
from idempotency.testing.answers import Answer
from idempotency.testing.observing import Died, Run, observed
from idempotency.testing.places import Place

T = TypeVar("T")

#: The maximum time to wait until an attempt ends, pauses or waits for a lock. Then the other
#: attempt continues.
_PATIENCE_SECONDS = 2.0
#: The time limit of a step. Only a deadlock inside the kit takes longer.
_LIMIT_SECONDS = 20.0
_LOOK_SECONDS = 0.004
#: A thread without a task closes its connections after this time: a database with connections
#: cannot be dropped.
_IDLE_SECONDS = 0.2


class Threads:
    """The two threads of the attempts. They keep their connections to PostgreSQL: a new one takes
    as long as a request."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def run(self, task: Callable[[], None]) -> None:
        """Begin a task in an idle thread, with context variables as in a new thread."""
        self._tasks.put(partial(Context().run, task))

    def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in an idle thread. Return its result, or raise its exception."""
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self.run(task)
        return future.result(10 * _LIMIT_SECONDS)

    def close(self) -> None:
        """End the threads, and close their connections."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(_LIMIT_SECONDS)

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_IDLE_SECONDS)
            except Empty:
                discard_connections()
                continue
            if task is None:
                discard_connections()
                return
            task()


def discard_connections() -> None:
    """Close the connections of this thread, also in a pool. psycopg has prepared the statements of
    the snapshots. After a rollback to a savepoint it would drop those of this app with them, and a
    later test would fail."""
    for connection in connections.all(initialized_only=True):
        if connection.vendor == "postgresql":
            drop_connection(connection)
        connection.close()


class Attempt:
    """One of two requests with the same key. It pauses at the boundaries whose numbers are in
    ``stops``, until ``go_on()`` is called."""

    def __init__(
        self, threads: Threads, ask: Callable[[], Answer], *stops: int, in_transactions: bool
    ) -> None:
        self.run = Run(self._at)
        self.answer: Answer | None = None
        self.held: Place | None = None
        self._ask, self._stops, self._in_transactions = ask, stops, in_transactions
        self._boundaries = 0
        self._go, self._stands = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._threads = threads

    def start(self) -> None:
        """Begin the attempt."""
        self._threads.run(self._work)

    def go_on(self) -> None:
        """Let the attempt continue to its next stop."""
        if self.held is not None:
            self.held = None
            self._stands.clear()
            self._go.set()

    def settle(self) -> None:
        """Wait until the attempt has ended, has paused, or waits for a lock of the other
        attempt."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._stands.wait(_LOOK_SECONDS):
            if _somebody_waits() or time.monotonic() > deadline:
                return

    def result(self) -> Answer:
        """Let the attempt run to its end, and return the answer to its client. Raises the exception
        of the attempt if the kit itself failed."""
        self._stops = ()
        self.go_on()
        self._ended.wait(_LIMIT_SECONDS)
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
            self._stands.set()
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
            for connection in connections.all(initialized_only=True):
                if not _can_be_kept(connection):
                    connection.close()
            self._ended.set()
            self._stands.set()


def _can_be_kept(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the next attempt can use the connection: it is open, to PostgreSQL, and
    outside of any transaction."""
    kept = (
        connection.vendor == "postgresql"
        and connection.connection is not None
        and not connection.in_atomic_block
    )
    return (
        kept
        and not connection.connection.closed
        and not connection.connection.info.transaction_status
    )


def may_be_held(place: Place, *, in_transactions: bool) -> bool:
    """Return whether an attempt can pause at a place while another attempt runs.

    SQLite has one writer, and an INSERT with RETURNING still holds the lock of the file after it
    has returned.
    """
    free = (
        in_transactions
        or place.number == 1
        or not (place.in_transaction or place.what == "statement")
    )
    return place.boundary and free


def _somebody_waits() -> bool:
    """Return whether a session of this database waits for a lock of another session."""
    for connection in connections.all(initialized_only=True):
        # If this thread has no connection to a database, no session waits for a lock of this thread
        # there.
        if connection.vendor == "postgresql" and connection.connection is not None:
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname ="
                    " current_database() AND wait_event_type = 'Lock' AND"
                    " cardinality(pg_blocking_pids(pid)) > 0)"
                )
                if cursor.fetchone()[0]:
                    return True
    return False
