"""The supervisor starts, restarts and stops the processes of Rocket Rides.

The run folder contains the data, the logs, the e-mails and ``pids.json``, an object that maps
names to process ids and is rewritten after each change. The names are ``supervisor``, ``postgres``,
``redis`` or ``broker``, ``sandbox``, ``web``, ``enqueuer``, ``worker``, ``completer``, ``reaper``,
and ``loops-b`` for the loops of a second database. A process that the supervisor does not start is
absent. The web workers are the children of ``web``.

All processes end with the supervisor, even if ``kill -9`` ends the supervisor: see
``rides_demo.processes.watchdog``.
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

from rides_demo.processes.brokers import BROKERS
from rides_demo.processes.embedded import Postgres, Redis
from rides_demo.processes.ports import free_port, port_is_free, sandbox_port
from rides_demo.processes.process import Process, ProcessError
from rides_demo.processes.replicated import PostgresPair
from rides_demo.sharding import SHARDS

#: Shorter limits than the defaults of 90, 300 and 60 seconds, because a visitor or the simulator
#: waits until a lock expires, and until the completer finishes a key.
SHORT_LIMITS = {
    "LOCK_TIMEOUT_SECONDS": "10",
    "COMPLETER_MIN_AGE_SECONDS": "15",
    "COMPLETER_IDLE_SECONDS": "5",
    "COMPLETER_INTERVAL_SECONDS": "1",
}
BASE_FOLDER = Path(__file__).resolve().parents[2]
#: The interval between two checks of the processes.
WATCH_SECONDS = 0.1
#: The shortest time between two restarts of a process. It is well below the two seconds that the
#: tests allow.
RESTART_SECONDS = 1.0
WEB_THREADS = 8
#: The options of ``idempotency_worker`` for the second database.
SHARD_LOOPS = ("--enqueue-interval", "0.5", "--complete-interval", "1", "--concurrency", "2")
READY_SECONDS = 60


class Supervisor:
    """The processes of one run, with one port and one folder; a context manager.

    ``say`` receives each line that a process writes, with the name of the process as prefix.
    ``environment`` is added to the environment of the processes. The supervisor does not start a
    service that the environment names (``DATABASE_URL``, ``REDIS_URL``, ``BROKER_URL``,
    ``STRIPE_API_BASE``, or the ``STRIPE_API_KEY`` of a real account). ``through`` receives the
    variable and the URL of each server that is started, and returns the URL for the processes, for
    example the URL of a proxy.
    ``prepared`` is called after the migrations, before the first process that serves requests.
    ``postgres`` is the class of the database server.

    If the environment has ``SHARD_B_DATABASE_URL``, the second tenant of ``rides_demo.sharding``
    has this database, and its loops run in ``idempotency_worker``. If the environment has
    ``BROKER``, this broker replaces Redis, and a consumer replaces the RQ worker.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        *,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        through: Callable[[str, str], str] = lambda variable, url: url,
        prepared: Callable[[], None] = lambda: None,
        postgres: type[Postgres | PostgresPair] = Postgres,
    ) -> None:
        self.folder, self.port, self.url = folder.resolve(), port, f"http://127.0.0.1:{port}"
        self.environment = {**os.environ, **(environment or {})}
        self.processes: dict[str, Process] = {}
        self._say, self._through, self._prepared, self._postgres = say, through, prepared, postgres
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
        """Start all processes and wait for the web server; raise ProcessError if that fails."""
        if not port_is_free(self.port):
            raise ProcessError(
                f"Port {self.port} is taken. Stop the process that uses it, or choose another port:"
                " PORT=8001."
            )
        if self.environment.get("STRIPE_API_KEY", "").startswith(("sk_live_", "rk_live_")):
            raise ProcessError(
                "STRIPE_API_KEY is a live key: the demo would charge real cards. Use a test key, or"
                " none."
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProcessError(
                f"The folder {self.folder} cannot be used: {error.strerror}. Set RIDES_RUN_FOLDER."
            ) from None
        self._start_services()
        self._run("migrate", "--verbosity", "0")
        if self._has_shard:
            self._run("migrate", "--verbosity", "0", "--database", "shard_b")
        self._run("seed", "--verbosity", "0")
        self._prepared()
        web = [
            "gunicorn", "rides_demo.wsgi", "--bind", f"127.0.0.1:{self.port}",
            "--worker-class", "gthread", "--workers", self.environment.get("WEB_WORKERS") or "2",
            "--threads", str(WEB_THREADS), "--graceful-timeout", "5", "--no-control-socket",
        ]  # fmt: skip
        self._launch("web", [sys.executable, "-m", *web])
        for name, arguments in {
            "enqueuer": ("enqueue_jobs", "--loop", "--interval", "0.5"),
            "worker": ("consume_jobs",)
            if self.environment.get("BROKER")
            else (
                "rqworker",
                "default",
                "--with-scheduler",
                "--worker-class",
                "rides_demo.processes.worker.OnlyWorker",
            ),
            "completer": (
                "complete_keys",
                "--loop",
                "--interval",
                self.environment.get("COMPLETER_INTERVAL_SECONDS") or "5",
            ),
            "reaper": ("reap_keys", "--loop", "--interval", "60"),
        }.items():
            self._launch(name, manage(*arguments))
        if self._has_shard:
            self._launch(
                "loops-b", manage("idempotency_worker", "--database", "shard_b", *SHARD_LOOPS)
            )
        self._await_web()

    @property
    def _has_shard(self) -> bool:
        return bool(self.environment.get("SHARD_B_DATABASE_URL"))

    def _start_services(self) -> None:
        """Start each service that the environment does not name, and add its URL to the
        environment."""
        given = self.environment
        given |= {
            "PORT": str(self.port),
            "RIDES_RUN_FOLDER": str(self.folder),
            "DJANGO_SETTINGS_MODULE": "rides_demo.settings",
            "PYTHONUNBUFFERED": "1",
        }
        broker = given.get("BROKER")
        servers = (
            ("DATABASE_URL", "postgres", self._postgres),
            ("BROKER_URL", "broker", BROKERS[broker]) if broker else ("REDIS_URL", "redis", Redis),
        )
        for variable, name, server in servers:
            if not given.get(variable):
                started = server(self.folder / name)
                self.processes[name] = started
                started.start()
                given[variable] = self._through(variable, started.url)
        if not (given.get("STRIPE_API_BASE") or given.get("STRIPE_API_KEY")):
            port = sandbox_port(self.port)
            port = port if port_is_free(port) else free_port()
            given["STRIPE_API_BASE"] = f"http://127.0.0.1:{port}"
            given.setdefault("STRIPE_WEBHOOK_SECRET", "whsec_rocket_rides_demo_only")
            hosts = [f"--webhook-host={host}" for host in SHARDS] if self._has_shard else []
            sandbox = [
                "rides_demo.sandbox", "--port", str(port),
                "--seed", given.get("SANDBOX_SEED") or "1",
                "--webhook-url", f"{self.url}/webhooks/stripe", *hosts,
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
        """Run a management command; raise ProcessError with its last line if it fails."""
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
        # A proxy of the environment cannot reach the loopback port.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        headers = {"Host": next(iter(SHARDS))} if self._has_shard else {}
        request = urllib.request.Request(f"{self.url}/healthz", headers=headers)

        def healthy() -> bool:
            with suppress(OSError), opener.open(request, timeout=5) as answer:
                return int(answer.status) == 200
            return False

        self._await("web", healthy)

    def _await(self, name: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        process = self.processes[name]
        while not condition():
            if not process.running:
                raise ProcessError(
                    f"{name} ended with status {process.exit_status}; see its output above."
                )
            if time.monotonic() > deadline or self._stopping.wait(WATCH_SECONDS):
                raise ProcessError(
                    f"{name} accepted no requests within {READY_SECONDS} seconds; see its output"
                    " above."
                )
        self._write_pids()

    def pids(self) -> dict[str, int]:
        """Return the process ids by name; 0 is a process that is not running."""
        return {"supervisor": os.getpid()} | {
            name: process.pid for name, process in self.processes.items()
        }

    def _write_pids(self) -> None:
        new = self.folder / "pids.json.new"
        try:
            new.write_text(json.dumps(self.pids(), indent=1))
            new.replace(self.folder / "pids.json")
        except OSError as error:
            # A full disk must not stop the watching thread.
            self._say(f"supervisor | {new} cannot be written: {error.strerror}")

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_SECONDS):
            for name, process in list(self.processes.items()):
                if not process.running and not self._stopping.is_set():
                    self._restart(name, process)

    def _restart(self, name: str, process: Process) -> None:
        """Restart a dead process, at most once in ``RESTART_SECONDS``.

        The next check repeats a failed restart.
        """
        now = time.monotonic()
        if now < self._due.get(name, 0.0):
            return
        self._due[name] = now + RESTART_SECONDS
        self._say(f"{name:>9} | ended with status {process.exit_status}; restarting")
        try:
            if isinstance(process, Postgres | PostgresPair | Redis):
                process.start()
            else:
                process.launch()
            if name == "sandbox":
                # The sandbox has lost its customers.
                self._await(
                    name,
                    lambda: (
                        not port_is_free(
                            int(self.environment["STRIPE_API_BASE"].rpartition(":")[2])
                        )
                    ),
                )
                self._run("seed")
        except ProcessError as error:
            self._say(f"{name:>9} | {error}")
        self._write_pids()

    def stop(self) -> None:
        """Stop all processes: first the processes that use the servers, then the servers."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
        services = [
            self.processes.pop(name)
            for name in ("sandbox", "redis", "broker", "postgres")
            if name in self.processes
        ]
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(lambda process: process.stop(), self.processes.values()))
            list(pool.map(lambda process: process.stop(), services))
        self.processes.clear()
        pids = self.folder / "pids.json"
        with suppress(OSError, ValueError):
            # Keep the file of another supervisor that uses the folder.
            if json.loads(pids.read_text())["supervisor"] == os.getpid():
                pids.unlink()


def manage(*arguments: str) -> list[str]:
    """Return the command line of a management command of the demo."""
    return [sys.executable, str(BASE_FOLDER / "manage.py"), *arguments]
