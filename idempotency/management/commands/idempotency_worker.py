"""``manage.py idempotency_worker``: enqueuer, completer and reaper in one process, for small sites."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from idempotency.completer import complete_once
from idempotency.enqueuer import enqueue_once
from idempotency.heartbeats import SILENT_SECONDS
from idempotency.management.commands import complete_keys, enqueue_jobs, reap_keys
from idempotency.management.passes import (
    Loop,
    StopSignal,
    add_concurrency_argument,
    add_database_argument,
    in_words,
    seconds,
)
from idempotency.reaper import reap_once

#: The option for the interval of each loop, its default, and the work.
LOOPS: dict[str, tuple[str, float, Callable[..., Any]]] = {
    "enqueue_jobs": ("enqueue_interval", enqueue_jobs.Command.default_interval, enqueue_once),
    "complete_keys": ("complete_interval", complete_keys.Command.default_interval, complete_once),
    "reap_keys": ("reap_interval", reap_keys.Command.default_interval, reap_once),
}


class Command(BaseCommand):
    """Run the three loops, each in a thread of its own; or, with ``--check``, look for their signs of life.

    A heartbeat is a file for each loop, whose time of change is the last sign of life. It needs no port, no permission and no
    database, and tells a loop that hangs or fails from one that works, which a look at the process cannot.
    """

    help = (
        "Run enqueue_jobs, complete_keys and reap_keys in one process until SIGTERM; when one fails, the others go on. Exit "
        "status: 0 SIGTERM, or with --check all is well; 1 with --check a loop gives no sign of life; 2 usage."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        for name, (option, default, _) in LOOPS.items():
            parser.add_argument(
                f"--{option.replace('_', '-')}",
                type=seconds,
                default=default,
                metavar="SECONDS",
                help=f"How long {name} waits between two passes (default: %(default)s).",
            )
        add_concurrency_argument(parser)
        add_database_argument(parser)
        parser.add_argument(
            "--heartbeat",
            type=Path,
            metavar="DIR",
            help="Touch a file for each loop in this folder, every few seconds, while its passes succeed.",
        )
        parser.add_argument("--check", action="store_true", help="Start nothing: look into the --heartbeat folder, and exit.")
        parser.add_argument(
            "--max-age",
            type=seconds,
            default=SILENT_SECONDS,
            metavar="SECONDS",
            help="With --check: how old the last sign of life may be (default: %(default)s).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        folder = options["heartbeat"]
        if options["check"]:
            if folder is None:
                raise CommandError("--check needs --heartbeat DIR, the folder that the worker was started with.", returncode=2)
            self._check(folder, options["max_age"])
            return
        if folder is not None:
            _make_empty(folder)
        self._run(folder, options)

    def _run(self, folder: Path | None, options: dict[str, Any]) -> None:
        stop = StopSignal()
        threads = []
        for name, (interval, _, run_pass) in LOOPS.items():
            given = {"using": options["database"]}
            if run_pass is complete_once:
                given["concurrency"] = options["concurrency"]
            loop = Loop(
                name,
                partial(run_pass, **given),
                interval=options[interval],
                stop=stop,
                say=partial(self._say, name),
                beat=partial(_touch, folder / name) if folder is not None else lambda: None,
                using=options["database"],
            )
            threads.append(threading.Thread(target=loop.run, name=name))
        with stop.installed():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if folder is not None:
            _make_empty(folder)

    def _say(self, name: str, counts: Any) -> None:
        self.stdout.write(in_words(name, counts))
        self.stdout.flush()

    def _check(self, folder: Path, max_age: float) -> None:
        silent = []
        for name in LOOPS:
            try:
                age = time.time() - (folder / name).stat().st_mtime
            except OSError as error:
                silent.append(f"{name} (no file in {folder}: {error.strerror})")
            else:
                if age > max_age:
                    silent.append(f"{name} ({age:.0f} s ago, at most {max_age:g})")
        if silent:
            raise CommandError(f"No sign of life from {', '.join(silent)}. The log of the worker says why.", returncode=1)
        self.stdout.write("All loops are at work.")


def _make_empty(folder: Path) -> None:
    """Remove the heartbeats of a run that is over."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in LOOPS:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"--heartbeat {folder} cannot be used: {error.strerror}.", returncode=2) from None


def _touch(path: Path) -> None:
    with suppress(OSError):  # A full disk must not end the work; the check tells.
        path.touch()
