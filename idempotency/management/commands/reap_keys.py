"""``manage.py reap_keys``: delete expired keys and settle overdue ones."""

from dataclasses import astuple
from typing import Any

from idempotency.management.passes import LOOP_HELP, PassCommand
from idempotency.reaper import ReapPass, reap_once


class Command(PassCommand):
    help = (
        "Delete finished and refused keys, inbox messages and counts of requests past their"
        " retention. Call on_abandon for keys that are unfinished after RETENTION_HOURS, or mark"
        f" these keys as stuck. {LOOP_HELP}"
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
