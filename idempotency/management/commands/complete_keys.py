"""``manage.py complete_keys``: finish abandoned requests."""

from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandParser

from idempotency._bulk_work import Turns
from idempotency._key_completion import AbandonedKeys
from idempotency.completer import CompletePass, complete_once
from idempotency.management.passes import LOOP_HELP, PassCommand, add_concurrency_argument


class Command(PassCommand):
    help = (
        "Run abandoned requests from their last recovery point, each as its sender, and do the"
        f" bulk work that was begun in the admin. {LOOP_HELP}"
    )
    default_interval = 5.0
    default_batch_size = 100
    own_options = ("concurrency",)

    run_pass = staticmethod(complete_once)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_concurrency_argument(parser)

    def would_be(self, counts: CompletePass) -> str:
        """Return the number of keys that a pass would run. The outcomes of the runs are unknown."""
        return f"would be: {counts.finished} run"

    def pass_of_loop(self, given: dict[str, Any]) -> tuple[Callable[..., Any], int]:
        """Let the threads share the keys of a pass. At the end of its part, no thread waits for the
        others."""
        if given["dry_run"]:
            return super().pass_of_loop(given)
        keys = AbandonedKeys(given["using"], given["batch_size"])
        turns = Turns(given["using"])

        def run_pass(stop: Callable[[], bool]) -> CompletePass:
            keys.begin()
            return CompletePass(**keys.complete(stop, turns.take))

        return run_pass, given["concurrency"]
