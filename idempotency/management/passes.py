"""What the commands share: one pass and exit, or pass after pass until SIGTERM."""

import argparse
import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, close_old_connections, connections

from idempotency.backends import BrokerUnavailable
from idempotency.heartbeats import Heartbeat

logger = logging.getLogger("idempotency")

#: What ends a single pass with exit status 1, and what a loop waits out without a traceback.
_UNREACHABLE = (OperationalError, InterfaceError, BrokerUnavailable)

#: While passes fail, the wait between them doubles up to this; a longer interval stays as it is.
MAX_PAUSE_SECONDS = 10.0
#: A loop that waits gives a sign of life this often.
BEAT_SECONDS = 5.0


class StopSignal:
    """SIGTERM and SIGINT, as something to ask and to wait for, in any thread.

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


class Loop:
    """Passes of one kind, one after the other, until a signal comes; each loop of a process has a thread of its own.

    A pass that fails ends neither the loop nor its process: the next one tries again, on a new connection. The log gets a line
    when that begins and when it is over. ``say`` is given the counts of each pass that did something. ``beat`` is called every
    few seconds and between the batches of a pass, but not while the last pass failed; at that pace, a heartbeat is kept in the
    database ``using`` as well, for the dashboard of the admin.
    """

    def __init__(
        self,
        name: str,
        run_pass: Callable[..., Any],
        *,
        interval: float,
        stop: StopSignal,
        say: Callable[[Any], None],
        beat: Callable[[], None] = lambda: None,
        using: str = DEFAULT_DB_ALIAS,
    ) -> None:
        self.name = name
        self._run_pass, self._interval, self._stop, self._say, self._beat = run_pass, interval, stop, say, beat
        self._heartbeat = Heartbeat(name, using=using)
        self._failure: object = None
        self._failures = 0

    def run(self) -> None:
        """Return when a signal asks to stop, with this thread's connections closed."""
        try:
            while not self._stop_requested():
                self._turn()
                due = time.monotonic() + self._pause_seconds()
                while (left := due - time.monotonic()) > 0 and not self._stop_requested(min(left, BEAT_SECONDS)):
                    pass
        finally:
            self._heartbeat.remove()
            connections.close_all()

    def _pause_seconds(self) -> float:
        doubled: float = self._interval * 2 ** min(self._failures, 20)
        return max(self._interval, min(doubled, MAX_PAUSE_SECONDS))

    def _stop_requested(self, wait_seconds: float = 0) -> bool:
        if self._failure is None:
            self._beat()
            self._heartbeat.beat()
        return self._stop.requested(wait_seconds)

    def _turn(self) -> None:
        try:
            close_old_connections()
            counts = self._run_pass(stop=self._stop_requested)
        except (Exception, SystemExit) as error:  # A view or a backend may call sys.exit().
            self._note_failure(error)
            connections.close_all()
            return
        if self._failure is not None:
            logger.warning("%s: goes on again", self.name)
        self._failure, self._failures = None, 0
        if any(asdict(counts).values()):
            self._say(counts)

    def _note_failure(self, error: BaseException) -> None:
        """Log the first of several failures of one kind; what cannot be reached needs no traceback."""
        unreachable = isinstance(error, _UNREACHABLE)
        failure = _UNREACHABLE if unreachable else type(error)
        if failure != self._failure:
            logger.log(
                logging.WARNING if unreachable else logging.ERROR,
                "%s: cannot go on, will try again and again, at least every %g s: %s",
                self.name,
                max(self._interval, MAX_PAUSE_SECONDS),
                _one_line(error),
                exc_info=not unreachable,
            )
        self._failure = failure
        self._failures += 1


class PassCommand(BaseCommand):
    """A command whose work is a ``*_once()`` function: it parses, loops, prints counts, and decides on the exit status.

    Exit status: 0 the pass is done, or a signal asked to stop; 1 the database or the broker cannot be reached; 2 usage.
    """

    #: Seconds between two passes of a loop.
    default_interval: ClassVar[float]
    default_batch_size: ClassVar[int] = 1000

    #: The work: a function that does one pass, asks ``stop`` between batches, and returns its counts, a dataclass.
    run_pass: Callable[..., Any]
    #: Names of the options of this command alone, which its pass is given too.
    own_options: ClassVar[tuple[str, ...]] = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--loop", action="store_true", help="Stay, and do a pass every --interval seconds until SIGTERM.")
        parser.add_argument(
            "--interval",
            type=seconds,
            default=self.default_interval,
            metavar="SECONDS",
            help="With --loop: how long to wait between two passes (default: %(default)s).",
        )
        parser.add_argument(
            "--batch-size",
            type=count,
            default=self.default_batch_size,
            metavar="N",
            help="How many rows one transaction takes at most (default: %(default)s).",
        )
        parser.add_argument("--dry-run", action="store_true", help="Say what would be done, and change nothing.")
        add_database_argument(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        name = type(self).__module__.rpartition(".")[2]
        given = {option: options[option] for option in ("batch_size", "dry_run", *self.own_options)}
        run_pass = partial(self.run_pass, using=options["database"], **given)

        def say(counts: Any) -> None:
            if options["verbosity"]:
                self.stdout.write(in_words(name, counts, dry_run=options["dry_run"]))
                self.stdout.flush()

        stop = StopSignal()
        with stop.installed():
            if options["loop"]:
                Loop(name, run_pass, interval=options["interval"], stop=stop, say=say, using=options["database"]).run()
                return
            try:
                say(run_pass(stop=stop.requested))
            except _UNREACHABLE as error:
                raise CommandError(f"{name}: {_one_line(error)}", returncode=1) from error


def in_words(name: str, counts: Any, *, dry_run: bool = False) -> str:
    """Return the line that says what a pass did."""
    parts = (f"{number} {what.replace('_', ' ')}" for what, number in asdict(counts).items())
    return f"{name}: {'would be: ' if dry_run else ''}{', '.join(parts)}"


def add_database_argument(parser: CommandParser) -> None:
    """Let the user choose among the configured databases."""
    parser.add_argument(
        "--database",
        default=DEFAULT_DB_ALIAS,
        choices=tuple(connections),
        help="The database whose rows to work on (default: %(default)s).",
    )


def add_concurrency_argument(parser: CommandParser) -> None:
    """Let the user choose how many keys the completer runs at once."""
    parser.add_argument(
        "--concurrency",
        type=count,
        default=1,
        metavar="N",
        help="How many keys are run at once, each in a thread with connections of its own (default: %(default)s).",
    )


def seconds(text: str) -> float:
    """Parse a duration in seconds, up to a day."""
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400 seconds")
    return value


def count(text: str) -> int:
    """Parse a number of rows."""
    value = int(text)
    if not 0 < value <= 100_000:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 100000")
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
