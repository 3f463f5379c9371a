"""The actions on failed jobs: retry, discard."""

from collections.abc import Iterable
from typing import Any

from django.contrib.admin.models import DELETION
from django.db.models import Case, Min, When
from django.db.models.fields.json import KeyTextTransform
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from idempotency._records import STAGED_OPERATION
from idempotency.admin.bulk import BulkAction, Group
from idempotency.admin.error_groups import ErrorPattern, group_of
from idempotency.models import StagedJob
from idempotency.monitoring.measures import counted


class _OfJobs(BulkAction):
    column, changed = "failed_at", ("failed_at",)
    others = _("not failed, or no longer failed")
    sample_template = "admin/idempotency/stagedjob/sample.html"

    def concerned(self, rows: Any) -> Any:
        return rows.filter(failed_at__isnull=False)

    def kinds(self, rows: Any) -> Iterable[tuple[Any, int]]:
        operation = Case(
            When(job_name=STAGED_OPERATION, then=KeyTextTransform("operation", "job_args"))
        )
        failed = self.concerned(rows).annotate(called=operation, pattern=ErrorPattern("last_error"))
        for kind in counted(failed, "job_name", "called", "pattern", error=Min("last_error")):
            arguments = {"operation": kind.called or ""}
            yield (
                StagedJob(job_name=kind.job_name, job_args=arguments, last_error=kind.error),
                kind.number,
            )

    def group(self, row: Any) -> Group:
        return Group(row.label, group_of(row.last_error))


class Retry(_OfJobs):
    """Make failed jobs due again."""

    name, label, permission = "retry", _("Retry: hand failed jobs over again"), "retry_stagedjob"
    explanation = _(
        "The enqueuer hands these jobs over again in its next pass, with a new count of hand-overs"
        " and refusals."
    )
    done = ngettext_lazy("%(count)s job is due again.", "%(count)s jobs are due again.", "count")
    logged = "Made due again."


class Discard(_OfJobs):
    """Delete failed jobs, so that they never run."""

    name, label, permission = "discard", _("Discard failed jobs for good"), "discard_stagedjob"
    explanation = _(
        "These jobs are deleted. They never run, even if a queue still has a message for one of"
        " them. A group continues with its next job."
    )
    done = ngettext_lazy("%(count)s job was discarded.", "%(count)s jobs were discarded.", "count")
    logged, flag = "Discarded.", DELETION
