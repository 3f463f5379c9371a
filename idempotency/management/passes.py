"""What the three commands share: one pass and exit, or pass after pass until SIGTERM."""

import argparse
import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, ClassVar

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, connections

from idempotency.enqueuer import BrokerUnavailable

logger = logging.getLogger("idempotency")

#: What ends a single pass with exit status 1, and what a loop waits out.
_UNREACHABLE = (OperationalError, InterfaceError, BrokerUnavailable)


class StopSignal:
    """SIGTERM and SIGINT, as something to ask and to wait for.

    A pipe, not a threading.Event: setting an Event in a signal handler can deadlock with the wait that it interrupts.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def requested(self, wait_seconds: float = 0) -> bool:
        """Return whether to stop, after waiting at most so long for it."""
        return bool(select.select([self._reader], [], [], wait_seconds)[0])

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Catch the signals in this block; none are caught outside the main thread, where Python cannot."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        caught = (signal.SIGTERM, signal.SIGINT) if in_main_thread else ()
        former = {number: signal.signal(number, self._handle) for number in caught}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            os.close(self._reader)
            os.close(self._writer)

    def _handle(self, number: int, frame: object) -> None:
        os.write(self._writer, b"x")


class PassCommand(BaseCommand):
    """A command whose work is a ``*_once()`` function: it parses, loops, prints counts, and decides on the exit status.

    Exit status: 0 the pass is done, or a signal asked to stop; 1 the database or the broker cannot be reached; 2 usage.
    """

    #: Seconds between two passes of a loop.
    default_interval: ClassVar[float]
    default_batch_size: ClassVar[int] = 1000

    #: The work: a function that does one pass, asks ``stop`` between batches, and returns its counts, a dataclass.
    run_pass: ClassVar[Callable[..., Any]]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--loop", action="store_true", help="Stay, and do a pass every --interval seconds until SIGTERM.")
        parser.add_argument(
            "--interval",
            type=_seconds,
            default=self.default_interval,
            metavar="SECONDS",
            help="With --loop: how long to wait between two passes (default: %(default)s).",
        )
        parser.add_argument(
            "--batch-size",
            type=_count,
            default=self.default_batch_size,
            metavar="N",
            help="How many rows one transaction takes at most (default: %(default)s).",
        )
        parser.add_argument("--dry-run", action="store_true", help="Say what would be done, and change nothing.")
        parser.add_argument(
            "--database",
            default=DEFAULT_DB_ALIAS,
            choices=tuple(connections),
            help="The database whose rows to work on (default: %(default)s).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self._options = {name: options[name] for name in ("batch_size", "dry_run")} | {"using": options["database"]}
        self._quiet = options["verbosity"] == 0
        stop = StopSignal()
        with stop.installed():
            if options["loop"]:
                self._loop(stop, options["interval"])
            else:
                try:
                    self._pass(stop)
                except _UNREACHABLE as error:
                    raise CommandError(f"{self._name}: {_one_line(error)}", returncode=1) from error

    @property
    def _name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def _loop(self, stop: StopSignal, interval: float) -> None:
        """Do passes until a signal comes. What cannot be reached is waited for; the log gets a line when that changes."""
        reachable = True
        while not stop.requested():
            try:
                connections[self._options["using"]].close_if_unusable_or_obsolete()
                self._pass(stop, quiet_when_idle=True)
            except _UNREACHABLE as error:
                if reachable:
                    logger.warning("%s: cannot go on, will try every %g s: %s", self._name, interval, _one_line(error))
                reachable = False
                connections[self._options["using"]].close()
            else:
                if not reachable:
                    logger.warning("%s: goes on again", self._name)
                reachable = True
            stop.requested(wait_seconds=interval)

    def _pass(self, stop: StopSignal, *, quiet_when_idle: bool = False) -> None:
        counts = asdict(self.run_pass(stop=stop.requested, **self._options))
        if self._quiet or (quiet_when_idle and not any(counts.values())):
            return
        prefix = "would be: " if self._options["dry_run"] else ""
        self.stdout.write(
            f"{self._name}: {prefix}" + ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
        )
        self.stdout.flush()


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400 seconds")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 0 < value <= 100_000:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 100000")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
