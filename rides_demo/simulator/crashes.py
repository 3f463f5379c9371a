"""Crashes of the service's processes by signals.

The supervisor's ``pids.json`` names the processes.

A crash counts only if the signal ended the process. The simulation fails if a process is not
restarted.
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

from rides_demo.simulator.booking_clients import CannotSimulate

KILL_WEB, KILL_SERVER, KILL_WORKER, KILL_LOOPS = (
    "kill-web",
    "kill-server",
    "kill-worker",
    "kill-loops",
)
RESTART_POSTGRES, FAILOVER, RESTART_BROKER = "restart-postgres", "failover", "restart-broker"
#: The process that each fault ends. "kill-web" ends one worker of the web server, "kill-server"
#: ends all of it. "failover" ends the primary with all its processes, like the loss of its host;
#: the supervisor's next start promotes the standby.
VICTIMS = {
    KILL_WEB: "web",
    "kill-enqueuer": "enqueuer",
    KILL_WORKER: "worker",
    "kill-completer": "completer",
    "kill-reaper": "reaper",
    KILL_SERVER: "web",
    KILL_LOOPS: "loops-b",
    RESTART_POSTGRES: "postgres",
    FAILOVER: "postgres",
    "restart-redis": "redis",
    RESTART_BROKER: "broker",
}
#: SIGQUIT is PostgreSQL's immediate shutdown; the next start recovers. All other faults send
#: SIGKILL.
SIGNALS = {RESTART_POSTGRES: signal.SIGQUIT}
DEATH_SECONDS = 5.0
#: Far more time than the supervisor needs, even after a failover, when it copies the database.
RESTART_SECONDS = 60.0
#: The longest wait until the worker runs a job. RQ runs each job in a child, the "work horse".
HORSE_SECONDS = 3.0
POLL_SECONDS = 0.005

Found = TypeVar("Found")


class Crashes:
    """Inject crashes into the processes of the supervisor of ``run_dir``."""

    def __init__(self, run_dir: Path, chance: random.Random) -> None:
        self.pids_file, self._chance = run_dir / "pids.json", chance
        #: The longest time from the end of a process to its restart.
        self.slowest_restart_seconds = 0.0

    def check(self, faults: Iterable[str]) -> None:
        """Raise CannotSimulate unless ``pids.json`` names the process of each fault."""
        for fault in faults:
            self._pid(VICTIMS[fault])

    def inject(self, fault: str) -> list[str]:
        """End the process of ``fault`` and return the observed faults.

        Except for ``kill-web``, wait until the process is restarted. If the process ends for
        another reason first, end its successor instead.
        """
        return _soon(
            lambda: self._kill_one() if fault == KILL_WEB else self._kill(fault), RESTART_SECONDS
        )

    def _kill_one(self) -> list[str]:
        worker = self.web_worker()
        return [KILL_WEB] if worker and _end([worker])[0] else []

    def web_worker(self) -> psutil.Process | None:
        """Return a random web worker, or None if there is none."""
        workers = _children(self._running(VICTIMS[KILL_WEB]))
        return self._chance.choice(workers) if workers else None

    def _kill(self, fault: str) -> list[str]:
        name = VICTIMS[fault]
        process = self._running(name)
        horses = _soon(lambda: _horses(process), HORSE_SECONDS) if fault == KILL_WORKER else []
        backends = _children(process) if fault == FAILOVER else []
        # End the worker first: a running worker would detect the end of its work horse and requeue
        # the job. A running postmaster would replace its children.
        died, *children_died = _end(
            [process, *horses, *backends], SIGNALS.get(fault, signal.SIGKILL)
        )
        self._await_successor(name, process.pid)
        return [fault] + ["kill-work-horse"] * sum(children_died[: len(horses)]) if died else []

    def _running(self, name: str) -> psutil.Process:
        """Return the process; during a restart, wait for the new process."""

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
            raise CannotSimulate(
                f"{name} was not started again within {RESTART_SECONDS:g} seconds."
            )
        self.slowest_restart_seconds = max(self.slowest_restart_seconds, time.monotonic() - began)

    def _pid(self, name: str) -> int:
        try:
            return int(json.loads(self.pids_file.read_text())[name])
        except (OSError, ValueError, KeyError) as error:
            raise CannotSimulate(
                f"{self.pids_file} does not name the {name} process ({error}): start the service"
                " with `make serve`, or leave out the fault that ends this process."
            ) from None


def _horses(worker: psutil.Process) -> list[psutil.Process]:
    """Return the work horses: children with their own process group, unlike the scheduler."""
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
    """Return whether the process has ended; a zombie has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def _end(processes: list[psutil.Process], number: signal.Signals = signal.SIGKILL) -> list[bool]:
    """Send the signal to each process in order; return for each whether the signal ended it."""
    struck = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if not _is_dead(process):
                process.send_signal(number)
                struck.append(process)
    return [
        process in struck and bool(_soon(lambda one=process: _is_dead(one), DEATH_SECONDS))
        for process in processes
    ]


def _soon(condition: Callable[[], Found], seconds: float) -> Found:
    """Poll ``condition`` until it is true, at most ``seconds``; return its last result."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return found
