"""``manage.py staged_jobs``: list staged jobs, and retry or delete failed ones."""

import argparse
import json
from collections.abc import Collection
from dataclasses import asdict
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.models import Case, F, When

from idempotency._groups import HELD
from idempotency._records import HOOKS_FAILED
from idempotency._text import escaped
from idempotency.enqueuer import backlog
from idempotency.interventions import discard_jobs, forget_hook_errors, retry_jobs
from idempotency.management.failures import exit_1_explained
from idempotency.management.passes import add_database_argument, database_of, whole_number
from idempotency.models import ProcessedMessage, StagedJob

_LIST = (
    "Print a line for each job: state, id, hand-overs, refusals, queue, group, name, error. A held"
    " job waits for an earlier one of its group. Above the staged jobs are lines of jobs that took"
    " effect, and whose on_commit hooks failed."
)
_RETRY = "Make failed jobs due again, and reset their counts of hand-overs and refusals."
_PURGE = "Delete failed jobs, and the errors of on_commit hooks."


class Command(BaseCommand):
    help = (
        "List the staged jobs, failed ones first (list), hand failed jobs over again (retry),"
        " delete failed jobs (purge), or print the backlog (stats). Exit status: 0 if done; 1 if"
        " the database cannot be reached or a job is not among the failed ones; 2 for wrong usage."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        database = argparse.ArgumentParser(add_help=False)
        add_database_argument(database)
        actions = parser.add_subparsers(
            dest="action", required=True, parser_class=argparse.ArgumentParser
        )
        add = actions.add_parser("list", parents=[database], help=_LIST).add_argument
        add("--failed", action="store_true", help="Print only failed jobs.")
        text = "Maximum number of lines (default: %(default)s)."
        add("--limit", type=whole_number, default=100, metavar="N", help=text)
        for name, text in (("retry", _RETRY), ("purge", _PURGE)):
            action = actions.add_parser(name, parents=[database], help=text)
            add = action.add_mutually_exclusive_group(required=True).add_argument
            add("ids", nargs="*", default=[], type=UUID, metavar="ID", help="The ids of the jobs.")
            add("--all", action="store_true", help="All failed jobs.")
        text = "Print the backlog in one line."
        add = actions.add_parser("stats", parents=[database], help=text).add_argument
        add("--json", action="store_true", help="Print a JSON object, for monitoring.")

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_of(options, StagedJob)
        with exit_1_explained("staged_jobs", using):
            getattr(self, options["action"])(using, options)

    def list(self, using: str, options: dict[str, Any]) -> None:
        messages = ProcessedMessage.objects.using(using).filter(HOOKS_FAILED)
        done = messages.order_by("processed_at")[: options["limit"]]
        for message in done:
            error = " ".join(message.hook_error.split())[:160]
            self.stdout.write(escaped(f"hook failed  {message.message_id}  {error}"))
        order = (F("failed_at").asc(nulls_last=True), "run_at", "pk")
        held = Case(When(HELD, then=True), default=False)
        jobs = StagedJob.objects.using(using).annotate(held=held).order_by(*order)
        if options["failed"]:
            jobs = jobs.filter(failed_at__isnull=False)
        for job in jobs[: options["limit"] - len(done)]:
            state = f"due {job.run_at.isoformat(timespec='seconds')}"
            if job.failed_at or job.held:
                state = "failed" if job.failed_at else "held"
            error = " ".join(job.last_error.split())[:120]
            counts = f"{job.hand_overs} hand-overs  {job.refusals} refusals"
            group = f"  group {job.group}" if job.group else ""
            line = f"{state}  {job.pk}  {counts}  {job.queue}{group}  {job.label}  {error}"
            self.stdout.write(escaped(line.rstrip()))

    def retry(self, using: str, options: dict[str, Any]) -> None:
        self._conclude("made due again", retry_jobs(_chosen(options), using=using), options)

    def purge(self, using: str, options: dict[str, Any]) -> None:
        ids = _chosen(options)
        deleted = discard_jobs(ids, using=using)
        forgotten = forget_hook_errors(ids if ids is None else [str(pk) for pk in ids], using=using)
        self._conclude("deleted", deleted + forgotten, options)

    def stats(self, using: str, options: dict[str, Any]) -> None:
        waiting = backlog(using=using)
        if options["json"]:
            self.stdout.write(json.dumps(asdict(waiting)))
        else:
            due = f"{waiting.due_jobs} due, the oldest for {waiting.oldest_seconds:.1f} s"
            self.stdout.write(f"staged_jobs: {due}, {waiting.failed_jobs} failed")

    def _conclude(self, done: str, count: int, options: dict[str, Any]) -> None:
        """Print the number of jobs. Raises CommandError if an id is not that of a failed job, or if
        its job is running now."""
        self.stdout.write(f"staged_jobs: {count} {done}")
        if missing := len(set(options["ids"])) - count if not options["all"] else 0:
            raise CommandError(
                f"staged_jobs: {missing} of the ids are not failed jobs, or are running now (see"
                " staged_jobs list --failed).",
                returncode=1,
            )


def _chosen(options: dict[str, Any]) -> Collection[UUID] | None:
    return None if options["all"] else options["ids"]
