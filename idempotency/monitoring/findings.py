"""Findings of measurements, in the language of the reader: the doctor prints them in English, the
dashboard translates them."""

from collections.abc import Iterator
from dataclasses import dataclass

from django.utils.translation import gettext as _

from idempotency._text import Grouped, duration
from idempotency.monitoring import measures
from idempotency.monitoring.heartbeats import LOOPS

#: The enqueuer makes a pass each second, the completer every 5 seconds. If work waits longer than
#: this, no process handles it.
LATE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem: a short stable code, the observation and the cure."""

    code: str
    seen: str
    cure: str
    #: The cure in the admin, if it needs no shell there.
    in_admin: str = ""


def of_keys(keys: measures.UnfinishedKeys) -> Iterator[Finding]:
    """Yield the findings about the unfinished keys. The dashboard shows them too."""
    if keys.for_review:
        yield Finding(
            "stuck_keys",
            _("Keys that need manual review: %(count)s, the oldest for %(duration)s.")
            % {"count": Grouped(keys.for_review), "duration": duration(keys.stuck_for)},
            _(
                "Open the admin's list of keys with the filter 'needs manual review'. The page of"
                " each key shows the reason and the actions."
            ),
            in_admin=_("The page of each key shows the reason and the actions."),
        )
    if keys.completer_lag > LATE_SECONDS:
        yield Finding(
            "completer_late",
            _("A key has waited %(duration)s for the completer.")
            % {"duration": duration(keys.completer_lag)},
            _(
                "Start manage.py complete_keys --loop; if it runs, give it --concurrency, and look"
                " for errors in its log."
            ),
        )


def of_jobs(jobs: measures.StagedJobs) -> Iterator[Finding]:
    if jobs.oldest > LATE_SECONDS:
        yield Finding(
            "jobs_late",
            _("Staged jobs that are due: %(count)s, the oldest for %(duration)s.")
            % {"count": Grouped(jobs.due), "duration": duration(jobs.oldest)},
            _(
                "Start manage.py enqueue_jobs --loop; if it runs, its log names the broker that it"
                " cannot reach."
            ),
        )
    if jobs.not_deleted:
        yield Finding(
            "jobs_not_deleted",
            _("Staged jobs that the broker has, but whose rows cannot be deleted: %(count)s.")
            % {"count": Grouped(jobs.not_deleted)},
            _(
                "manage.py staged_jobs list shows the error. Correct the cause, for example a"
                " trigger or a missing privilege. The enqueuer then deletes the rows, and sends no"
                " job again."
            ),
            in_admin=_(
                "The list shows the error. Correct the cause, for example a trigger or a missing"
                " privilege. The enqueuer then deletes the rows, and sends no job again."
            ),
        )
    if failed := jobs.failed_by_name.total():
        yield Finding(
            "jobs_failed",
            _("Staged jobs that have failed: %(count)s.") % {"count": Grouped(failed)},
            _(
                "manage.py staged_jobs list --failed shows the errors. Correct the cause, then run"
                " manage.py staged_jobs retry --all, or purge."
            ),
            in_admin=_(
                "The list shows the errors. Correct the cause, then retry or discard the jobs."
            ),
        )


def of_processes(processes: list[measures.Process]) -> Iterator[Finding]:
    """Yield a finding for each silent loop. There is none for a loop without any heartbeat, because
    cron may run that loop."""
    lags = measures.lags(processes)
    silent = {process.name for process in processes if process.silent}
    for name, consequence in LOOPS.items():
        if name in silent:
            yield Finding(
                "process_silent",
                _("No loop of %(name)s has written a heartbeat for %(duration)s: %(consequence)s.")
                % {"name": name, "duration": duration(lags[name]), "consequence": consequence},
                _("Start it again. If it runs, its log has the error."),
            )
