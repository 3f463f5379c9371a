"""``manage.py reap_keys``: delete expired keys and settle overdue ones."""

from django.core.management.base import CommandParser

from idempotency.management.passes import PassCommand, positive_number
from idempotency.reaper import reap_once


class Command(PassCommand):
    help = (
        "Delete finished and refused keys, inbox messages and counts of requests past their retention. Settle keys that are "
        "unfinished after RETENTION_HOURS with on_abandon, or mark them as stuck. Several instances of this command may run at "
        "once. The command does one pass and exits, or repeats passes with --loop. Exit status: 0 if the pass is done, even if "
        "keys became stuck, or after SIGTERM; 1 if the database cannot be reached; 2 for wrong usage."
    )
    default_interval = 60.0
    own_options = ("older_than_hours",)

    run_pass = staticmethod(reap_once)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--older-than",
            type=_hours,
            dest="older_than_hours",
            metavar="HOURS",
            help="Delete keys that were finished or refused more than this time ago, whatever RETENTION_HOURS is. A longer "
            "retention_hours of a view still counts. The option affects no other rows. If a client retries a request after its "
            "key was deleted, the request runs again.",
        )


def _hours(text: str) -> float:
    return positive_number(text, float, "a number of hours", 1_000_000)
