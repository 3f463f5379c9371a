"""``manage.py reap_keys``: delete expired keys and settle overdue ones."""

from dataclasses import astuple
from typing import Any

from idempotency.management.passes import PassCommand
from idempotency.reaper import ReapPass, reap_once


class Command(PassCommand):
    help = (
        "Delete finished and refused keys, inbox messages and counts of requests past their"
        " retention. Call on_abandon for keys that are unfinished after RETENTION_HOURS, or mark"
        " these keys as stuck. Several instances of this command may run at once. The command does"
        " one pass and exits, or repeats passes with --loop. Exit status 0: the pass is done, with"
        " or without stuck keys, or the loop got SIGTERM. 1: the database cannot be reached. 2:"
        " wrong usage. 3: a run in a loop hangs; start the command again."
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
