"""Every process of Rocket Rides: start them in order, start again what dies, stop them all.

The run folder holds what one such set owns: the data, the logs, the mails, and ``pids.json``, rewritten whenever one changes: a
flat object of name to process id. The names are ``supervisor``, ``postgres``, ``redis``, ``sandbox``, ``web``, ``enqueuer``,
``worker``, ``completer``, ``reaper``; what is not run is absent. The web workers are the children of ``web``.

Nothing is left behind, not even by ``kill -9`` of the supervisor: see ``rides_demo.guard``.
"""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Self

from rides_demo.processes import Process, ProcessError
from rides_demo.services import Postgres, Redis, free_port, port_is_free, sandbox_port

BASE_FOLDER = Path(__file__).resolve().parent.parent
#: How often the processes are looked at.
WATCH_SECONDS = 0.1
#: One that dies again and again is started this often at most; well below the two seconds that are promised.
RESTART_SECONDS = 1.0
WEB_THREADS = 8
READY_SECONDS = 60


class Supervisor:
    """The processes of one run, on one port, in one folder; a context manager that watches from a thread of its own.

    ``say`` gets each line that a process writes, with its name before it. ``environment`` is added to that of the processes.
    Services that the environment names (``DATABASE_URL``, ``REDIS_URL``, ``STRIPE_API_BASE``, or a ``STRIPE_API_KEY`` of a real
    account) are used and not started. ``through`` is told the variable and the URL of each service that is started, and returns
    the URL that the processes use: that of a proxy, for one.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        *,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        through: Callable[[str, str], str] = lambda variable, url: url,
    ) -> None:
        self.folder, self.port, self.url = folder.resolve(), port, f"http://127.0.0.1:{port}"
        self.environment = {**os.environ, **(environment or {})}
        self.processes: dict[str, Process] = {}
        self._say, self._through = say, through
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self._due: dict[str, float] = {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and return when the web server takes requests; raise ProcessError, naming the cure, if not."""
        if not port_is_free(self.port):
            raise ProcessError(f"Port {self.port} is taken. Stop what listens there, or choose another one: PORT=8001.")
        if self.environment.get("STRIPE_API_KEY", "").startswith(("sk_live_", "rk_live_")):
            raise ProcessError("STRIPE_API_KEY is a live key: the demo would charge real cards. Use a test key, or none.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProcessError(f"The folder {self.folder} cannot be used: {error.strerror}. Set RIDES_RUN_FOLDER.") from None
        self._start_services()
        for command in ("migrate", "seed"):
            self._run(command, "--verbosity", "0")
        web = [
            "gunicorn", "rides_demo.wsgi", "--bind", f"127.0.0.1:{self.port}", "--worker-class", "gthread",
            "--workers", self.environment.get("WEB_WORKERS") or "2", "--threads", str(WEB_THREADS), "--graceful-timeout", "5",
            "--no-control-socket",
        ]  # fmt: skip
        self._launch("web", [sys.executable, "-m", *web])
        for name, arguments in {
            "enqueuer": ("enqueue_jobs", "--loop", "--interval", "0.5"),
            "worker": ("rqworker", "default", "--with-scheduler", "--worker-class", "rides_demo.worker.OnlyWorker"),
            "completer": ("complete_keys", "--loop", "--interval", self.environment.get("COMPLETER_INTERVAL_SECONDS") or "5"),
            "reaper": ("reap_keys", "--loop", "--interval", "60"),
        }.items():
            self._launch(name, manage(*arguments))
        self._await_web()

    def _start_services(self) -> None:
        """Start what the environment does not name, and name it there."""
        given = self.environment
        given |= {
            "PORT": str(self.port),
            "RIDES_RUN_FOLDER": str(self.folder),
            "DJANGO_SETTINGS_MODULE": "rides_demo.settings",
            "PYTHONUNBUFFERED": "1",
        }
        for variable, name, service in (("DATABASE_URL", "postgres", Postgres), ("REDIS_URL", "redis", Redis)):
            if not given.get(variable):
                started = service(self.folder / name)
                self.processes[name] = started
                started.start()
                given[variable] = self._through(variable, started.url)
        if not (given.get("STRIPE_API_BASE") or given.get("STRIPE_API_KEY")):
            port = sandbox_port(self.port)
            port = port if port_is_free(port) else free_port()
            given["STRIPE_API_BASE"] = f"http://127.0.0.1:{port}"
            given.setdefault("STRIPE_WEBHOOK_SECRET", "whsec_rocket_rides_demo_only")
            sandbox = [
                "rides_demo.sandbox", "--port", str(port), "--seed", given.get("SANDBOX_SEED") or "1",
                "--webhook-url", f"{self.url}/webhooks/stripe",
            ]  # fmt: skip
            self._launch("sandbox", [sys.executable, "-m", *sandbox])
            self._await("sandbox", lambda: not port_is_free(port))

    def _launch(self, name: str, command: list[str]) -> None:
        process = Process(
            name,
            command,
            environment=self.environment,
            folder=BASE_FOLDER,
            output=lambda line: self._say(f"{name:>9} | {line}"),
        )
        self.processes[name] = process
        process.launch()

    def _run(self, command: str, *arguments: str) -> None:
        """Run a management command to its end; raise ProcessError with its last line when it fails."""
        done = subprocess.run(
            manage(command, *arguments),
            env=self.environment,
            cwd=BASE_FOLDER,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        for line in (done.stdout + done.stderr).splitlines():
            self._say(f"{command:>9} | {line}")
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise ProcessError(f"`manage.py {command}` failed: {last}")

    def _await_web(self) -> None:
        # Straight to the loopback port: a proxy from the environment does not lead there.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def healthy() -> bool:
            with suppress(OSError), opener.open(f"{self.url}/healthz", timeout=5) as answer:
                return int(answer.status) == 200
            return False

        self._await("web", healthy)

    def _await(self, name: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        process = self.processes[name]
        while not condition():
            if not process.running:
                raise ProcessError(f"{name} ended with status {process.exit_status}; its output above says why.")
            if time.monotonic() > deadline or self._stopping.wait(WATCH_SECONDS):
                raise ProcessError(f"{name} took no requests within {READY_SECONDS} seconds; its output above may say why.")
        self._write_pids()

    def pids(self) -> dict[str, int]:
        """Return the process ids by name; 0 is one that is not running at the moment."""
        return {"supervisor": os.getpid()} | {name: process.pid for name, process in self.processes.items()}

    def _write_pids(self) -> None:
        new = self.folder / "pids.json.new"
        try:
            new.write_text(json.dumps(self.pids(), indent=1))
            new.replace(self.folder / "pids.json")
        except OSError as error:
            # A full disk must not end the watch.
            self._say(f"supervisor | {new} cannot be written: {error.strerror}")

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_SECONDS):
            for name, process in list(self.processes.items()):
                if not process.running and not self._stopping.is_set():
                    self._revive(name, process)

    def _revive(self, name: str, process: Process) -> None:
        """Start again what died, at most once in ``RESTART_SECONDS``; what cannot be started yet is tried again."""
        now = time.monotonic()
        if now < self._due.get(name, 0.0):
            return
        self._due[name] = now + RESTART_SECONDS
        self._say(f"{name:>9} | ended with status {process.exit_status}; starting it again")
        try:
            if isinstance(process, Postgres | Redis):
                process.start()
            else:
                process.launch()
            if name == "sandbox":
                # It forgot its customers.
                self._await(name, lambda: not port_is_free(int(self.environment["STRIPE_API_BASE"].rpartition(":")[2])))
                self._run("seed")
        except ProcessError as error:
            self._say(f"{name:>9} | {error}")
        self._write_pids()

    def stop(self) -> None:
        """Stop everything: what uses the services first, the services last; nothing runs on return."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
        services = [self.processes.pop(name) for name in ("sandbox", "redis", "postgres") if name in self.processes]
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(Process.stop, self.processes.values()))
            list(pool.map(Process.stop, services))
        self.processes.clear()
        pids = self.folder / "pids.json"
        with suppress(OSError, ValueError):
            # Not when the folder is another's, which is why this one did not start.
            if json.loads(pids.read_text())["supervisor"] == os.getpid():
                pids.unlink()


def manage(*arguments: str) -> list[str]:
    """Return the command line of a management command of the demo."""
    return [sys.executable, str(BASE_FOLDER / "manage.py"), *arguments]
