"""``manage.py idempotency_worker``: run enqueuer, completer and reaper with one command, for small
sites."""

import logging
import os
import subprocess  # nosec B404  # for the commands of this app
import sys
import time
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser
from django.db import connections
from django.utils.autoreload import get_child_arguments

from idempotency.management.commands import complete_keys, enqueue_jobs, reap_keys
from idempotency.management.failures import refuse_second_alias
from idempotency.management.loop import EXIT_HUNG, PARENT_VARIABLE, StopSignal, end_seconds
from idempotency.management.passes import (
    add_concurrency_argument,
    add_database_argument,
    database_of,
    seconds,
)
from idempotency.monitoring.heartbeats import COMPLETER, ENQUEUER, REAPER

logger = logging.getLogger("idempotency")

#: For each loop: the option for its interval, and the default of the option.
_LOOPS: dict[str, tuple[str, float]] = {
    ENQUEUER: ("enqueue_interval", enqueue_jobs.Command.default_interval),
    COMPLETER: ("complete_interval", complete_keys.Command.default_interval),
    REAPER: ("reap_interval", reap_keys.Command.default_interval),
}
#: The pause before a loop is started again.
_RESTART_SECONDS = 1.0
#: The time for the end of the loops beyond that for the end of their runs.
_GRACE_SECONDS = 10.0
_ASK_SECONDS = 0.2


class Command(BaseCommand):
    """Run the three loops, each in a process of its own, and start again those that end."""

    help = (
        "Run enqueue_jobs, complete_keys and reap_keys, each in a process of its own, until"
        " SIGTERM. A loop that ends is started again. Exit status: 0 after SIGTERM; 2 for wrong"
        " usage; 3 if a run did not end after SIGTERM."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        for name, (option, default) in _LOOPS.items():
            text = f"Time between two passes of {name} (default: %(default)s)."
            flag = f"--{option.replace('_', '-')}"
            parser.add_argument(flag, type=seconds, default=default, metavar="SECONDS", help=text)
        add_concurrency_argument(parser)
        add_database_argument(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_of(options)
        refuse_second_alias("idempotency_worker", using)
        connections.close_all()
        commands = {name: self._command(name, options | {"database": using}) for name in _LOOPS}
        environment = {**os.environ, **_environment(), PARENT_VARIABLE: str(os.getpid())}
        stop = StopSignal()

        def start(name: str) -> "subprocess.Popen[bytes]":
            return subprocess.Popen(commands[name], env=environment)  # nosec B603  # the program itself

        with stop.installed():
            children = {name: start(name) for name in commands}
            while not stop.requested(_ASK_SECONDS):
                for name, child in children.items():
                    if child.poll() is not None:
                        text = "%s ended with the status %d, and is started again"
                        logger.warning(text, name, child.returncode)
                        if stop.requested(_RESTART_SECONDS):
                            break
                        children[name] = start(name)
            if not _have_ended(list(children.values())):
                raise SystemExit(EXIT_HUNG)

    def _command(self, name: str, options: dict[str, Any]) -> list[str]:
        """Return the command line of a loop."""
        given = {
            "interval": options[_LOOPS[name][0]],
            "database": options["database"],
            "verbosity": options["verbosity"],
        }
        given |= {
            option: options[option] for option in ("settings", "pythonpath") if options.get(option)
        }
        if name == COMPLETER:
            given["concurrency"] = options["concurrency"]
        own = (f"--{option}={value}" for option, value in given.items())
        return [*_program(), name, "--loop", "--skip-checks", *own]


def _is_main_program() -> bool:
    """Return whether this process was started for this command, and not by code that calls it."""
    return sys.argv[1:2] == [__name__.rpartition(".")[2]]


def _program() -> list[str]:
    """Return the beginning of the command line of this process, such as ``python manage.py``."""
    if not _is_main_program():
        return [sys.executable, "-m", "django"]
    arguments = get_child_arguments()
    return arguments[: len(arguments) - len(sys.argv[1:])]


def _environment() -> dict[str, str]:
    if _is_main_program():
        return {}
    return {
        "DJANGO_SETTINGS_MODULE": settings.SETTINGS_MODULE,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _have_ended(children: "list[subprocess.Popen[bytes]]") -> bool:
    """Let the children end, and kill those that do not. Return whether all runs have ended."""
    for child in children:
        child.terminate()
    until, ended = time.monotonic() + end_seconds(ENQUEUER) + _GRACE_SECONDS, True
    for child in children:
        try:
            ended = child.wait(max(0, until - time.monotonic())) != EXIT_HUNG and ended
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            ended = False
    return ended
