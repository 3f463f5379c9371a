"""Crashes of the service's processes, by signals from outside: the victims are those that the supervisor names.

A crash counts only when the process really died of it; a process that is not started again ends the simulation.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from rides_demo.simulated_clients import CannotSimulate

KILL_WEB, KILL_SERVER, KILL_WORKER = "kill-web", "kill-server", "kill-worker"
#: Who dies under which fault. Of "kill-web" it is one of the workers of the server, its children; of "kill-server" all of them.
VICTIMS = {
    KILL_WEB: "web",
    "kill-enqueuer": "enqueuer",
    KILL_WORKER: "worker",
    "kill-completer": "completer",
    "kill-reaper": "reaper",
    KILL_SERVER: "web",
    "restart-postgres": "postgres",
    "restart-redis": "redis",
}
#: PostgreSQL's immediate shutdown: nothing is written any more, and the next start recovers. All others get SIGKILL.
SIGNALS = {"postgres": signal.SIGQUIT}
DEATH_SECONDS = 5.0
#: Far more than the supervisor promises.
RESTART_SECONDS = 15.0
#: How long to wait for a moment at which the worker has a job in hand.
HORSE_SECONDS = 3.0
POLL_SECONDS = 0.005

Found = TypeVar("Found")


class Crashes:
    """Strikes what the supervisor of ``run_dir`` looks after."""

    def __init__(self, run_dir: Path, chance: random.Random) -> None:
        self.pids_file, self._chance = run_dir / "pids.json", chance
        #: The longest time from a death until another process was there.
        self.slowest_restart_seconds = 0.0

    def check(self, faults: Iterable[str]) -> None:
        """Raise CannotSimulate unless the supervisor names all that these faults strike."""
        for fault in faults:
            self._pid(VICTIMS[fault])

    def strike(self, fault: str) -> list[str]:
        """Let the victim of ``fault`` die, wait until it has been replaced, and return all that struck, for the report.

        One that died of something else before it was struck is not counted: its successor is struck.
        """
        return _soon(lambda: self._kill_one() if fault == KILL_WEB else self._kill(fault), RESTART_SECONDS)

    def _kill_one(self) -> list[str]:
        worker = self.web_worker()
        return [KILL_WEB] if worker and _end([worker])[0] else []

    def web_worker(self) -> psutil.Process | None:
        """Return one of the web workers that are there at the moment."""
        workers = _children(self._running(VICTIMS[KILL_WEB]))
        return self._chance.choice(workers) if workers else None

    def _kill(self, fault: str) -> list[str]:
        name = VICTIMS[fault]
        process = self._running(name)
        horses = _soon(lambda: _horses(process), HORSE_SECONDS) if fault == KILL_WORKER else []
        # The worker first: it would see its horse die, and put the job back in good order.
        died, *horses_died = _end([process, *horses], SIGNALS.get(name, signal.SIGKILL))
        self._await_successor(name, process.pid)
        return [fault] + ["kill-work-horse"] * sum(horses_died) if died else []

    def _running(self, name: str) -> psutil.Process:
        """Return the process; between a death and the next start it is waited for."""

        def process() -> psutil.Process | None:
            with suppress(psutil.NoSuchProcess):
                return next(iter(_living([psutil.Process(self._pid(name))])), None)
            return None

        if found := _soon(process, RESTART_SECONDS):
            return found
        raise CannotSimulate(f"{name} was not started again within {RESTART_SECONDS:g} seconds.")

    def _await_successor(self, name: str, pid: int) -> None:
        began = time.monotonic()
        if not _soon(lambda: self._pid(name) not in (0, pid), RESTART_SECONDS):
            raise CannotSimulate(f"{name} was not started again within {RESTART_SECONDS:g} seconds.")
        self.slowest_restart_seconds = max(self.slowest_restart_seconds, time.monotonic() - began)

    def _pid(self, name: str) -> int:
        try:
            return int(json.loads(self.pids_file.read_text())[name])
        except (OSError, ValueError, KeyError) as error:
            raise CannotSimulate(
                f"{self.pids_file} does not name the {name} process ({error}): start the service with `make serve`, or leave "
                f"the fault out that strikes it."
            ) from None


def _horses(worker: psutil.Process) -> list[psutil.Process]:
    """Return the work horses: children in a group of their own, as the scheduler is not."""
    horses = []
    for child in _children(worker):
        with suppress(ProcessLookupError):
            if os.getpgid(child.pid) == child.pid:
                horses.append(child)
    return horses


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return _living(process.children())
    return []


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if not _is_dead(process)]


def _is_dead(process: psutil.Process) -> bool:
    """Tell whether it has ended; a zombie has."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def _end(processes: list[psutil.Process], number: signal.Signals = signal.SIGKILL) -> list[bool]:
    """Send all of them the signal, one after the other; return which died of it, and not before."""
    struck = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if not _is_dead(process):
                process.send_signal(number)
                struck.append(process)
    return [process in struck and bool(_soon(lambda one=process: _is_dead(one), DEATH_SECONDS)) for process in processes]


def _soon(condition: Callable[[], Found], seconds: float) -> Found:
    """Return what ``condition`` returns as soon as it is true, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return found
