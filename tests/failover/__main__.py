"""``make failover``: run some rounds of each event in each kind of replication; print a table, and
the result in one line."""

# ruff: noqa: T201 - it prints its progress

import argparse
import logging
import os
import random
import re
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rides_demo.processes.embedded import postgres_url
from rides_demo.processes.process import ProcessError
from tests.failover import results
from tests.failover.configurations import CONFIGURATIONS, Configuration
from tests.failover.events import EVENTS, Event
from tests.failover.lab import SETTINGS, Lab
from tests.failover.results import Cell

#: No round begins after this time; the run then fails.
LIMIT_SECONDS = 15 * 60


class Run:
    """The rounds of the chosen events in the chosen configurations."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._ends = time.monotonic() + LIMIT_SECONDS
        self.cells: list[Cell] = []

    def play(self, configuration: Configuration) -> None:
        """Run the chosen events in a configuration, on new nodes."""
        chosen = re.compile(self._options.events).search
        events = [
            event for event in EVENTS if configuration in event.played_in and chosen(event.name)
        ]
        folder = self._options.folder / configuration.folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with Lab(folder, configuration) as lab:
            for event in events:
                lab.serve(both_hosts=event.both_hosts)
                cell = Cell(event.name, configuration.name, configuration in event.kept_in, [])
                self.cells.append(cell)
                for number in range(self._options.rounds):
                    self._play_round(lab, event, cell, number)

    def _play_round(self, lab: Lab, event: Event, cell: Cell, number: int) -> None:
        from tests.failover.rounds import play

        if time.monotonic() > self._ends:
            raise TimeoutError(
                f"no time was left for {cell.event}, {cell.configuration}, round {number + 1}"
            )
        drawn = random.Random(f"{self._options.seed} {cell.event} {cell.configuration} {number}")
        began = time.monotonic()
        done = play(lab, event, drawn)
        cell.rounds.append(asdict(done))
        seconds = time.monotonic() - began
        print(
            f"{cell.configuration}: {cell.event}, round {number + 1} ({seconds:.0f} s): {done}",
            flush=True,
        )


def main() -> int:
    """Run all rounds; return the number of failures."""
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    _set_up_django(options.folder)
    print(
        f"to run this again: SEED={options.seed} ROUNDS={options.rounds} make failover", flush=True
    )
    run, failures = Run(options), []
    try:
        for configuration in CONFIGURATIONS:
            if re.search(options.configurations, configuration.name):
                run.play(configuration)
    except (AssertionError, ProcessError, TimeoutError) as error:
        failures.append(f"The run ended early: {error}")
    cells = [cell for cell in run.cells if cell.rounds]
    print(f"\n{results.table(cells)}\n")
    results.write(cells, options.folder)
    failures += [line for cell in cells for line in cell.failures()]
    print("".join(f"{line}\n" for line in failures), end="")
    print(f"failover: FAILED {len(failures)}" if failures else "failover: ok", flush=True)
    return len(failures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.failover", description=__doc__)
    seed = str(random.SystemRandom().randrange(10**6))
    parser.add_argument(
        "--rounds",
        type=int,
        default=os.environ.get("ROUNDS") or "3",
        help="rounds of each event (ROUNDS, or 3)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=os.environ.get("SEED") or seed,
        help="seed of the pauses (SEED, or random)",
    )
    parser.add_argument(
        "--events", default="", help="a regular expression; the events with such a name"
    )
    parser.add_argument(
        "--configurations",
        default="",
        help="a regular expression; the configurations with such a name",
    )
    parser.add_argument(
        "--folder",
        type=lambda text: Path(text).resolve(),
        default=results.FOLDER,
        help="data, logs and results",
    )
    return parser.parse_args()


def _set_up_django(folder: Path) -> None:
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": SETTINGS,
        "DATABASE_URL": postgres_url(folder / "nowhere"),  # The lab replaces the host.
        "RIDES_RUN_FOLDER": str(folder),
    }
    import django

    django.setup()
    logging.disable(logging.CRITICAL)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
