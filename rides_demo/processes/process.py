"""Child processes: start, wait until ready, stop, kill, restart. They end with their parent.

Each child has its own process group. Ctrl-C in the terminal therefore reaches only the parent,
which stops its children in order, and killing the group also ends the children of a child.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from rides_demo.processes import watchdog

POLL_SECONDS = 0.02


class ProcessError(Exception):
    """A process did not start, or it died; the message gives the reason and the remedy."""


class EmbeddedServerError(ProcessError):
    """An embedded server did not start; the message gives the reason and the remedy."""


class _Watchdog:
    """The watchdog of this process; the first child starts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def tell(self, line: str) -> None:
        """Send ``line`` to the watchdog; a fork of this process starts its own watchdog."""
        with self._lock:
            if (
                self._process is None
                or self._process.poll() is not None
                or self._owner != os.getpid()
            ):
                self._owner = os.getpid()
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", watchdog.__file__],
                    stdin=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                atexit.register(self._leave, self._process)
            assert self._process.stdin is not None
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _leave(self, process: subprocess.Popen[str]) -> None:
        """Close the pipe at exit; the watchdog then ends the remaining groups."""
        if self._owner == os.getpid():
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            process.wait()


_watchdog = _Watchdog()


class Process:
    """A child process with a name; it can be started any number of times.

    ``output`` is a file, or a function that receives each line. ``user`` is the system user of the
    process, which only root can choose.
    """

    stop_signal: signal.Signals = signal.SIGTERM
    stop_seconds = 10.0

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        output: Path | Callable[[str], None] | None = None,
        user: str | None = None,
    ) -> None:
        self.name, self.command = name, list(command)
        self.environment, self.folder, self.output, self.user = environment, folder, output, user
        self._popen: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id, 0 if the process is not running."""
        return self._popen.pid if self._popen is not None and self.running else 0

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def exit_status(self) -> int | None:
        """The exit status of the last run; a negative number is the signal that ended it."""
        return None if self._popen is None else self._popen.poll()

    def prepare(self) -> None:
        """Prepare a start, for example create folders; ``launch`` calls this method before each
        start."""

    def is_ready(self) -> bool:
        """Return whether the process is ready for work."""
        return self.running

    def start(self, ready_seconds: float = 30) -> None:
        """Start the process and wait until it is ready, at most ``ready_seconds``."""
        self.launch()
        self.wait_ready(ready_seconds)

    def launch(self) -> None:
        """Start the process without waiting for it."""
        if self.running:
            return
        self.forget()
        self.prepare()
        given: dict[str, Any] = (
            {"user": self.user, "group": self.user, "extra_groups": []} if self.user else {}
        )
        if isinstance(self.output, Path):
            with self.output.open("ab") as log:
                self._popen = self._spawn(log, given)
        else:
            self._popen = self._spawn(subprocess.PIPE if self.output else None, given)
            if self.output is not None:
                self._reader = threading.Thread(
                    target=self._pass_on, args=(self._popen.stdout, self.output), daemon=True
                )
                self._reader.start()
        _watchdog.tell(f"+{self._popen.pid} {int(self.stop_signal)}")

    def _spawn(
        self, output: IO[bytes] | int | None, given: dict[str, Any]
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if self.environment is None else dict(self.environment),
                cwd=self.folder,
                process_group=0,
                **given,
            )
        except OSError as error:
            raise ProcessError(
                f"{self.name} cannot be started: {error}. Run `make clean`, then try again."
            ) from None

    @staticmethod
    def _pass_on(lines: IO[bytes], receive: Callable[[str], None]) -> None:
        with lines:
            for line in lines:
                receive(line.decode(errors="replace").rstrip())

    def wait_ready(self, seconds: float) -> None:
        """Wait until the process is ready.

        Raises ProcessError if the process ends.
        Raises ProcessError if the process is not ready after ``seconds``; the process is then
        killed.
        """
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            if not self.running:
                raise ProcessError(self.why_not_started())
            if time.monotonic() > deadline:
                self.kill()
                raise ProcessError(
                    f"{self.name} was not ready within {seconds:g} seconds."
                    f" {self.why_not_started()}"
                )
            time.sleep(POLL_SECONDS)

    def why_not_started(self) -> str:
        """Return the reason why the process is not running, and the remedy."""
        where = f" Its output is in {self.output}." if isinstance(self.output, Path) else ""
        return f"{self.name} ended with status {self.exit_status}.{where}"

    def stop(self) -> None:
        """Send the stop signal, wait up to ``stop_seconds`` for the end, then kill the rest of the
        group."""
        if self.running:
            assert self._popen is not None
            self._popen.send_signal(self.stop_signal)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(self.stop_seconds)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the process and its group, as in a crash; return after the process has
        ended."""
        if self._popen is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        self.forget()

    def forget(self) -> None:
        """Clean up after a process that has ended, and kill the rest of its group."""
        if self._popen is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
            _watchdog.tell(f"-{self._popen.pid}")
            if self._reader is not None:
                # Read the last lines. A grandchild in another group may keep the pipe open for
                # longer.
                self._reader.join(1)
            self._popen = self._reader = None

    def restart(self) -> None:
        """Stop the process, then start it."""
        self.stop()
        self.start()
