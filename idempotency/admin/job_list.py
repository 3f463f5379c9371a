"""Staged jobs: the list, and the page of one job, with the actions on failed jobs."""

from typing import Any
from uuid import UUID

from django.contrib import admin
from django.db.models import Case, Q, QuerySet, When
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from idempotency._groups import HELD, IN_TURN
from idempotency._operations.definition import scope_of
from idempotency._outcomes import was_handed_over
from idempotency._text import duration
from idempotency.admin.bodies import body, log_looks, may_view_bodies
from idempotency.admin.bulk_jobs import Discard, Retry
from idempotency.admin.bulk_pages import BulkAdmin
from idempotency.admin.error_groups import group_of
from idempotency.admin.filters import AgeFilter, JobErrorGroupFilter, row_id
from idempotency.admin.form_filters import TextFilter
from idempotency.admin.reading import filter_link, preformatted, pretty
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.monitoring.measures import NOT_DELETED
from idempotency.templatetags.idempotency_admin import ago


class JobStateFilter(admin.SimpleListFilter):
    """Failed jobs and waiting jobs. A waiting job is due, or not due yet, or held by an earlier job
    of its group. The broker has some of the waiting jobs, whose rows cannot be deleted."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        waiting = ("waiting", _("waiting")), ("due", _("due")), ("later", _("not due yet"))
        held, failed = ("held", _("held by their group")), ("failed", _("failed"))
        return [*waiting, held, failed, ("not_deleted", _("sent, but cannot be deleted"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = {
            "waiting": Q(failed_at__isnull=True),
            "due": Q(IN_TURN, failed_at__isnull=True, run_at__lte=Now()),
            "later": Q(IN_TURN, failed_at__isnull=True, run_at__gt=Now()),
            "held": Q(HELD, failed_at__isnull=True),
            "failed": Q(failed_at__isnull=False),
            "not_deleted": Q(NOT_DELETED, failed_at__isnull=True),
        }
        return queryset.filter(chosen.get(self.value() or "", Q()))


class DueFilter(AgeFilter):
    """Spans of the time for which jobs have been due."""

    title = _("due for")
    column = "run_at"


class JobNameFilter(TextFilter):
    title = _("job name")
    parameter_name = "job_name"


class QueueFilter(TextFilter):
    title = _("queue")
    parameter_name = "queue"


class GroupFilter(TextFilter):
    title = _("group")
    parameter_name = "group"


@admin.register(StagedJob)
class StagedJobAdmin(BulkAdmin):
    """Jobs that wait for the enqueuer, jobs that were handed over and have no effect yet, and
    failed jobs."""

    list_display = (
        "label", "state", "hand_overs", "refusals", "error_line", "queue_link", "group_link", "key",
    )  # fmt: skip
    list_filter = (
        JobStateFilter, DueFilter, JobNameFilter, QueueFilter, GroupFilter, JobErrorGroupFilter,
    )  # fmt: skip
    bulk = (Retry(), Discard())
    ordering = ("-id",)
    search_fields = ("id",)
    search_help_text = _("The id of a job, or the id of the row of its key.")
    fields = (
        "label", "arguments", "queue", "group", "group_position", "state", "hand_overs", "refusals",
        "error", "created_at", "run_at", "handed_over_at", "failed_at", "key",
    )  # fmt: skip

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the jobs, with the time of the database as ``read_at``, and with ``held``: whether
        the group has an earlier job."""
        jobs: QuerySet[Any] = super().get_queryset(request)
        held = Case(When(HELD, then=True), default=False)
        annotated: QuerySet[Any] = jobs.annotate(read_at=Now(), held=held)
        return annotated

    def found(self, request: HttpRequest, rows: QuerySet[Any], term: str) -> QuerySet[Any]:
        """Return the job with this id, or the jobs of the key whose row has this id."""
        try:
            return rows.filter(pk=UUID(term))
        except ValueError:
            key = row_id(term)
        return rows.none() if key is None else rows.filter(idempotency_key=key)

    @admin.display(description=_("job name"), ordering="job_name")
    def label(self, job: StagedJob) -> str:
        """Return the name of the job, or of the operation that it calls."""
        return job.label

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields of the page; for a staged operation, also its key."""
        fields = super().get_fields(request, obj)
        return [*fields, "operation_key"] if obj and obj.operation else fields

    @admin.display(description=_("key of the operation"))
    def operation_key(self, job: StagedJob) -> str:
        """Return the id of the key of the operation that the job calls, or an empty text before its
        first run."""
        keys = IdempotencyKey.objects.using(job._state.db).filter(
            scope=scope_of(job.operation, job.job_args.get("scope", "")),
            idempotency_key=job.job_args.get("key"),
        )
        pk = keys.values_list("pk", flat=True).first()
        return "" if pk is None else self.key_link(pk)

    @admin.display(description=_("state"))
    def state(self, job: Any) -> str:
        """Return whether the job has failed, is held by its group, is due or is not due yet, and
        the time since or until then; or that the broker has it."""
        if job.failed_at is not None:
            return gettext("failed %(ago)s") % {"ago": ago(job.read_at - job.failed_at)}
        if was_handed_over(job):
            return gettext("sent, but cannot be deleted")
        if job.held:
            return gettext("waits for an earlier job of its group")
        if job.run_at > job.read_at:
            return gettext("due in %(duration)s") % {"duration": duration(job.run_at - job.read_at)}
        waited = duration(job.read_at - job.run_at)
        return gettext("waiting for %(duration)s") % {"duration": waited}

    @admin.display(description=_("key"))
    def key(self, job: StagedJob) -> str:
        """Return the id of the key whose request staged the job, or an empty text if there is no
        such key."""
        return "" if job.idempotency_key_id is None else self.key_link(job.idempotency_key_id)

    def get_object(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Return the job for its page."""
        job: Any = super().get_object(request, *args, **kwargs)
        if job is not None:
            job.with_bodies = may_view_bodies(request)
        return job

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show the job. The page of a failed job has links to the confirmations of the list's
        actions."""
        job: Any = context["original"]
        if job.with_bodies:
            log_looks(request, [job])
        if job.failed_at is not None:
            allowed = [action for action in self.bulk if self.holds(request, action.permission)]
            context["actions"] = [(action, self.question_url(action, job)) for action in allowed]
            context["not_offered"] = self.not_offered(request)
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description=_("arguments"))
    @body
    def arguments(self, job: StagedJob) -> SafeString:
        return preformatted(pretty(job.job_args))

    @admin.display(description=_("last error"))
    def error_line(self, job: StagedJob) -> str:
        """Return the first line of the last error; for a failed job, as a link to the jobs that
        failed with the same error."""
        line = self.last_error_line(job)
        if job.failed_at is None or not line:
            return line
        chosen = {"state": "failed", "error_group": group_of(job.last_error)}
        return filter_link(line, **chosen)

    @admin.display(description=_("queue"))
    def queue_link(self, job: StagedJob) -> str:
        return filter_link(job.queue, queue=job.queue)

    @admin.display(description=_("group"))
    def group_link(self, job: StagedJob) -> str:
        return filter_link(job.group, group=job.group) if job.group else ""

    @admin.display(description=_("last error"))
    def error(self, job: StagedJob) -> str:
        return preformatted(job.last_error)
