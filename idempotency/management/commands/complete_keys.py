"""``manage.py complete_keys``: finish the requests whose clients have gone away."""

from django.core.management.base import CommandParser

from idempotency.completer import CompletePass, complete_once
from idempotency.management.passes import PassCommand, add_concurrency_argument


class Command(PassCommand):
    """Parse, and call ``complete_once``."""

    help = (
        "Run abandoned requests on from their last recovery point, each as its own user. Several may run at once. One pass and "
        "exit, or --loop to stay. Exit status: 0 pass done (stuck keys included) or SIGTERM, 1 database not reachable, 2 usage."
    )
    default_interval = 5.0
    default_batch_size = 100
    batch_size_help = "How many keys are looked up at a time"
    own_options = ("concurrency",)

    run_pass = staticmethod(complete_once)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_concurrency_argument(parser)

    def would_be(self, counts: CompletePass) -> str:
        """Return how many keys would be run: what becomes of them, nobody knows before."""
        return f"{counts.failed} run"
