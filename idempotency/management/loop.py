"""The loop of a command: it repeats passes until SIGTERM, and is supervised by a thread that can
end the process.

The supervisor runs no code of the project, sends no statement and writes no log line, because each
of them may hang.
"""

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from django.db import connections

from idempotency import conf
from idempotency._async import FAILURES
from idempotency._engine.errors import drop_connection
from idempotency._watchdog import Watchdog
from idempotency.backends import BATCH_SECONDS, BROKER_TIMEOUT_SECONDS
from idempotency.management.failures import UNREACHABLE, in_one_line, is_unreachable, one_line_of
from idempotency.monitoring.heartbeats import ENQUEUER, WRITE_SECONDS, Heartbeat

logger = logging.getLogger("idempotency")

#: The exit status of a process that was ended although a thread of it was at work: a run hung, or
#: did not end after SIGTERM.
EXIT_HUNG = 3
#: The environment variable with the process id of ``idempotency_worker``, in its children.
PARENT_VARIABLE = "IDEMPOTENCY_WORKER_PID"
#: The maximum wait after failed passes. The wait doubles with each failure. An interval above this
#: maximum is not changed.
MAX_PAUSE_SECONDS = 10.0
#: The interval at which the supervisor looks at the runs. It is shorter than the time between the
#: end of a hung run and the claim of its key by the next completer, which is half of a lease.
_LOOK_SECONDS = 0.2


def end_seconds(name: str) -> int:
    """Return the time that a loop has for its end: a lease, and for the enqueuer at least the time
    that a batch may take."""
    batch = BATCH_SECONDS + BROKER_TIMEOUT_SECONDS if name == ENQUEUER else 0
    return max(conf.get().LOCK_TIMEOUT_SECONDS, batch)


class StopSignal:
    """SIGTERM and SIGINT as a flag that any thread can read and wait for.

    The flag is a pipe, because setting a threading.Event in a signal handler can deadlock with the
    interrupted wait.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def requested(self, wait_seconds: float = 0) -> bool:
        """Return whether a signal has arrived. Wait for a signal for at most ``wait_seconds``."""
        return bool(select.select([self._reader], [], [], wait_seconds)[0])

    def request(self) -> None:
        """Set the flag."""
        os.write(self._writer, b"x")

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Catch the signals in this block. Python can do so only in the main thread."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        caught = (signal.SIGTERM, signal.SIGINT) if in_main_thread else ()
        former = {
            number: signal.signal(number, lambda number, frame: self.request()) for number in caught
        }
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            os.close(self._reader)
            os.close(self._writer)


class Loop:
    """Repeat the passes of one kind until a signal arrives, in one or more threads. No thread waits
    for another thread.

    After a failed pass the loop retries on a new connection, and logs the first failure and the
    recovery. The loop calls ``say`` with the counts of each pass unless all counts are 0. It renews
    the heartbeat in the database ``using`` while it waits and between the batches of a pass. After
    a failed pass, it renews the heartbeat only when a pass succeeds. While the loop waits, it has
    no connection.
    """

    def __init__(
        self,
        name: str,
        run_pass: Callable[..., Any],
        *,
        interval: float,
        stop: StopSignal,
        say: Callable[[Any], None],
        using: str,
        threads: int = 1,
    ) -> None:
        self.name = name
        self._run_pass, self._interval, self._stop, self._say = run_pass, interval, stop, say
        self._heartbeat, self._using, self._threads = Heartbeat(name, using=using), using, threads
        self._watchdog = Watchdog()
        #: The threads that repeat passes.
        self._at_work: set[int] = set()
        #: The class of the last failure of a pass, until a pass of any thread succeeds.
        self._failure: object = None
        self._noting = threading.Lock()
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Run until a signal arrives, in this thread and further ones. On return the heartbeat is
        deleted, and all connections of the loop are closed.

        If a run hangs, no other run is begun. When the other runs have ended, the process ends with
        the status EXIT_HUNG, without any cleanup. It also ends if none of them has made progress
        for ``end_seconds()``. After a signal the process ends in the same way if its runs or its
        batch make no progress for that time.
        """
        further = [
            threading.Thread(target=self._work, name=f"{self.name}-{n}", daemon=True)
            for n in range(1, self._threads)
        ]
        supervisor = threading.Thread(
            target=self._supervise, name=f"{self.name}-supervisor", daemon=True
        )
        for thread in (*further, supervisor):
            thread.start()
        try:
            self._work()
            for thread in (*further, supervisor):
                thread.join()
            if self._errors:
                raise self._errors[0]
        finally:
            self._heartbeat.remove()
            connections.close_all()

    def _supervise(self) -> None:
        """Wait for a signal or a run that hangs. Then end the process, unless all threads end in
        time."""
        while not (hung := self._watchdog.hung_threads()):
            if self._stop.requested(_LOOK_SECONDS) or _is_orphan():
                break
        self._stop.request()
        limit = end_seconds(self.name)
        if hung:
            text = (
                "%s: a run hangs, so the process ends when the other runs have ended, or have made"
                " no progress for %d s"
            )
            _log_aside(text, self.name, limit)
        begun = time.monotonic()
        while self._at_work - self._watchdog.hung_threads():
            if time.monotonic() > max(begun, self._watchdog.last_progress()) + limit:
                break
            time.sleep(_LOOK_SECONDS)
        if hung or self._at_work:
            os._exit(EXIT_HUNG)

    def _work(self) -> None:
        """Repeat passes in this thread."""
        thread, failures = threading.get_ident(), 0
        self._at_work.add(thread)
        try:
            while not self._stop_requested():
                failures = 0 if self._turn() else failures + 1
                self._pause(failures)
        except BaseException as error:
            self._errors.append(error)
            self._stop.request()
        finally:
            connections.close_all()
            self._at_work.discard(thread)

    def _pause(self, failures: int) -> None:
        doubled: float = self._interval * 2 ** min(failures, 20)
        due = time.monotonic() + max(self._interval, min(doubled, MAX_PAUSE_SECONDS))
        while (left := due - time.monotonic()) > 0:
            self._beat()
            connections.close_all()  # The server may end a session that is idle for long.
            if self._stop.requested(min(left, WRITE_SECONDS)):
                return

    def _beat(self) -> None:
        if self._failure is None:
            self._heartbeat.beat()

    def _stop_requested(self) -> bool:
        self._beat()
        return self._stop.requested()

    def _turn(self) -> bool:
        """Do one pass; return whether it succeeded."""
        try:
            counts = self._run_pass(stop=self._stop_requested)
        except FAILURES as error:
            self._note_failure(error)
            drop_connection(connections[self._using])
            connections.close_all()
            return False
        with self._noting:
            if self._failure is not None:
                logger.warning("%s: recovered", self.name)
            self._failure = None
        if any(asdict(counts).values()):
            # The reader of the output may be gone, or its disk full.
            with contextlib.suppress(OSError):
                self._say(counts)
        return True

    def _note_failure(self, error: BaseException) -> None:
        """Log the first of consecutive failures of the same kind."""
        unreachable, line = is_unreachable(error), one_line_of(error, self._using)
        failure = UNREACHABLE if unreachable else type(error)
        with self._noting:
            known, self._failure = self._failure, failure
        if failure != known:
            text = "%s: pass failed, retrying at least every %g s: %s"
            level = logging.WARNING if unreachable else logging.ERROR
            values = (self.name, max(self._interval, MAX_PAUSE_SECONDS), line or in_one_line(error))
            logger.log(level, text, *values, exc_info=line is None)


def _is_orphan() -> bool:
    """Return whether this process is a child of an ``idempotency_worker`` that was killed."""
    return os.environ.get(PARENT_VARIABLE, str(os.getppid())) != str(os.getppid())


def _log_aside(text: str, *values: object) -> None:
    """Log an error from another thread, and wait for it briefly: a thread that hangs may hold a
    lock of the log."""
    thread = threading.Thread(target=logger.error, args=[text, *values], daemon=True)
    thread.start()
    thread.join(1)
