"""``manage.py demo``: start all processes, run the simulator and check the result."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from rides_demo.management.commands.serve import stop_on_signals
from rides_demo.processes.ports import free_port
from rides_demo.processes.process import ProcessError
from rides_demo.processes.supervisor import BASE_FOLDER, SHORT_LIMITS, Supervisor, manage
from rides_demo.simulator.crashes import RESTART_BROKER, VICTIMS
from rides_demo.simulator.hangs import HANG
from rides_demo.simulator.limits import LIMITS
from rides_demo.simulator.paydays import KILL_PAY_PILOTS
from rides_demo.simulator.simulation import FAULTS, STRIPE_DOWN, STRIPE_FAULTS


class Command(BaseCommand):
    name = "demo"
    help = (
        "Start all processes in a temporary folder, book rides under faults, and check that the"
        " data is consistent."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--requests", type=int, default=400, help="number of bookings (default: 400)"
        )
        parser.add_argument(
            "--concurrency", type=int, default=8, help="number of parallel clients (default: 8)"
        )
        parser.add_argument(
            "--faults", default="all", help="all, none, or a list of faults (default: all)"
        )
        parser.add_argument("--seed", type=int, default=1, help="seed of the schedule (default: 1)")
        parser.add_argument(
            "--json",
            type=Path,
            default=None,
            metavar="FILE",
            help="also write the report to this file",
        )

    def handle(self, *args: object, json: Path | None, **options: object) -> None:
        stop_on_signals()
        began = time.monotonic()
        log = None
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"rides-{self.name}-"))
            log = folder / "processes.log"
            status = self._simulate(folder, log, json, options)
        except (ProcessError, OSError) as error:
            self.stderr.write(str(error))
            status = 1
        except KeyboardInterrupt:
            self.stderr.write("interrupted")
            status = 130
        self.stdout.write(f"took {time.monotonic() - began:.0f} seconds")
        if status:
            self.stdout.write(f"output of the processes: {log}")
            self.stdout.write(f"{self.name}: FAILED {status}")
            sys.exit(status)
        shutil.rmtree(folder, ignore_errors=True)
        self.stdout.write(f"{self.name}: ok")

    def _simulate(
        self, folder: Path, log_file: Path, report: Path | None, options: dict[str, object]
    ) -> int:
        with log_file.open("w", buffering=1) as log:

            def say(line: str) -> None:
                # The disk may be full. At the end, the file may already be closed.
                with suppress(OSError, ValueError):
                    log.write(line + "\n")

            self.stdout.write(
                f"starting PostgreSQL, {settings.BROKER or 'Redis'}, the Stripe sandbox, web,"
                " enqueuer, worker, completer, reaper"
            )
            with self.service(folder, say, options) as supervisor:
                self.stdout.write(f"ready: {supervisor.url}/")
                self.stdout.flush()
                command = manage(
                    "simulate", "--run-dir", str(folder),
                    "--concurrency", str(options["concurrency"]), "--seed", str(options["seed"]),
                    *(["--json", str(report.resolve())] if report else []),
                    *self.arguments(supervisor, options),
                )  # fmt: skip
                environment = supervisor.environment | self.direct(supervisor)
                return subprocess.run(
                    command, env=environment, cwd=BASE_FOLDER, check=False
                ).returncode

    def service(
        self, folder: Path, say: Callable[[str], None], options: dict[str, object]
    ) -> AbstractContextManager[Supervisor]:
        """Return the context manager that runs the processes in ``folder``."""
        environment = SHORT_LIMITS | {"SANDBOX_SEED": str(options["seed"])} | os.environ
        return Supervisor(folder, free_port(), say=say, environment=environment)

    def arguments(self, supervisor: Supervisor, options: dict[str, object]) -> list[str]:
        """Return the arguments of the simulator."""
        faults = (
            within_reach(supervisor.processes, (*FAULTS, RESTART_BROKER))
            if options["faults"] == "all"
            else str(options["faults"])
        )
        return [
            "--base-url",
            supervisor.url,
            "--faults",
            faults,
            "--requests",
            str(options["requests"]),
        ]

    def direct(self, supervisor: Supervisor) -> dict[str, str]:
        """Return the environment variables of the simulator that differ from those of the
        processes."""
        return {}


def within_reach(processes: Collection[str], faults: Collection[str] = FAULTS) -> str:
    """Return the ``faults`` that are possible with these processes: the demo does not crash
    external services."""
    victims = (
        VICTIMS
        | dict.fromkeys((STRIPE_FAULTS, STRIPE_DOWN, HANG, KILL_PAY_PILOTS), "sandbox")
        | {LIMITS: "postgres"}
    )
    return ",".join(fault for fault in faults if victims.get(fault, "web") in processes)
