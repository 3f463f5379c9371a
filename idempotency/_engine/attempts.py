"""Repeat work in the process: after a serialization failure, and while another run holds the
key."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from django.db import Error

from idempotency import conf
from idempotency._engine import errors
from idempotency._engine.adapter import Run
from idempotency._engine.events import about
from idempotency._text import error_text, first_line
from idempotency.exceptions import NotReplicated, Unavailable

logger = logging.getLogger("idempotency")

#: A unique violation above READ COMMITTED may be a race; after this number of retries it counts as
#: a bug of the work.
_UNIQUE_RETRIES = 2
_FIRST_WAIT_SECONDS = 0.02
_LONGEST_WAIT_SECONDS = 0.5


class Attempts:
    """The attempts at work: ``for attempt in attempts: with attempt: return ...``. The block
    suppresses a serialization failure, whose transaction was rolled back. The loop then restores
    the state of the work and continues. Effects outside the database are repeated. The loop ends
    after SERIALIZATION_RETRIES, or if the state cannot be restored; the caller then raises
    Unavailable ``conflict``. Raises SessionLost if the connection was lost."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._unique_violations = 0

    def __iter__(self) -> "Iterator[Attempts]":
        for count in range(conf.get().SERIALIZATION_RETRIES + 1):
            if count:
                time.sleep(_backoff_seconds(count))
                self._run.sessions.require_all()  # A ROLLBACK may have failed.
                if not self._run.work.restore():
                    return
            yield self

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        run = self._run
        failure = (
            errors.retryable_failure(error, run.level, using=run.using)
            if isinstance(error, Exception)
            else None
        )
        self._unique_violations += failure == "unique"
        if failure is None or self._unique_violations > _UNIQUE_RETRIES:
            return False
        if error is not None and run.work.is_committed:
            if run.has_stored_result:
                text = "a hook of transaction.on_commit() failed after the COMMIT of key %s: %s"
                told = error_text(error, withheld=run.work.hides_errors)
                logger.error(text, run.key.key_hash, told, extra=about(run.key))
            return run.has_stored_result  # Without a result, a repeat would write again.
        key = run.key
        logger.info(
            "a %s%s is run again inside the process: %s",
            run.work.kind,
            f" of key {key.key_hash}" if key is not None else "",
            f"{failure} failure ({type(error).__name__})",  # Its message may quote the body.
            extra=about(key) if key is not None else None,
        )
        return True


def repeat(write: Callable[[], None], *, using: str) -> None:
    """Send one statement, and again after a serialization failure, which is possible at a high
    default level. Also send it again, on a new connection, if the server has ended the session at
    ``idle_session_timeout``: slow code of the project would meet the limit in each retry. If no
    repeat succeeds, raises SessionLost after such a time-out, and Unavailable otherwise."""
    timed_out = False
    for count in range(conf.get().SERIALIZATION_RETRIES + 1):
        if count:
            time.sleep(_backoff_seconds(count))
        try:
            return write()
        except NotReplicated:
            raise
        except Error as error:
            errors.raise_writer_busy(error)
            if errors.session_timed_out(error, using):
                timed_out = True
            elif not errors.serialization_failed(error):
                if not timed_out:
                    raise
                # Without the search path of a middleware, the new session may not find the key.
                logger.warning("a new session cannot end the run: %s", first_line(error))
                break
    raise errors.SessionLost if timed_out else conflict()


def _backoff_seconds(attempt: int) -> float:
    """Return the wait before attempt ``attempt`` (from 1), with full jitter."""
    return random.uniform(0, min(0.002 * 2**attempt, 1.0))  # nosec B311  # spreads retries; no secret


def conflict() -> Unavailable:
    return Unavailable("Each attempt in the process had a serialization failure.", code="conflict")


@cache
def waiting_slots(number: int) -> threading.Semaphore:
    """Return the slots of this process for runs that wait."""
    return threading.BoundedSemaphore(number)


class Wait:
    """The wait for another run of the key: up to ``seconds``, and with at most MAX_WAITING_REQUESTS
    in this process."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._pause = _FIRST_WAIT_SECONDS

    def pause(self) -> bool:
        """Wait, longer each time, and return True, to try again; return False when the time is
        over. The connection stays open, because a middleware may have set up its session."""
        left = self._deadline - time.monotonic()
        free = waiting_slots(conf.get().MAX_WAITING_REQUESTS)
        if left <= 0 or not free.acquire(blocking=False):
            return False
        try:
            time.sleep(min(left, random.uniform(self._pause / 2, self._pause)))  # nosec B311  # spreads waiters; no secret
            self._pause = min(self._pause * 2, _LONGEST_WAIT_SECONDS)
        finally:
            free.release()
        return True
