"""``manage.py simulate``: book rides under faults at a running service, and check the result."""

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

from rides_demo.simulator import hangs, limits
from rides_demo.simulator.booking_clients import CannotSimulate
from rides_demo.simulator.crashes import RESTART_BROKER
from rides_demo.simulator.simulation import FAULTS, SOAK_FAULTS, Plan, Simulation
from rides_demo.simulator.summary import print_report, report, unobserved_faults
from rides_demo.simulator.tenants import Tenants
from rides_demo.tenants import shards

LONGEST_MINUTES = 24 * 60
TOKENS = ("demo-jane", "demo-joe", "demo-max", hangs.TOKEN)


def _faults(text: str) -> tuple[str, ...]:
    chosen = (
        FAULTS
        if text == "all"
        else tuple(name for name in text.split(",") if name and name != "none")
    )
    known = (*FAULTS, RESTART_BROKER, *SOAK_FAULTS)
    if unknown := sorted(set(chosen) - set(known)):
        raise ArgumentTypeError(
            f"no fault is named {', '.join(unknown)}; there are all, none, {', '.join(known)}"
        )
    return chosen


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def minutes(text: str) -> float:
    """Return ``text`` as a number of minutes; raise ArgumentTypeError if it is invalid."""
    with suppress(ValueError):
        if 0 < (value := float(text)) <= LONGEST_MINUTES:
            return value
    raise ArgumentTypeError(f"{text!r} is not a number of minutes above 0, up to {LONGEST_MINUTES}")


class Command(BaseCommand):
    help = (
        "Book rides under faults, then check that the data is consistent. The exit status is 1 if"
        " it is not."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--base-url", default=f"http://127.0.0.1:{settings.PORT}", help="URL of the service"
        )
        parser.add_argument("--requests", type=_positive, default=400, help="number of bookings")
        parser.add_argument(
            "--minutes", type=minutes, help="run a soak of this many minutes instead"
        )
        parser.add_argument(
            "--log",
            type=Path,
            metavar="FILE",
            help="write the bookings and responses of the clients to this file, as JSON lines",
        )
        parser.add_argument(
            "--concurrency", type=_positive, default=12, help="number of parallel clients"
        )
        parser.add_argument(
            "--faults",
            type=_faults,
            default=FAULTS,
            help=f"all, none, or a list of {', '.join(FAULTS)}",
        )
        parser.add_argument("--seed", type=int, help="seed of the schedule, to repeat a run")
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="also write the report to this file"
        )
        parser.add_argument(
            "--run-dir",
            type=Path,
            default=settings.RUN_FOLDER,
            help="run folder of the service, which contains pids.json",
        )
        parser.add_argument(
            "--drain-seconds",
            type=_positive,
            default=60,
            help="stop waiting for the remaining work after this time without progress",
        )

    def handle(self, *args: object, **options: Any) -> None:
        for name in ("httpx", "stripe"):
            logging.getLogger(name).setLevel(logging.WARNING)  # they log a line per request
        console = Console(file=self.stdout._out, width=None if self.stdout.isatty() else 100)
        seed = (
            random.SystemRandom().randrange(10**6) if options["seed"] is None else options["seed"]
        )
        plan = _plan(options, seed)
        stripe_url = settings.STRIPE_API_BASE
        if plan.needs_sandbox and not stripe_url:
            raise CommandError(
                "Stripe faults need the sandbox: set STRIPE_API_BASE to its URL, or leave out these"
                " faults."
            )
        run_dir = options["run_dir"]
        simulation = Simulation(
            plan,
            options["base_url"],
            stripe_url=stripe_url,
            run_dir=run_dir,
            seed=seed,
            hosts=list(shards()),
        )
        size = (
            f"{options['minutes']:g} minutes" if plan.seconds else f"{options['requests']} bookings"
        )
        console.print(f"simulate: {size}, {options['concurrency']} parallel clients, seed {seed}")
        started = time.monotonic()
        try:
            webhooks_before = Counter(simulation.webhooks())
            if hangs.HANG in plan.required:
                for shard in shards().values():
                    hangs.create_rider(shard)
            pays = simulation.has_transfers()
            checker = Tenants(plan.prefix, TOKENS, webhooks=bool(webhooks_before), payouts=pays)
            with _progress(console) as progress:
                bar = progress.add_task(
                    "booking", total=None if plan.seconds else options["requests"]
                )
                done = partial(progress.update, bar)
                simulation.run(options["concurrency"], lambda n: done(completed=n), checker.backlog)
            booked_seconds = time.monotonic() - started
            connections.close_all()  # the database may have been restarted
            if not checker.wait_until_idle(options["drain_seconds"]):
                console.print(
                    "Work remains after the last booking: no progress for"
                    f" {options['drain_seconds']} seconds."
                )
            if pays:
                simulation.paydays.finish()
            simulation.replay(options["concurrency"])
            result = checker.check(simulation)
            _count_observed(simulation, checker)
            webhooks = Counter(simulation.webhooks()) - webhooks_before
            simulation.tally.counts.update(
                {f"fault webhook {name}": webhooks[name] for name in ("sent_twice", "refused")}
            )
        except CannotSimulate as error:
            raise CommandError(str(error)) from None
        finally:
            simulation.close()
            if options["log"]:
                options["log"].write_text(
                    "".join(f"{outcome.log_line()}\n" for outcome in simulation.outcomes)
                )
        seconds = {
            "booking": round(booked_seconds, 1),
            "all": round(time.monotonic() - started, 1),
            "slowest restart": round(simulation.crashes.slowest_restart_seconds, 1),
        }
        print_report(console, simulation, result, seconds)
        if options["json"]:
            options["json"].write_text(
                json.dumps(report(simulation, result, seconds, seed), indent=2) + os.linesep
            )
        if not result.consistent:
            raise CommandError("The data is inconsistent: see above.")
        if missed := unobserved_faults(simulation):
            raise CommandError(
                f"The data is consistent, but these faults were not observed: {', '.join(missed)}."
                " Run a longer soak."
            )


def _count_observed(simulation: Simulation, tenants: Tenants) -> None:
    """Count the faults that left their traces in the databases and in the logs of the run
    folder."""
    counts = simulation.tally.counts
    if hangs.HANG in simulation.plan.required:
        counts[f"fault {hangs.MARKED}"] += tenants.hangs()
        counts[f"fault {hangs.EXITS}"] += hangs.count_exits(simulation.run_dir)
    if limits.LIMITS in simulation.plan.required:
        counts.update(
            {f"fault {name}": count for name, count in limits.strikes(simulation.run_dir).items()}
        )


def _plan(options: dict[str, Any], seed: int) -> Plan:
    if options["minutes"] is not None:
        return Plan.draw_soak(options["minutes"], options["faults"], seed, list(shards()))
    if of_soak := [fault for fault in SOAK_FAULTS if fault in options["faults"]]:
        raise CommandError(
            f"{', '.join(of_soak)} need --minutes and the proxies of `manage.py soak`."
        )
    return Plan.draw(options["requests"], options["faults"], seed)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)
