"""``manage.py soak``: run the demo for some minutes under all faults, and check the result."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from django.core.management.base import CommandParser

from rides_demo.management.commands import demo
from rides_demo.management.commands.simulate import minutes
from rides_demo.processes.embedded import Postgres, postgres_url, socket_folder
from rides_demo.processes.ports import free_port
from rides_demo.processes.replicated import PostgresPair
from rides_demo.processes.supervisor import SHORT_LIMITS, Supervisor
from rides_demo.simulator.crashes import FAILOVER
from rides_demo.simulator.cutting_proxy import Proxies, Route
from rides_demo.simulator.limits import LIMITS, ROLE, create_role, set_limits
from rides_demo.simulator.plan import FAULTS, SOAK_FAULTS, WRONG_CLOCK

#: The probability of a cut for each chunk of a reply. A booking causes one or two replies of the
#: web server, about ten of PostgreSQL and dozens of Redis.
CUT_PROBABILITY = {"http": 0.01, "postgres": 0.0005, "redis": 0.001}

#: The time for the work that is left after the faults, in seconds.
DRAIN_SECONDS = "180"

#: The database of the second tenant.
SHARD_B = "rides_b"


class Command(demo.Command):
    name = "soak"
    help = (
        "Start all processes, book rides for some minutes under all faults, and check that the data"
        " is consistent."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--minutes",
            type=minutes,
            default=os.environ.get("MINUTES") or "10",
            help="length of the soak (default: MINUTES, or 10)",
        )
        parser.add_argument(
            "--concurrency", type=int, default=16, help="number of parallel clients (default: 16)"
        )
        parser.add_argument(
            "--faults", default="all", help="all, none, or a list of faults (default: all)"
        )
        parser.add_argument(
            "--seed",
            type=int,
            default=os.environ.get("SEED") or None,
            help="seed of the schedule (default: SEED, or random)",
        )
        parser.add_argument(
            "--json",
            type=Path,
            default=None,
            metavar="FILE",
            help="also write the report to this file",
        )

    def handle(self, *args: object, **options: object) -> None:
        if options["seed"] is None:
            options["seed"] = random.SystemRandom().randrange(10**6)
        self.stdout.write(
            f"to run this again: MINUTES={options['minutes']:g} SEED={options['seed']} make soak"
        )
        self.stdout.write(
            f"faults for {options['minutes']:g} minutes, then at most {DRAIN_SECONDS} s until no"
            " work is left, then the comparison"
        )
        super().handle(*args, **options)

    @contextmanager
    def service(
        self, folder: Path, say: Callable[[str], None], options: dict[str, object]
    ) -> Iterator[Supervisor]:
        """Run the processes behind proxies, with a wrong clock in one web worker, and with a
        standby for failovers.

        Unless the environment names a database, there are two tenants, each with a database, and
        the role of the processes has time limits.
        """
        chosen = {*str(options["faults"]).split(",")}
        environment = (
            SHORT_LIMITS | {"SANDBOX_SEED": str(options["seed"]), "WEB_WORKERS": "3"} | os.environ
        )
        if {"all", WRONG_CLOCK} & chosen:
            environment["GUNICORN_CMD_ARGS"] = "--config python:rides_demo.simulator.wrong_clock"
        postgres: type[Postgres | PostgresPair] = Postgres
        if {"all", FAILOVER} & chosen and not environment.get("DATABASE_URL"):
            postgres, environment["CONFIRM_REPLICATED"] = PostgresPair, "1"
        port, proxy_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{proxy_port}"
        near = socket_folder(folder / "proxies")
        near.mkdir(mode=0o700, exist_ok=True)
        self.urls = {
            "DATABASE_URL": postgres_url(folder / "proxies", role=ROLE),
            "REDIS_URL": f"unix://{quote(str(near))}/redis.sock",
        }
        if not environment.get("DATABASE_URL"):
            environment["SHARD_B_DATABASE_URL"] = postgres_url(folder / "proxies", SHARD_B, ROLE)
        far_postgres = socket_folder(folder / "postgres") / ".s.PGSQL.5432"
        far_redis = socket_folder(folder / "redis") / "redis.sock"
        routes = [
            Route("http", proxy_port, port, CUT_PROBABILITY["http"]),
            Route("postgres", near / far_postgres.name, far_postgres, CUT_PROBABILITY["postgres"]),
            Route("redis", near / far_redis.name, far_redis, CUT_PROBABILITY["redis"]),
        ]
        self._direct: dict[str, str] = {}

        def limit_role() -> None:
            if {"all", LIMITS} & chosen and "DATABASE_URL" in self._direct:
                set_limits(self._direct["DATABASE_URL"])

        supervisor = Supervisor(
            folder,
            port,
            say=say,
            environment=environment,
            through=self._through,
            prepared=limit_role,
            postgres=postgres,
        )
        with Proxies(folder, routes, int(str(options["seed"]))), supervisor:
            yield supervisor

    def _through(self, variable: str, url: str) -> str:
        self._direct[variable] = url
        if variable == "DATABASE_URL":
            self._direct["SHARD_B_DATABASE_URL"] = url.replace("/rides?", f"/{SHARD_B}?")
            create_role(url, "rides", SHARD_B)
        return self.urls[variable]

    def arguments(self, supervisor: Supervisor, options: dict[str, object]) -> list[str]:
        """Return the arguments of the simulator."""
        faults = str(options["faults"])
        if faults == "all":
            faults = demo.within_reach(supervisor.processes, (*FAULTS, *SOAK_FAULTS))
        log = supervisor.folder / "clients.jsonl"
        return [
            "--base-url", self.url, "--faults", faults, "--minutes", str(options["minutes"]),
            "--log", str(log), "--drain-seconds", DRAIN_SECONDS,
        ]  # fmt: skip

    def direct(self, supervisor: Supervisor) -> dict[str, str]:
        """Return the direct URLs: the simulator does not connect through the proxies."""
        return self._direct
