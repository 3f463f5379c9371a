"""Rocket Rides with processes, database, Redis and Stripe of its own; what dies stays dead until
the test starts it again."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import psycopg
from psycopg.rows import dict_row

from rides_demo.processes.ports import free_port
from rides_demo.processes.process import Process
from rides_demo.processes.supervisor import BASE_FOLDER, Supervisor
from tests.kit.waiting import eventually

logger = logging.getLogger("tests.murphy")
logger.setLevel(logging.INFO)

#: A stall of some seconds is no silence; no test waits for its end, see ``let_locks_expire``.
LOCK_TIMEOUT_SECONDS = 30
#: Long enough to strike while Stripe works, short of the timeout of the Stripe client.
SLOW_SECONDS = LOCK_TIMEOUT_SECONDS / 10
ENVIRONMENT = {
    "LOCK_TIMEOUT_SECONDS": str(LOCK_TIMEOUT_SECONDS),
    "COMPLETER_MIN_AGE_SECONDS": "1",
    "COMPLETER_IDLE_SECONDS": "1",
    "COMPLETER_INTERVAL_SECONDS": "0.5",
    "WEB_WORKERS": "1",
    # Nothing that the environment of the tests names: these services are to be killed.
    **dict.fromkeys(("DATABASE_URL", "REDIS_URL", "STRIPE_API_BASE", "STRIPE_API_KEY"), ""),
}
#: Those that a test finds running; the completer would be faster than the client at some of what is
#: tested.
RUNNING = ("postgres", "redis", "sandbox", "web", "web 2", "enqueuer", "worker")

_BOOKS = """
    SELECT k.idempotency_key AS key, k.recovery_point, k.attempts, k.completer_attempts,
        k.response_code, k.response_body, r.id AS ride, r.stripe_charge_id AS charge,
        (SELECT count(*) FROM audit_records WHERE action = 'ride.created' AND resource_id = r.id)
            AS audit_records,
        (SELECT count(*) FROM receipts WHERE ride_id = r.id) AS receipts
    FROM idempotency_idempotencykey AS k FULL JOIN rides AS r ON r.idempotency_key_id = k.id
    WHERE k.id > %(key)s OR r.id > %(ride)s
    ORDER BY r.id
"""
_LAST = (
    "SELECT (SELECT coalesce(max(id), 0) FROM idempotency_idempotencykey) AS key, coalesce(max(id),"
    " 0) AS ride FROM rides"
)


class Service:
    """Every process of the demo, with a second web server on the same database; a context manager.

    What is asked of it is about the present test: the rows, charges and keys that came after
    ``begin``.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        environment = {**ENVIRONMENT, **(environment or {})}
        self._supervisor = Supervisor(folder, free_port(), say=logger.info, environment=environment)
        self.processes = self._supervisor.processes
        self.url, self.second_url = self._supervisor.url, f"http://127.0.0.1:{free_port()}"
        # No proxy of the environment: everything is on this machine.
        self._http = httpx.Client(timeout=60, trust_env=False)
        self._last: dict[str, int] = {}
        self._known: set[str] = set()

    def __enter__(self) -> Self:
        try:
            self._supervisor.start()
            self.environment = self._supervisor.environment
            web = self.processes["web"]
            command = list(web.command)
            command[command.index("--bind") + 1] = self.second_url.removeprefix("http://")
            self.processes["web 2"] = Process(
                "web 2",
                command,
                environment=web.environment,
                folder=BASE_FOLDER,
                output=logger.info,
            )
            self.processes["reaper"].stop()
        except BaseException:
            self._supervisor.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()
        self._supervisor.stop()

    def begin(self) -> None:
        """Put all in order, whatever the test before has left, and take note of what is there."""
        self.processes["completer"].kill()
        for name in RUNNING:
            self.processes[name].start()
        self.strike_stripe()
        for url in (self.url, self.second_url):
            self.wait_until_healthy(url)
        self._last = self.rows(_LAST)[0]
        self._known = {key["key"] for key in self._stripe()["keys"]}

    def wait_until_healthy(self, url: str) -> None:
        """Wait until the web server at ``url`` answers."""

        def healthy() -> bool:
            try:
                return self._http.get(f"{url}/healthz").status_code == 200
            except httpx.TransportError:
                return False

        eventually(healthy)

    def serve(self, application: str) -> None:
        """Deploy other code to the first web server."""
        web = self.processes["web"]
        web.stop()
        web.command[web.command.index("gunicorn") + 1] = application
        web.launch()
        self.wait_until_healthy(self.url)

    @contextmanager
    def frozen_web(self) -> Iterator[None]:
        """Let the first web server stand still inside the block, as under a long pause of its
        machine."""
        workers = psutil.Process(self.processes["web"].pid).children()
        for worker in workers:
            worker.suspend()
        try:
            yield
        finally:
            for worker in workers:
                worker.resume()

    def rows(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        """Return what the database answers."""
        with psycopg.connect(
            self.environment["DATABASE_URL"], autocommit=True, row_factory=dict_row
        ) as connection:
            return connection.execute(query, *parameters).fetchall()

    def books(self) -> list[dict[str, Any]]:
        """Return the keys of this test and their rides; a ride without a key would be among
        them."""
        return self.rows(_BOOKS, self._last)

    def staged_jobs(self) -> list[str]:
        """Return the ids of the jobs that wait for the enqueuer."""
        return [str(row["id"]) for row in self.rows("SELECT id FROM idempotency_stagedjob")]

    def let_locks_expire(self) -> None:
        """Let so much time have passed for each lock that a retry takes over."""
        older = (
            "UPDATE idempotency_idempotencykey SET locked_until = locked_until - %s * interval '1"
            " second' RETURNING id"
        )
        self.rows(older, [LOCK_TIMEOUT_SECONDS + 1])

    def mails(self, ride: int) -> int:
        """Return how many receipts for ``ride`` were sent."""
        text = f"Subject: Receipt for your ride {ride}\n"
        return sum(mail.read_text().count(text) for mail in self.folder.glob("mail/*"))

    def strike_stripe(self, *faults: dict[str, Any]) -> None:
        """Put ``faults`` in force at Stripe, none for good weather."""
        self._stripe("_faults", faults)

    def charges(self) -> dict[str, int]:
        """Return the rides that were charged, by the id of the charge."""
        # The completer may charge a ride that an earlier test has left.
        charges = {
            charge["id"]: int(charge["metadata"]["ride_id"]) for charge in self._stripe()["charges"]
        }
        return {charge: ride for charge, ride in charges.items() if ride > self._last["ride"]}

    def stripe_keys(self) -> list[dict[str, Any]]:
        """Return the idempotency keys that Stripe was sent with charges; status 0 is a call in
        flight."""
        return [
            key
            for key in self._stripe()["keys"]
            if key["path"] == "/v1/charges" and key["key"] not in self._known
        ]

    def wait_until_stripe_works(self) -> None:
        """Wait for a charge in flight: the ride is committed, and a web server waits for Stripe."""
        eventually(lambda: [key for key in self.stripe_keys() if not key["status"]])

    def wait_until_stripe_is_done(self) -> None:
        """Wait until no charge is in flight: Stripe would refuse its key."""
        eventually(lambda: all(key["status"] for key in self.stripe_keys()))

    def _stripe(self, path: str = "_state", post: Any = None) -> Any:
        method = "GET" if post is None else "POST"
        url = f"{self.environment['STRIPE_API_BASE']}/{path}"
        return self._http.request(method, url, json=post).raise_for_status().json()
