"""A configuration of gunicorn for the soak: one of the web workers, never more, has a clock that is an hour off.

The others are right, so that the service as a whole can go on: a webhook, for one, is refused by a worker that believes its
signature to be an hour old, and is taken by another one when it is delivered again. Whoever holds the lock file is the one that
errs; when it dies, the next worker that starts takes its place. Forward and back take turns.

The clock is moved inside Python, before the app is imported: ``time.time``, ``time.time_ns``, ``datetime.now``, ``utcnow`` and
``today``. The clocks of PostgreSQL, and of C code that asks the kernel by itself, stay right.
"""

import ctypes
import datetime
import fcntl
import gc
import os
import time
from pathlib import Path
from typing import Any

HOUR_SECONDS = 3600


def post_fork(server: Any, worker: Any) -> None:
    """Move the clock of this worker unless another one errs already; called by gunicorn in each new worker."""
    lock = (Path(os.environ["RIDES_RUN_FOLDER"]) / "wrong-clock.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return
    worker.wrong_clock = lock  # held until the process ends
    move_clock(HOUR_SECONDS if worker.age % 2 else -HOUR_SECONDS)


def move_clock(seconds: int) -> None:
    """Let this process believe that it is so many seconds later, for good."""
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + seconds
    time.time_ns = lambda: right_ns() + seconds * 10**9

    def now(cls: type[datetime.datetime], tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return cls.fromtimestamp(time.time(), tz)

    def utcnow(cls: type[datetime.datetime]) -> datetime.datetime:
        return cls.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

    # The type is immutable to Python; a subclass in its place would not be the type of what the database driver returns.
    attributes = gc.get_referents(datetime.datetime.__dict__)[0]
    attributes.update(now=classmethod(now), utcnow=classmethod(utcnow))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
