"""The base of the commands: run one pass and exit, or repeat passes until SIGTERM."""

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
from typing import Any, ClassVar, TypeVar

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, close_old_connections, connections

from idempotency._async import FAILURES
from idempotency._store import aliases
from idempotency._store.database_errors import drop_connection, is_read_only
from idempotency.backends import BrokerUnavailable
from idempotency.monitoring.heartbeats import WRITE_SECONDS, Heartbeat

logger = logging.getLogger("idempotency")

#: The errors of an unavailable database or broker, which a loop logs as warnings.
_UNREACHABLE = (OperationalError, InterfaceError, BrokerUnavailable)
#: The SQLSTATEs for a missing table and a missing column, and the messages of SQLite.
_NOT_MIGRATED, _NOT_MIGRATED_WORDS = ("42P01", "42703"), ("no such table", "no such column")

#: The maximum wait after failed passes. The wait doubles with each failure. An interval above this maximum is not changed.
MAX_PAUSE_SECONDS = 10.0

Number = TypeVar("Number", int, float)


class StopSignal:
    """SIGTERM and SIGINT as a flag that any thread can read and wait for.

    The flag is a pipe, because setting a threading.Event in a signal handler can deadlock with the interrupted wait.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def requested(self, wait_seconds: float = 0) -> bool:
        """Return whether a signal has arrived. Wait for a signal for at most ``wait_seconds``."""
        return bool(select.select([self._reader], [], [], wait_seconds)[0])

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Catch the signals in this block. Python can do so only in the main thread."""
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
    """Repeat the passes of one kind in one thread until a signal arrives.

    After a failed pass the loop retries on a new connection, and logs the first failure and the recovery. The loop calls
    ``say`` with the counts of each pass unless all counts are 0. It renews the heartbeat in the database ``using`` while it
    waits and between the batches of a pass, but not between a failed pass and the next successful one.
    """

    def __init__(
        self,
        name: str,
        run_pass: Callable[..., Any],
        *,
        interval: float,
        stop: StopSignal,
        say: Callable[[Any], None],
        using: str = DEFAULT_DB_ALIAS,
    ) -> None:
        self.name = name
        self._run_pass, self._interval, self._stop, self._say = run_pass, interval, stop, say
        self._heartbeat, self._using = Heartbeat(name, using=using), using
        self._failure: object = None
        self._failures = 0

    def run(self) -> None:
        """Run until a signal arrives. On return the heartbeat is deleted, and this thread's connections are closed."""
        try:
            while not self._stop_requested():
                self._turn()
                due = time.monotonic() + self._pause_seconds()
                while (left := due - time.monotonic()) > 0 and not self._stop_requested(min(left, WRITE_SECONDS)):
                    pass
        finally:
            self._heartbeat.remove()
            connections.close_all()

    def _pause_seconds(self) -> float:
        doubled: float = self._interval * 2 ** min(self._failures, 20)
        return max(self._interval, min(doubled, MAX_PAUSE_SECONDS))

    def _stop_requested(self, wait_seconds: float = 0) -> bool:
        if self._failure is None:
            self._heartbeat.beat()
        return self._stop.requested(wait_seconds)

    def _turn(self) -> None:
        try:
            close_old_connections()
            counts = self._run_pass(stop=self._stop_requested)
        except FAILURES as error:
            self._note_failure(error)
            drop_connection(connections[self._using])
            connections.close_all()
            return
        if self._failure is not None:
            logger.warning("%s: recovered", self.name)
        self._failure, self._failures = None, 0
        if any(asdict(counts).values()):
            with contextlib.suppress(OSError):  # The reader of the output may be gone, or its disk full.
                self._say(counts)

    def _note_failure(self, error: BaseException) -> None:
        """Log the first of consecutive failures of the same kind."""
        unreachable, line = _is_unreachable(error), one_line_of(error, self._using)
        failure = _UNREACHABLE if unreachable else type(error)
        if failure != self._failure:
            logger.log(
                logging.WARNING if unreachable else logging.ERROR,
                "%s: pass failed, retrying at least every %g s: %s",
                self.name,
                max(self._interval, MAX_PAUSE_SECONDS),
                line or _one_line(error),
                exc_info=line is None,
            )
        self._failure = failure
        self._failures += 1


class PassCommand(BaseCommand):
    """A command that calls a ``*_once()`` function, once or in a loop, and prints its counts.

    Exit status: 0 if the pass is done or a signal arrived; 1 if the database or broker is unavailable or a migration is
    missing; 2 for wrong usage.
    """

    default_interval: ClassVar[float]
    default_batch_size: ClassVar[int] = 1000
    batch_size_help: ClassVar[str] = "Maximum number of rows in one transaction"

    #: The function that does one pass. It calls ``stop`` between batches or keys, and returns a dataclass of counts.
    run_pass: Callable[..., Any]
    #: The options of this command only, which are passed to ``run_pass``.
    own_options: ClassVar[tuple[str, ...]] = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--loop", action="store_true", help="Repeat passes every --interval seconds until SIGTERM.")
        parser.add_argument(
            "--interval",
            type=seconds,
            default=self.default_interval,
            metavar="SECONDS",
            help="Time between two passes with --loop (default: %(default)s).",
        )
        parser.add_argument(
            "--batch-size",
            type=whole_number,
            default=self.default_batch_size,
            metavar="N",
            help=f"{self.batch_size_help} (default: %(default)s).",
        )
        parser.add_argument("--dry-run", action="store_true", help="Print the counts without changing anything.")
        add_database_argument(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        name = type(self).__module__.rpartition(".")[2]
        given = {option: options[option] for option in ("batch_size", "dry_run", *self.own_options)}
        run_pass = partial(self.run_pass, using=options["database"], **given)
        refuse_second_alias(name, options["database"])

        def say(counts: Any) -> None:
            if options["verbosity"]:
                self.stdout.write(f"{name}: {'would be: ' if options['dry_run'] else ''}{in_words(counts)}")
                self.stdout.flush()

        stop = StopSignal()
        with stop.installed():
            if options["loop"]:
                Loop(name, run_pass, interval=options["interval"], stop=stop, say=say, using=options["database"]).run()
                return
            with exit_1_explained(name, options["database"]):
                say(run_pass(stop=stop.requested))


def in_words(counts: Any) -> str:
    """Return the counts of a pass as text, as ``3 finished, 1 failed, 0 stuck``."""
    return ", ".join(f"{number} {what.replace('_', ' ')}" for what, number in asdict(counts).items())


@contextlib.contextmanager
def exit_1_explained(name: str, using: str) -> Iterator[None]:
    """Exit with status 1 and one line for errors that ``one_line_of`` describes."""
    try:
        yield
    except Exception as error:
        if (line := one_line_of(error, using)) is None:
            raise
        raise CommandError(f"{name}: {line}", returncode=1) from error


def one_line_of(error: BaseException, using: str) -> str | None:
    """Return one line about an unavailable database or broker, or a missing migration; None for any other error."""
    line = _one_line(error)
    if getattr(error.__cause__, "sqlstate", None) in _NOT_MIGRATED or line.startswith(_NOT_MIGRATED_WORDS):
        return f"{line.partition(' LINE ')[0]}: run manage.py migrate --database {using}"
    return line if _is_unreachable(error) else None


def _is_unreachable(error: BaseException) -> bool:
    """Return whether the database or the broker is unavailable; a read-only database counts as unavailable."""
    return isinstance(error, _UNREACHABLE) or is_read_only(error)


def refuse_second_alias(name: str, using: str) -> None:
    """Exit with status 2 if the router writes to this database under another alias. A database that cannot be reached does not
    stop the command, because the router may write to another database."""
    try:
        routed = aliases.routed_twin(using)
    except (OperationalError, InterfaceError) as error:
        logger.warning("%s: cannot tell whether %r is a second alias of a database: %s", name, using, _one_line(error))
        return
    if routed is not None:
        raise CommandError(
            f"{name}: the database {using!r} is also {routed!r}, to which the router writes. The work of this command and the "
            f"queries of the project would not be in one transaction. Use --database {routed}.",
            returncode=2,
        )


def add_database_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--database",
        default=DEFAULT_DB_ALIAS,
        choices=tuple(connections),
        help="The database with the rows (default: %(default)s).",
    )


def add_concurrency_argument(parser: CommandParser) -> None:
    parser.add_argument(
        "--concurrency",
        type=whole_number,
        default=1,
        metavar="N",
        help="Number of keys that run at once, each in a thread with its own connections (default: %(default)s).",
    )


def seconds(text: str) -> float:
    """Parse a duration in seconds, at most a day."""
    return positive_number(text, float, "a number of seconds", 86_400)


def whole_number(text: str) -> int:
    return positive_number(text, int, "a whole number", 100_000)


def positive_number(text: str, kind: Callable[[str], Number], what: str, at_most: int) -> Number:
    """Parse a number above 0 and at most ``at_most``. Raises ArgumentTypeError for other text."""
    try:
        value = kind(text)
    except ValueError:
        value = kind("0")
    if not 0 < value <= at_most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} above 0, at most {at_most}")
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
