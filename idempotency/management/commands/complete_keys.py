"""``manage.py complete_keys``: finish abandoned requests."""

from django.core.management.base import CommandParser

from idempotency.completer import complete_once
from idempotency.management.passes import PassCommand, add_concurrency_argument


class Command(PassCommand):
    help = (
        "Run abandoned requests from their last recovery point, each as its sender. Several instances of this command may run "
        "at once. The command does one pass and exits, or repeats passes with --loop. Exit status: 0 if the pass is done, even "
        "if keys became stuck, or after SIGTERM; 1 if the database cannot be reached; 2 for wrong usage."
    )
    default_interval = 5.0
    default_batch_size = 100
    batch_size_help = "Number of keys that one query reads"
    own_options = ("concurrency",)

    run_pass = staticmethod(complete_once)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_concurrency_argument(parser)
