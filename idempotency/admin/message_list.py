"""The lists of at-most-once calls and of inbox messages."""

from contextlib import suppress
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from idempotency._records import HOOKS_FAILED
from idempotency._text import summary
from idempotency.admin.bodies import log_looks, may_view_bodies
from idempotency.admin.filters import (
    MAX_GROUPED,
    NEWEST,
    AgeFilter,
    ChosenFilter,
    newest,
    of_the_newest,
    row_id,
)
from idempotency.admin.reading import ReadOnlyAdmin, admin_url, filter_link, viewable
from idempotency.inbox import STAGED_JOBS
from idempotency.models import DownstreamCall, IdempotencyKey, ProcessedMessage, StagedJob


class CallNameFilter(ChosenFilter):
    """The name of a call, among the newest calls."""

    title = of_the_newest(_("name, of the {count} newest"))
    parameter_name = "name"

    def chosen(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        return newest(rows.filter(name=value), NEWEST, by="pk")


class InDoubtFilter(admin.SimpleListFilter):
    """Calls whose result is unknown, of the oldest MAX_GROUPED unfinished keys."""

    title = _("result")
    parameter_name = "result"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("unknown", _("unknown, of unfinished keys"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.value() != "unknown":
            return queryset
        keys: Any = IdempotencyKey.objects.using(queryset.db)
        unfinished = (
            keys.unfinished().order_by("created_at").values_list("pk", flat=True)[:MAX_GROUPED]
        )
        return queryset.filter(recorded_at__isnull=True, key__in=list(unfinished))


@admin.register(DownstreamCall)
class DownstreamCallAdmin(ReadOnlyAdmin):
    """Calls to services without idempotency keys (``at_most_once=True``)."""

    list_display = ("id", "name_shown", "key_shown", "started_at", "recorded_at", "result")
    list_filter = (InDoubtFilter, CallNameFilter)
    ordering = ("-id",)
    search_fields = ("name",)
    search_help_text = of_the_newest(
        _("The id of the row of a key, or the name of a call among the {count} newest.")
    )

    def get_list_display(self, request: HttpRequest) -> Any:
        """Return the columns; without the permission to view bodies, not the result."""
        shown = may_view_bodies(request)
        columns = super().get_list_display(request)
        return [name for name in columns if name != "result" or shown]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields of the page; without the permission to view bodies, not the result."""
        shown = may_view_bodies(request)
        return [name for name in super().get_fields(request, obj) if name != "result" or shown]

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Return the list. A list with results is a look at the results that are shown."""
        changelist = super().get_changelist_instance(request)
        if may_view_bodies(request):
            log_looks(request, [call for call in changelist.result_list if call.recorded_at])
        return changelist

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show the call."""
        if may_view_bodies(request):
            log_looks(request, [context["original"]])
        return super().render_change_form(request, context, *args, **kwargs)

    def found(self, request: HttpRequest, rows: QuerySet[Any], term: str) -> QuerySet[Any]:
        """Return the calls of the key whose row has this id, through an index, or the newest calls
        with this name."""
        if (pk := row_id(term)) is not None:
            return rows.filter(key=pk)
        return newest(rows.filter(name=term), NEWEST, by="pk")

    @admin.display(description=_("name"))
    def name_shown(self, call: DownstreamCall) -> SafeString:
        return filter_link(call.name, name=call.name)

    @admin.display(description=_("key"))
    def key_shown(self, call: DownstreamCall) -> str:
        return self.key_link(call.key_id)


class SourceFilter(ChosenFilter):
    """The source of a message, among the newest messages."""

    title = of_the_newest(_("source, of the {count} newest"))
    parameter_name = "source"

    def chosen(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        return newest(rows.filter(source=value), NEWEST, by="processed_at")


class ProcessedFilter(AgeFilter):
    """Spans of the time since messages took effect."""

    title = _("processed")
    column = "processed_at"


class HookFilter(admin.SimpleListFilter):
    """Jobs whose on_commit hooks raised."""

    title = _("hooks")
    parameter_name = "hooks"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("failed", _("failed"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(HOOKS_FAILED) if self.value() == "failed" else queryset


@admin.register(ProcessedMessage)
class ProcessedMessageAdmin(ReadOnlyAdmin):
    """Messages, webhooks and jobs that took effect."""

    list_display = (
        "id", "source_shown", "message_id", "job", "key", "processed_at", "hook_error_line",
    )  # fmt: skip
    fields = ("source", "message_id", "job", "key", "processed_at", "hook_error")
    list_filter = (ProcessedFilter, SourceFilter, HookFilter)
    ordering = ("-processed_at",)
    search_fields = ("message_id",)
    search_help_text = _("The whole id of a message, or the id of its row.")

    def found(self, request: HttpRequest, rows: QuerySet[Any], term: str) -> QuerySet[Any]:
        """Return the messages with this id, of any source, at most MAX_GROUPED, and the message
        whose row has this id."""
        messages = ProcessedMessage.objects.using(rows.db).filter(message_id=term)
        found = Q(pk__in=list(messages.values_list("pk", flat=True)[:MAX_GROUPED]))
        return rows.filter(found | Q(pk=row_id(term)))

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Return the list, with the jobs of its messages, which take one query."""
        changelist = super().get_changelist_instance(request)
        changelist.result_list = list(changelist.result_list)
        self._read_jobs(request, changelist.result_list)
        return changelist

    def get_object(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Return the message with its job, for its page."""
        message = super().get_object(request, *args, **kwargs)
        self._read_jobs(request, [message] if message else [])
        return message

    def _read_jobs(self, request: HttpRequest, messages: list[Any]) -> None:
        """Set on each message its job, if there still is one and the person may view it."""
        visible, ids = viewable(self.admin_site, request, StagedJob), {}
        for message in messages if visible is not None else ():
            with suppress(ValueError):  # The id of a Celery task may be any text.
                if message.source == STAGED_JOBS:
                    ids[message.pk] = UUID(message.message_id)
        found = visible.using(messages[0]._state.db).in_bulk(ids.values()) if ids else {}
        for message in messages:
            message.job = job = found.get(ids.get(message.pk))
            message.job_url = job and admin_url(self.admin_site, request, StagedJob, job.pk)

    @admin.display(description=_("staged job"))
    def job(self, message: Any) -> str:
        """Return the job of the message as a link; "" if the job is deleted."""
        if not message.job_url:
            return message.job.label if message.job else ""
        return format_html('<a href="{}">{}</a>', message.job_url, message.job.label)

    @admin.display(description=_("key"))
    def key(self, message: Any) -> str:
        """Return the key whose request staged the job of the message."""
        key = message.job and message.job.idempotency_key_id
        return self.key_link(key) if key else ""

    @admin.display(description=_("hook error"))
    def hook_error_line(self, message: ProcessedMessage) -> str:
        return summary(message.hook_error) if message.hook_error else ""

    @admin.display(description=_("source"))
    def source_shown(self, message: ProcessedMessage) -> SafeString:
        return filter_link(message.source, source=message.source)
