"""The lab: a pair of nodes, the service with its loops, and the provider that the service calls."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlencode

from rides_demo.processes.embedded import socket_folder
from rides_demo.processes.ports import free_port
from rides_demo.processes.process import Process, ProcessError
from tests.failover.clients import post
from tests.failover.configurations import Configuration
from tests.failover.pair import Pair
from tests.failover.relay import Relay
from tests.kit.faulty_service import FaultyService, serving

ROOT = Path(__file__).parents[2]
SETTINGS = "tests.failover.settings"
#: More threads than clients, because a request may still wait for its COMMIT after its client gave
#: up.
WEB_THREADS = 32
LOOP_OPTIONS = ["--enqueue-interval", "0.5", "--complete-interval", "0.5", "--reap-interval", "0.5"]


class Provider(FaultyService):
    """A provider that does its work once for each downstream key, and records it in ``done``."""

    request_queue_size = 128

    def effects(self, kind: str) -> Counter[str]:
        """Return the number of effects for each client key; ``kind`` is "charge" or "receipt"."""
        texts = (done.decode().partition(": ")[2].split() for done in list(self.done.values()))
        return Counter(client_key for of, client_key in texts if of == kind)


class Web(Process):
    """gunicorn with the views of ``service.py``."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.port = free_port()
        command = [
            sys.executable, "-m", "gunicorn", "django.core.wsgi:get_wsgi_application()",
            "--bind", f"127.0.0.1:{self.port}", "--worker-class", "gthread", "--workers", "1",
            "--threads", str(WEB_THREADS), "--log-level", "warning", "--no-control-socket",
        ]  # fmt: skip
        super().__init__("gunicorn", command, environment=environment, folder=ROOT, output=log)

    def is_ready(self) -> bool:
        """Return whether the service answers a request without a key with 400."""
        return post(self.port, "/plain/", "").status == 400


class Lab:
    """The lab in one configuration; a context manager. The nodes and the records of the provider
    are kept between rounds."""

    def __init__(self, folder: Path, configuration: Configuration) -> None:
        self._folder, self.configuration = folder, configuration
        self._stack = ExitStack()
        self._processes: list[Process] = []
        self._host = ""
        self.pair = Pair(
            folder, synchronous=configuration.synchronous, lag_seconds=configuration.lag_seconds
        )

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.pair)
            self.address = stack.enter_context(
                Relay(self._folder / "address", self.pair.primary.sockets)
            )
            self.provider = stack.enter_context(serving(Provider()))
            stack.callback(self._stop)
            with self.database():
                from django.core.management import call_command

                call_command("migrate", verbosity=0)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def serve(self, *, both_hosts: bool) -> None:
        """Run the service and the loops with the address that moves, or with the addresses of both
        nodes."""
        nodes = ",".join(str(socket_folder(folder)) for folder in self.pair.folders)
        host = nodes if both_hosts else str(self.address.folder)
        if host == self._host:
            return
        self._stop()
        self._host = host
        options = {"host": host} | ({"target_session_attrs": "read-write"} if both_hosts else {})
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": SETTINGS,
            "DATABASE_URL": f"postgresql://postgres@/rides?{urlencode(options, quote_via=quote)}",
            "FAILOVER_PROVIDER": self.provider.url,
            "FAILOVER_CONFIRM_REPLICATED": "1" if self.configuration.confirmed else "0",
        }
        self.web = Web(environment, self._folder / "web.log")
        worker = [sys.executable, "-m", "django", "idempotency_worker", *LOOP_OPTIONS]
        self._processes = [
            self.web,
            Process(
                "idempotency_worker",
                worker,
                environment=environment,
                folder=ROOT,
                output=self._folder / "worker.log",
            ),
        ]
        for process in self._processes:
            process.start()

    def _stop(self) -> None:
        while self._processes:
            self._processes.pop().kill()

    def require_running(self) -> None:
        """Raise ProcessError if the service or its loops have ended; no event may end them."""
        for process in self._processes:
            if not process.running:
                raise ProcessError(process.why_not_started())

    def move_address(self) -> None:
        """Point the address to the primary, and close all connections through it."""
        self.address.target = self.pair.primary.sockets
        self.address.cut()

    @contextmanager
    def database(self) -> Iterator[None]:
        """Connect Django in this process to the primary."""
        from django.db import connection

        connection.close()
        connection.settings_dict["OPTIONS"]["host"] = str(self.pair.primary.sockets)
        try:
            yield
        finally:
            connection.close()
