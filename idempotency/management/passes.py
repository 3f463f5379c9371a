"""The base of the commands: run one pass and exit, or repeat passes until SIGTERM."""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar, TypeVar

from django.core.management.base import BaseCommand, CommandParser
from django.db import connections, router
from django.db.models import Model

from idempotency.management.failures import exit_1_explained, refuse_second_alias
from idempotency.management.loop import Loop, StopSignal
from idempotency.models import IdempotencyKey

Number = TypeVar("Number", int, float)

#: The end of the help of each command.
LOOP_HELP = (
    "Several instances of this command may run at once. The command does one pass and exits, or"
    " repeats passes with --loop. Exit status 0: the pass is done, with or without stuck keys, or"
    " the loop got SIGTERM. 1: the database or the broker cannot be reached. 2: wrong usage. 3: a"
    " run or a batch in a loop hangs; start the command again."
)


class PassCommand(BaseCommand):
    """A command that calls a ``*_once()`` function, once or in a loop, and prints its counts.

    Exit status: 0 if the pass is done or a signal arrived; 1 if the database or broker is
    unavailable or a migration is missing; 2 for wrong usage; 3 if a run in a loop hangs.
    """

    default_interval: ClassVar[float]
    default_batch_size: ClassVar[int] = 1000
    #: The model whose rows the command reads.
    model: ClassVar[type[Model]] = IdempotencyKey

    #: The function that does one pass. It calls ``stop`` between batches or keys, and returns a
    #: dataclass of counts.
    run_pass: Callable[..., Any]
    #: The options of this command only, which are passed to ``run_pass``.
    own_options: ClassVar[tuple[str, ...]] = ()

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        text = "Repeat passes every --interval seconds until SIGTERM."
        add("--loop", action="store_true", help=text)
        text = "Time between two passes with --loop (default: %(default)s)."
        default = self.default_interval
        add("--interval", type=seconds, default=default, metavar="SECONDS", help=text)
        text = "Maximum number of rows in one query or transaction (default: %(default)s)."
        size = self.default_batch_size
        add("--batch-size", type=whole_number, default=size, metavar="N", help=text)
        text = "Print the counts without changing anything."
        add("--dry-run", action="store_true", help=text)
        add_database_argument(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        name = type(self).__module__.rpartition(".")[2]
        given = {option: options[option] for option in ("batch_size", "dry_run", *self.own_options)}
        given["using"] = using = database_of(options, self.model)
        refuse_second_alias(name, using)

        def say(text: str) -> None:
            if options["verbosity"]:
                self.stdout.write(f"{name}: {text}")
                self.stdout.flush()

        words = self.would_be if options["dry_run"] else in_words
        stop, interval = StopSignal(), options["interval"]
        with stop.installed():
            if options["loop"]:
                run_pass, threads = self.pass_of_loop(given)
                say(f"database {using!r}, a pass every {interval:g} s")
                Loop(
                    name,
                    run_pass,
                    interval=interval,
                    stop=stop,
                    say=lambda counts: say(words(counts)),
                    using=using,
                    threads=threads,
                ).run()
                return
            with exit_1_explained(name, using):
                say(words(self.run_pass(stop=stop.requested, **given)))

    def would_be(self, counts: Any) -> str:
        """Return the counts of a dry run as text."""
        return f"would be: {in_words(counts)}"

    def pass_of_loop(self, given: dict[str, Any]) -> tuple[Callable[..., Any], int]:
        """Return the function that each thread of a loop repeats, and the number of threads."""
        return partial(self.run_pass, **given), 1


def in_words(counts: Any) -> str:
    """Return the counts of a pass as text, as ``3 finished, 1 failed, 0 stuck``."""
    return ", ".join(
        f"{number} {what.replace('_', ' ')}" for what, number in asdict(counts).items()
    )


def add_database_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for the database. A command reads it with ``database_of``."""
    text = (
        "The database with the tables of this app (default: the database to which DATABASE_ROUTERS"
        " send its writes)."
    )
    parser.add_argument("--database", choices=tuple(connections), help=text)


def database_of(options: dict[str, Any], model: type[Model] = IdempotencyKey) -> str:
    """Return the database that the option names, or to which the router writes the rows of
    ``model``."""
    return options["database"] or router.db_for_write(model)


def add_concurrency_argument(parser: CommandParser) -> None:
    text = (
        "Number of keys that run at once, each in a thread with its own connections (default:"
        " %(default)s)."
    )
    parser.add_argument("--concurrency", type=whole_number, default=1, metavar="N", help=text)


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
