"""A gunicorn configuration for the soak: the clock of one web worker is an hour ahead or behind.

The other workers have the right time, so the service stays available. For example, the wrong worker
refuses the signature of a webhook as too old, and another worker accepts the next delivery. The
worker that holds the lock file has the wrong clock. After the end of this worker, the next new
worker takes the lock.

The clock is changed in Python before the app is imported: ``time.time``, ``time.time_ns``,
``datetime.now``, ``utcnow`` and ``today``. PostgreSQL and C code that calls the kernel keep the
right time.
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
    """Change the clock of this worker, unless another worker holds the lock. Gunicorn calls this
    function."""
    lock = (Path(os.environ["RIDES_RUN_FOLDER"]) / "wrong-clock.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return
    worker.wrong_clock = lock  # held until the process ends
    move_clock(HOUR_SECONDS if worker.age % 2 else -HOUR_SECONDS)


def move_clock(seconds: int) -> None:
    """Add ``seconds`` to the clock of this process permanently."""
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + seconds
    time.time_ns = lambda: right_ns() + seconds * 10**9

    def now(cls: type[datetime.datetime], tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return cls.fromtimestamp(time.time(), tz)

    def utcnow(cls: type[datetime.datetime]) -> datetime.datetime:
        return cls.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

    # Python code cannot set attributes of ``datetime``, and a subclass would differ from the type
    # that the database driver returns. Change the dictionary of the type instead.
    attributes = gc.get_referents(datetime.datetime.__dict__)[0]
    attributes.update(now=classmethod(now), utcnow=classmethod(utcnow))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
