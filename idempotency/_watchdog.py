"""The watchdog of a loop: it finds project code that hangs, and reports it.

A thread cannot be killed. Therefore the process of a loop ends after a run that hangs, and is
started again. Code that a caller runs outside of a loop is registered too, but nobody looks for it.
"""

import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("idempotency")

#: The time after which a run whose queries were cancelled still counts as hung.
CANCEL_SECONDS = 5.0
#: The folders of code that is not the project's.
_OTHER_FOLDERS = (
    f"{Path(__file__).parent}{os.sep}",
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """Project code that runs in this thread. It hangs if it makes no progress for
    ``limit_seconds``."""

    name: str
    limit_seconds: float
    #: Called once if the run hangs, in another thread, with the place of the code.
    mark: Callable[[str], object]
    #: The claimed key whose progress counts.
    key: Any
    thread: int = field(default_factory=threading.get_ident)
    #: The connections of the thread: project code may open each of them.
    connections: list[BaseDatabaseWrapper] = field(default_factory=lambda: list(connections.all()))
    progressed: float = field(default_factory=time.monotonic)

    @property
    def hangs(self) -> bool:
        return time.monotonic() - self.progressed > self.limit_seconds


#: By thread: the run of its innermost ``watched`` block.
_runs: dict[int, Run] = {}


@contextmanager
def watched(
    name: str, *, limit_seconds: float, mark: Callable[[str], object], key: Any = None
) -> Iterator[None]:
    """Register the block as a run of this thread. The time of an outer block counts from the end of
    this one."""
    run = Run(name, limit_seconds, mark, key)
    outer = _runs.get(run.thread)
    _runs[run.thread] = run
    try:
        yield
    finally:
        if outer is None:
            del _runs[run.thread]
        else:
            outer.progressed = time.monotonic()
            _runs[run.thread] = outer


def note_progress(key: Any) -> None:
    """Let the time of the run with the claim of this key begin again."""
    for run in list(_runs.values()):
        if run.key is not None and run.key.fence == key.fence:
            run.progressed = time.monotonic()


class Watchdog:
    """Looks at the runs of this process from another thread than theirs. It makes no statement and
    writes no log line itself, because these may hang too."""

    def __init__(self) -> None:
        self._reports: dict[Run, float] = {}

    def hung_threads(self) -> set[int]:
        """Report each run that hangs, once. Return the threads of those that still hang
        CANCEL_SECONDS after their report."""
        now, former = time.monotonic(), self._reports
        self._reports = {run: former.get(run, now) for run in list(_runs.values()) if run.hangs}
        for run in self._reports.keys() - former.keys():
            threading.Thread(
                target=_report, args=[run], name="idempotency-watchdog", daemon=True
            ).start()
        return {
            run.thread for run, reported in self._reports.items() if now - reported > CANCEL_SECONDS
        }

    def last_progress(self) -> float:
        """Return the time at which a run of this process made progress last, by the monotonic
        clock."""
        return max((run.progressed for run in list(_runs.values())), default=0.0)


def _report(run: Run) -> None:
    """Log where the run hangs, mark it in the database, and cancel its queries."""
    if (frame := sys._current_frames().get(run.thread)) is None:
        return  # It has ended meanwhile.
    stack = traceback.extract_stack(frame)
    place = _place_of(stack)
    text, values = (
        "%s made no progress for %g s and hangs at %s",
        (run.name, run.limit_seconds, place),
    )
    listing = "Stack of its thread:\n" + "".join(stack.format())
    # The methods of a logger take the stack of their own thread only.
    record = logger.makeRecord(
        logger.name, logging.ERROR, __file__, 0, text, values, None, sinfo=listing
    )
    logger.handle(record)
    marked = threading.Event()
    threading.Thread(
        target=_cancel, args=[run, marked], name="idempotency-cancel", daemon=True
    ).start()
    try:
        run.mark(place)
    except Exception:
        logger.exception("%s hangs, and could not be marked", run.name)
    finally:
        marked.set()
        connections.close_all()


def _place_of(stack: traceback.StackSummary) -> str:
    """Return the innermost line of the project, or else of any code."""
    own = [frame for frame in stack if not frame.filename.startswith(_OTHER_FOLDERS)] or stack
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}"


def _cancel(run: Run, marked: threading.Event) -> None:
    """Ask the server to cancel the queries of a run, once it is marked. A query of its own may lock
    the row of the mark."""
    marked.wait(1)
    for connection in run.connections:
        own: Any = connection.connection
        if connection.vendor == "postgresql" and own is not None and not own.closed:
            try:
                own.cancel_safe(timeout=CANCEL_SECONDS)
            except psycopg.Error as error:
                logger.info("a query on %r could not be cancelled: %s", connection.alias, error)
