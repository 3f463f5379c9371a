"""Drive rides through faults against a running service, and check the books."""

import json
import logging
import os
import random
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import connections
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rides_demo.books import Books, Ledger
from rides_demo.simulated_clients import CannotSimulate
from rides_demo.simulator import FAULTS, KINDS, Plan, Simulation

TOKENS = ("demo-jane", "demo-joe", "demo-max")


def _faults(text: str) -> tuple[str, ...]:
    chosen = FAULTS if text == "all" else tuple(name for name in text.split(",") if name and name != "none")
    if unknown := sorted(set(chosen) - set(FAULTS)):
        raise ArgumentTypeError(f"no fault is named {', '.join(unknown)}; there are all, none, {', '.join(FAULTS)}")
    return chosen


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


class Command(BaseCommand):
    help = "Book rides as phones would, through faults; then check that the books are right. Exits 1 if they are not."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--base-url", default=f"http://127.0.0.1:{settings.PORT}", help="the service")
        parser.add_argument("--requests", type=_positive, default=400, help="bookings to make")
        parser.add_argument("--concurrency", type=_positive, default=12, help="clients at once")
        parser.add_argument("--faults", type=_faults, default=FAULTS, help=f"all, none, or a list of {', '.join(FAULTS)}")
        parser.add_argument("--seed", type=int, help="makes the schedule repeatable")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
        parser.add_argument("--run-dir", type=Path, default=settings.RUN_FOLDER, help="folder of the service, with its pids")
        parser.add_argument(
            "--drain-seconds", type=_positive, default=60, help="wait so long for completer, enqueuer and worker"
        )

    def handle(self, *args: object, **options: Any) -> None:
        for name in ("httpx", "stripe"):
            logging.getLogger(name).setLevel(logging.WARNING)  # a line per request would bury the report
        console = Console(file=self.stdout._out, width=None if self.stdout.isatty() else 100)
        seed = random.SystemRandom().randrange(10**6) if options["seed"] is None else options["seed"]
        plan = Plan.draw(options["requests"], options["faults"], seed)
        stripe_url = settings.STRIPE_API_BASE
        if plan.needs_sandbox and not stripe_url:
            raise CommandError("Faults of Stripe need the sandbox: set STRIPE_API_BASE to it, or leave them out.")
        simulation = Simulation(plan, options["base_url"], stripe_url=stripe_url, run_dir=options["run_dir"], seed=seed)
        console.print(f"simulate: {len(plan.bookings)} bookings, {options['concurrency']} clients at once, seed {seed}")
        started = time.monotonic()
        try:
            webhooks_before = Counter(simulation.webhooks())
            ledger = Ledger(plan.prefix, TOKENS, webhooks=bool(webhooks_before))
            with _progress(console) as progress:
                bar = progress.add_task("booking", total=len(plan.bookings))
                simulation.run(options["concurrency"], lambda done: progress.update(bar, completed=done))
            booked_seconds = time.monotonic() - started
            connections.close_all()  # the database may have been restarted
            if not ledger.wait_at_rest(options["drain_seconds"]):
                console.print(f"Not all was done within {options['drain_seconds']} seconds after the last booking.")
            simulation.replay(options["concurrency"])
            books = ledger.check(simulation.booked(), simulation.tally.wrong)
            webhooks = Counter(simulation.webhooks()) - webhooks_before
            simulation.tally.counts.update({f"fault webhook {name}": webhooks[name] for name in ("sent_twice", "refused")})
        except CannotSimulate as error:
            raise CommandError(str(error)) from None
        finally:
            simulation.close()
        seconds = {
            "booking": round(booked_seconds, 1),
            "all": round(time.monotonic() - started, 1),
            "slowest restart": round(simulation.crashes.slowest_restart_seconds, 1),
        }
        self._print(console, simulation, books, seconds)
        if options["json"]:
            options["json"].write_text(json.dumps(_report(simulation, books, seconds, seed), indent=2) + os.linesep)
        if not books.right:
            raise CommandError("The books are not right: see above.")

    def _print(self, console: Console, simulation: Simulation, books: Books, seconds: dict[str, float]) -> None:
        table, outcomes = Table(title="Outcomes"), simulation.table()
        labels = sorted({label for _, label in outcomes})
        table.add_column("booking")
        for label in labels:
            table.add_column(label, justify="right")
        for kind in KINDS:
            if any(outcomes[kind, label] for label in labels):
                table.add_row(kind, *(str(outcomes[kind, label] or "") for label in labels))
        console.print(table)
        faults = Table("fault", "struck", title="Faults that really struck")
        for name, count in _struck(simulation).items():
            faults.add_row(name, str(count))
        console.print(faults)
        for finding in books.findings[:20]:
            console.print(finding, markup=False, highlight=False)
        for line in (
            f"rides {books.rides}, charges {books.charges}, receipts {books.receipts}, keys {books.keys}, "
            f"kill -9 of web workers {_struck(simulation).get('kill-web', 0)}",
            f"resumed keys {books.resumed_keys}, by the completer {books.completer_keys}, stuck keys {books.stuck_keys}; "
            f"booking took {seconds['booking']} s, all {seconds['all']} s, the slowest restart {seconds['slowest restart']} s",
            f"unmatched charges {books.unmatched_charges}, surplus rides {books.surplus_rides}, staged jobs "
            f"{books.staged_jobs}, wrong answers {books.wrong_answers}, unpaid rides {books.unpaid_rides}",
            books.line(),
        ):
            console.print(line, highlight=False, soft_wrap=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _struck(simulation: Simulation) -> dict[str, int]:
    counts = sorted(simulation.tally.counts.items())
    declined = sum(count for (_, label), count in simulation.table().items() if label == "402")
    struck = {name.removeprefix("fault "): count for name, count in counts if name.startswith("fault ") and count}
    return struck | ({"declined": declined} if declined else {})


def _report(simulation: Simulation, books: Books, seconds: dict[str, float], seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "right": books.right,
        "books": asdict(books),
        "outcomes": [
            {"booking": kind, "outcome": label, "count": n} for (kind, label), n in sorted(simulation.table().items())
        ],
        "faults": _struck(simulation),
        "answers": {n: c for n, c in sorted(simulation.tally.counts.items()) if not n.startswith("fault ")},
        "seconds": seconds,
    }
