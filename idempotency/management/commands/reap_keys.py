"""``manage.py reap_keys``: delete what is past its retention."""

from dataclasses import astuple
from typing import Any

from django.core.management.base import CommandParser

from idempotency.management.passes import PassCommand, number
from idempotency.reaper import ReapPass, reap_once


class Command(PassCommand):
    """Parse, and call ``reap_once``; on a terminal, show how far it is."""

    help = (
        "Delete finished keys and inbox messages past their retention, and mark unfinished keys past it stuck. Several may run "
        "at once. One pass and exit, or --loop to stay. Exit status: 0 pass done (stuck keys included) or SIGTERM, 1 database "
        "not reachable, 2 usage."
    )
    default_interval = 60.0
    own_options = ("older_than_hours",)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--older-than",
            type=_hours,
            dest="older_than_hours",
            metavar="HOURS",
            help="Delete the keys that were finished longer ago than this, instead of RETENTION_HOURS; unfinished keys and "
            "inbox messages keep their own time. The retry of a request whose key was deleted runs anew.",
        )

    def run_pass(self, **options: Any) -> ReapPass:
        """Do a pass, counting on a terminal, where somebody waits for it."""
        if options["dry_run"] or not self.stdout.isatty():
            return reap_once(**options)
        total = sum(astuple(reap_once(**options | {"dry_run": True})))

        def show(so_far: ReapPass) -> None:
            self.stdout.write(f"\r{sum(astuple(so_far))} of {total}", ending="")
            self.stdout.flush()

        try:
            return reap_once(**options, progress=show)
        finally:
            self.stdout.write("\r\033[K", ending="")  # The line is free for the counts.


def _hours(text: str) -> float:
    return number(text, float, "a number of hours", 1_000_000)
