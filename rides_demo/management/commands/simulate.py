"""Drive rides through faults against a running service, and check the books."""

import json
import logging
import os
import random
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import connections
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rides_demo.books import Ledger
from rides_demo.simulated_clients import CannotSimulate
from rides_demo.simulated_report import never_struck, print_report, report
from rides_demo.simulator import FAULTS, SOAK_FAULTS, Plan, Simulation

LONGEST_MINUTES = 24 * 60
TOKENS = ("demo-jane", "demo-joe", "demo-max")


def _faults(text: str) -> tuple[str, ...]:
    chosen = FAULTS if text == "all" else tuple(name for name in text.split(",") if name and name != "none")
    known = (*FAULTS, *SOAK_FAULTS)
    if unknown := sorted(set(chosen) - set(known)):
        raise ArgumentTypeError(f"no fault is named {', '.join(unknown)}; there are all, none, {', '.join(known)}")
    return chosen


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def minutes(text: str) -> float:
    """Return a length in minutes; refuse what is none."""
    with suppress(ValueError):
        if 0 < (value := float(text)) <= LONGEST_MINUTES:
            return value
    raise ArgumentTypeError(f"{text!r} is not a number of minutes above 0, up to {LONGEST_MINUTES}")


class Command(BaseCommand):
    help = "Book rides as phones would, through faults; then check that the books are right. Exits 1 if they are not."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--base-url", default=f"http://127.0.0.1:{settings.PORT}", help="the service")
        parser.add_argument("--requests", type=_positive, default=400, help="bookings to make")
        parser.add_argument("--minutes", type=minutes, help="make bookings for so long instead, under the faults of a soak")
        parser.add_argument("--log", type=Path, metavar="FILE", help="write what each client saw there, a JSON object a line")
        parser.add_argument("--concurrency", type=_positive, default=12, help="clients at once")
        parser.add_argument("--faults", type=_faults, default=FAULTS, help=f"all, none, or a list of {', '.join(FAULTS)}")
        parser.add_argument("--seed", type=int, help="makes the schedule repeatable")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
        parser.add_argument("--run-dir", type=Path, default=settings.RUN_FOLDER, help="folder of the service, with its pids")
        parser.add_argument(
            "--drain-seconds",
            type=_positive,
            default=60,
            help="wait until nothing has moved for so long",
        )

    def handle(self, *args: object, **options: Any) -> None:
        for name in ("httpx", "stripe"):
            logging.getLogger(name).setLevel(logging.WARNING)  # a line per request would bury the report
        console = Console(file=self.stdout._out, width=None if self.stdout.isatty() else 100)
        seed = random.SystemRandom().randrange(10**6) if options["seed"] is None else options["seed"]
        plan = _plan(options, seed)
        stripe_url = settings.STRIPE_API_BASE
        if plan.needs_sandbox and not stripe_url:
            raise CommandError("Faults of Stripe need the sandbox: set STRIPE_API_BASE to it, or leave them out.")
        simulation = Simulation(plan, options["base_url"], stripe_url=stripe_url, run_dir=options["run_dir"], seed=seed)
        size = f"{options['minutes']:g} minutes" if plan.seconds else f"{options['requests']} bookings"
        console.print(f"simulate: {size}, {options['concurrency']} clients at once, seed {seed}")
        started = time.monotonic()
        try:
            webhooks_before = Counter(simulation.webhooks())
            ledger = Ledger(plan.prefix, TOKENS, webhooks=bool(webhooks_before))
            with _progress(console) as progress:
                bar = progress.add_task("booking", total=None if plan.seconds else options["requests"])
                done = partial(progress.update, bar)
                simulation.run(options["concurrency"], lambda n: done(completed=n), ledger.backlog)
            booked_seconds = time.monotonic() - started
            connections.close_all()  # the database may have been restarted
            if not ledger.wait_at_rest(options["drain_seconds"]):
                console.print(f"Not all was done after the last booking: nothing moved for {options['drain_seconds']} seconds.")
            simulation.replay(options["concurrency"])
            books = ledger.check(simulation.booked(), simulation.tally.wrong)
            ledger.check_log(books, simulation.outcomes, simulation.tally.counts["fault stripe 500_begun"])
            webhooks = Counter(simulation.webhooks()) - webhooks_before
            simulation.tally.counts.update({f"fault webhook {name}": webhooks[name] for name in ("sent_twice", "refused")})
        except CannotSimulate as error:
            raise CommandError(str(error)) from None
        finally:
            simulation.close()
            if options["log"]:
                options["log"].write_text("".join(f"{outcome.log_line()}\n" for outcome in simulation.outcomes))
        seconds = {
            "booking": round(booked_seconds, 1),
            "all": round(time.monotonic() - started, 1),
            "slowest restart": round(simulation.crashes.slowest_restart_seconds, 1),
        }
        print_report(console, simulation, books, seconds)
        if options["json"]:
            options["json"].write_text(json.dumps(report(simulation, books, seconds, seed), indent=2) + os.linesep)
        if not books.right:
            raise CommandError("The books are not right: see above.")
        if missed := never_struck(simulation):
            raise CommandError(f"The books are right, but these faults never struck: {', '.join(missed)}. Soak for longer.")


def _plan(options: dict[str, Any], seed: int) -> Plan:
    if options["minutes"] is not None:
        return Plan.draw_soak(options["minutes"], options["faults"], seed)
    if of_soak := [fault for fault in SOAK_FAULTS if fault in options["faults"]]:
        raise CommandError(f"{', '.join(of_soak)} need --minutes, and the proxies and clocks of `manage.py soak`.")
    return Plan.draw(options["requests"], options["faults"], seed)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
