"""``manage.py reap_keys``: delete expired keys and settle overdue ones."""

from dataclasses import astuple
from typing import Any

from idempotency.management.passes import PassCommand
from idempotency.reaper import ReapPass, reap_once


class Command(PassCommand):
    help = (
        "Delete finished and refused keys, inbox messages and counts of requests past their"
        " retention. Settle keys that are unfinished after RETENTION_HOURS with on_abandon, or mark"
        " them as stuck. Several instances of this command may run at once. The command does one"
        " pass and exits, or repeats passes with --loop. Exit status: 0 if the pass is done, even"
        " if keys became stuck, or after SIGTERM; 1 if the database cannot be reached; 2 for wrong"
        " usage; 3 if a run in a loop hangs, after which the command must be started again."
    )
    default_interval = 60.0

    def run_pass(self, **options: Any) -> ReapPass:
        """Do one pass and return its counts. Show the progress on a terminal."""
        if options["dry_run"] or not self.stdout.isatty():
            return reap_once(**options)
        total = sum(astuple(reap_once(**options | {"dry_run": True})))

        def show(so_far: ReapPass) -> None:
            self.stdout.write(f"\r{sum(astuple(so_far))} of {total}", ending="")
            self.stdout.flush()

        try:
            return reap_once(**options, progress=show)
        finally:
            self.stdout.write("\r\033[K", ending="")  # Clear the line for the counts.
