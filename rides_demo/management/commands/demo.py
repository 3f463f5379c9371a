"""``manage.py demo``: every process, driven through faults by the simulator, and the books checked."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from django.core.management.base import BaseCommand, CommandParser

from rides_demo.management.commands.serve import stop_on_signals
from rides_demo.processes import ProcessError
from rides_demo.services import free_port
from rides_demo.simulated_crashes import VICTIMS
from rides_demo.simulator import FAULTS, STRIPE_DOWN, STRIPE_FAULTS
from rides_demo.supervisor import BASE_FOLDER, Supervisor, manage

#: The article's 90, 300 and 60 seconds, in proportion: so that what a crash leaves is seen to be finished within the demo.
SHORT = {
    "LOCK_TIMEOUT_SECONDS": "10",
    "COMPLETER_MIN_AGE_SECONDS": "15",
    "COMPLETER_IDLE_SECONDS": "5",
    "COMPLETER_INTERVAL_SECONDS": "1",
}


class Command(BaseCommand):
    help = "Start every process on free ports in a folder of its own, book rides through faults, check the books, stop all."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--requests", type=int, default=400)
        parser.add_argument("--concurrency", type=int, default=8)
        parser.add_argument("--faults", default="all")
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the report there too")

    def handle(self, *args: object, json: Path | None, **options: object) -> None:
        stop_on_signals()
        began = time.monotonic()
        log = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="rides-demo-"))
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
            self.stdout.write(f"what the processes wrote: {log}")
            self.stdout.write(f"demo: FAILED {status}")
            sys.exit(status)
        shutil.rmtree(folder, ignore_errors=True)
        self.stdout.write("demo: ok")

    def _simulate(self, folder: Path, log_file: Path, report: Path | None, options: dict[str, object]) -> int:
        with log_file.open("w", buffering=1) as log:

            def say(line: str) -> None:
                # A full disk, or last words that come after the end.
                with suppress(OSError, ValueError):
                    log.write(line + "\n")

            environment = SHORT | {"SANDBOX_SEED": str(options["seed"])} | os.environ
            supervisor = Supervisor(folder, free_port(), say=say, environment=environment)
            self.stdout.write("starting PostgreSQL, Redis, the Stripe sandbox, web, enqueuer, worker, completer, reaper")
            with supervisor:
                self.stdout.write(f"ready: {supervisor.url}/")
                self.stdout.flush()
                faults = within_reach(supervisor.processes) if options["faults"] == "all" else str(options["faults"])
                command = manage(
                    "simulate", "--base-url", supervisor.url, "--run-dir", str(folder), "--faults", faults,
                    "--requests", str(options["requests"]), "--concurrency", str(options["concurrency"]),
                    "--seed", str(options["seed"]), *(["--json", str(report.resolve())] if report else []),
                )  # fmt: skip
                return subprocess.run(command, env=supervisor.environment, cwd=BASE_FOLDER, check=False).returncode


def within_reach(processes: Collection[str]) -> str:
    """Return the faults that can be made with these processes: a service that the environment names is not ours to crash."""
    victims = VICTIMS | dict.fromkeys((STRIPE_FAULTS, STRIPE_DOWN), "sandbox")
    return ",".join(fault for fault in FAULTS if victims.get(fault, "web") in processes)
