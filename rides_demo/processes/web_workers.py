"""The web workers of ``make serve`` and the requests that they run, for the button that kills a
worker.

Each running request is a file in a folder that the workers share.
"""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

#: The environment variable with the process id of the supervisor. Only ``make serve`` sets it.
SUPERVISOR = "RIDES_SUPERVISOR_PID"


def siblings() -> dict[int, psutil.Process]:
    """Return the workers of this web server, this process among them, by process id.

    The result is empty unless this process is a worker whose master was started by the supervisor
    itself. The button can therefore kill no other process.
    """
    if not (supervisor := os.environ.get(SUPERVISOR)):
        return {}
    try:
        master = psutil.Process(os.getppid())
        if str(master.ppid()) != supervisor:
            return {}
        return {worker.pid: worker for worker in master.children()}
    except psutil.NoSuchProcess:  # The server is being stopped.
        return {}


class RunningRequests:
    """The requests that run in the workers: one file in ``folder`` for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def entered(self, *name: str) -> Iterator[None]:
        """Register that this thread runs the request ``name``. The file of a killed worker
        remains."""
        self.folder.mkdir(parents=True, exist_ok=True)
        entry = self.folder / f"{_digest(name)}.{os.getpid()}.{threading.get_ident()}"
        entry.touch()
        try:
            yield
        finally:
            entry.unlink(missing_ok=True)

    def worker_of(self, *name: str) -> psutil.Process | None:
        """Return the worker that has run the request ``name`` for the longest time, or None."""
        workers = siblings()
        began = {}
        for entry in self.folder.glob(f"{_digest(name)}.*"):
            pid = int(entry.name.split(".")[1])
            try:
                if pid in workers:
                    began[pid] = min(entry.stat().st_mtime, began.get(pid, float("inf")))
            except FileNotFoundError:
                continue  # The request has ended.
        return workers[min(began, key=began.__getitem__)] if began else None


def _digest(name: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(name).encode()).hexdigest()
