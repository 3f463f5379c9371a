"""``manage.py idempotency_worker``: run enqueuer, completer and reaper in one process, for small sites."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from idempotency.completer import complete_once
from idempotency.enqueuer import enqueue_once
from idempotency.management.commands import complete_keys, enqueue_jobs, reap_keys
from idempotency.management.passes import (
    Loop,
    StopSignal,
    add_concurrency_argument,
    add_database_argument,
    in_words,
    refuse_second_alias,
    seconds,
)
from idempotency.monitoring.heartbeats import COMPLETER, ENQUEUER, REAPER
from idempotency.reaper import reap_once

#: For each loop: the option for its interval, the default of the option, and the function that does one pass.
_WORK: dict[str, tuple[str, float, Callable[..., Any]]] = {
    ENQUEUER: ("enqueue_interval", enqueue_jobs.Command.default_interval, enqueue_once),
    COMPLETER: ("complete_interval", complete_keys.Command.default_interval, complete_once),
    REAPER: ("reap_interval", reap_keys.Command.default_interval, reap_once),
}


class Command(BaseCommand):
    """Run the three loops, each in its own thread."""

    help = (
        "Run enqueue_jobs, complete_keys and reap_keys in one process until SIGTERM. If one fails, the others continue. Exit "
        "status: 0 after SIGTERM, 2 for wrong usage."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        for name, (option, default, _) in _WORK.items():
            parser.add_argument(
                f"--{option.replace('_', '-')}",
                type=seconds,
                default=default,
                metavar="SECONDS",
                help=f"Time between two passes of {name} (default: %(default)s).",
            )
        add_concurrency_argument(parser)
        add_database_argument(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        refuse_second_alias("idempotency_worker", options["database"])
        stop = StopSignal()
        threads = []
        for name, (interval, _, run_pass) in _WORK.items():
            given = {"using": options["database"]}
            if run_pass is complete_once:
                given["concurrency"] = options["concurrency"]
            loop = Loop(
                name,
                partial(run_pass, **given),
                interval=options[interval],
                stop=stop,
                say=partial(self._say, name),
                using=options["database"],
            )
            threads.append(threading.Thread(target=loop.run, name=name))
        with stop.installed():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _say(self, name: str, counts: Any) -> None:
        self.stdout.write(f"{name}: {in_words(counts)}")
        self.stdout.flush()
