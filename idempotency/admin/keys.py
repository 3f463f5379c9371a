"""Keys: the list with its filters, search and actions, and the dashboard."""

from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR
from django.contrib.auth import get_user_model
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from idempotency._operations.definition import METHOD
from idempotency._states import KeyState, due_at
from idempotency._text import cut, duration
from idempotency.admin import dashboard, filters, recovery_points
from idempotency.admin.bodies import PERMISSION, log_export, may_view_bodies
from idempotency.admin.bulk_answer import Answer
from idempotency.admin.bulk_keys import Acknowledge, HandBack, Unacknowledge
from idempotency.admin.bulk_pages import BulkAdmin
from idempotency.admin.error_groups import group_of
from idempotency.admin.export import csv_of
from idempotency.admin.filters import row_id
from idempotency.admin.form_filters import CreatedFilter, PathFilter
from idempotency.admin.key_views import KeyPageAdmin
from idempotency.admin.next_key import AFTER, CHANGELIST_FILTERS, key_behind
from idempotency.admin.operations import OperationFilter, status_word
from idempotency.admin.reading import ReadOnlyAdmin, first_line_of, may_view
from idempotency.admin.search import HELP, search
from idempotency.exceptions import StuckCode
from idempotency.models import Dashboard, IdempotencyKey, StagedJob

#: The links above the list: the text and the filters of each.
SAVED_VIEWS = (
    (_("Oldest stuck"), {"state": "stuck"}),
    (_("In doubt"), {"state": "stuck", "stuck_code": StuckCode.CALL_IN_DOUBT.value}),
    (_("Mine"), {"mine": "1"}),
)
#: People who may view rows of one of these models may open the dashboard.
DASHBOARD_MODELS = (IdempotencyKey, StagedJob)
#: A longer method and path are cut in the list.
MAX_LINE = 200
_LARGE_COLUMNS = ("request_body", "response_body", "response_headers", "history", "seed")


@admin.register(IdempotencyKey)
class IdempotencyKeyAdmin(KeyPageAdmin, BulkAdmin):
    """The list of keys with its actions, and the dashboard."""

    list_display = (
        "id", "request_line", "state", "status", "progress", "age", "attempts", "trouble", "sender",
    )  # fmt: skip
    # The last two read the keys that the other filters select.
    list_filter = (
        filters.StateFilter, filters.AgeFilter, CreatedFilter, filters.StuckCodeFilter,
        filters.RecoveryPointFilter, PathFilter, OperationFilter, filters.StatusFilter,
        filters.MineFilter, filters.RequestGroupFilter, filters.ErrorGroupFilter,
    )  # fmt: skip
    sortable_by = ("age",)
    bulk = (HandBack(), Answer(), Acknowledge(), Unacknowledge())
    ordering = ("-created_at",)
    search_fields = ("idempotency_key",)
    search_help_text = HELP

    def get_urls(self) -> list[URLPattern]:
        """Add the dashboard and the export."""
        view = self.admin_site.admin_view
        own = [
            path("dashboard/", view(self.dashboard_view), name="idempotency_dashboard"),
            path("next/", view(self.next_view), name="idempotency_next"),
            path("csv/", view(self.csv_view), name="idempotency_keys_csv"),
        ]
        return own + super().get_urls()

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the keys with ``state``, ``read_at`` (the database's time) and ``due_at``. The
        list defers large columns."""
        keys: Any = super().get_queryset(request)
        keys = keys.with_state().annotate(read_at=Now(), due_at=due_at())
        match = request.resolver_match
        if match and (match.url_name or "").endswith("_changelist"):
            keys = keys.defer(*_LARGE_COLUMNS)
        return keys

    def found(self, request: HttpRequest, rows: QuerySet[Any], term: str) -> QuerySet[Any]:
        """Return the keys that ``admin.search`` finds."""
        return search(rows, term, self.admin_site, request)

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        """Return the order of the list: the oldest first for stuck keys, else the newest first."""
        is_stuck = request.GET.get("state") in (KeyState.STUCK, filters.FOR_REVIEW)
        return ("created_at", "pk") if is_stuck else ("-created_at",)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list, with the saved views and the link to the CSV file of the listed keys."""
        csv_url = reverse(f"{self.admin_site.name}:idempotency_keys_csv")
        csv_url = f"{csv_url}?{request.GET.urlencode()}" if may_view_bodies(request) else ""
        views = [(label, f"?{urlencode(query)}") for label, query in SAVED_VIEWS]
        views.append((_("One by one"), f"next/?{request.GET.urlencode() or 'state=stuck'}"))
        return super().changelist_view(
            request, {"saved_views": views, "csv_url": csv_url} | (extra_context or {})
        )

    def csv_view(self, request: HttpRequest) -> HttpResponse:
        """Return a CSV file with the keys that the filters and the search of the query select."""
        if not self.holds(request, PERMISSION):
            return self.refused(request, PERMISSION)
        log_export(request, self.model)
        try:
            return csv_of(admin.ModelAdmin.get_changelist_instance(self, request).queryset)
        except IncorrectLookupParameters:
            return HttpResponseRedirect(self.page_url("changelist"))

    def next_view(self, request: HttpRequest) -> HttpResponse:
        """Redirect to the page of the next key that the filters and the search of the query select:
        the first one, or the one behind the key ``after``."""
        if not self.has_view_permission(request):
            return self.refused(request)
        query = request.GET.copy()
        query.pop(PAGE_VAR, None)
        after = row_id(query.pop(AFTER, [""])[-1]) or 0
        keys_url = f"{self.page_url('changelist')}?{query.urlencode()}"
        request.GET = query  # type: ignore[assignment]
        try:
            keys = admin.ModelAdmin.get_changelist_instance(self, request).queryset
        except IncorrectLookupParameters:
            return HttpResponseRedirect(keys_url)
        if (found := key_behind(keys, after)) is not None:
            filters = urlencode({CHANGELIST_FILTERS: query.urlencode()})
            return HttpResponseRedirect(f"{self.page_url('change', found)}?{filters}")
        self.message_user(request, gettext("There is no further key in this list."))
        return HttpResponseRedirect(keys_url)

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Return the list, whose keys have their declared recovery points and senders. All senders
        take one query."""
        changelist = super().get_changelist_instance(request)
        keys = list(changelist.result_list)
        users = get_user_model()._default_manager.in_bulk(
            {key.user_id for key in keys if key.user_id is not None}
        )
        for key in keys:
            key.declared = recovery_points.declared_points(key)
            key.sent_by = users.get(key.user_id)
        changelist.result_list = keys
        return changelist

    @admin.display(description=_("request"))
    def request_line(self, key: IdempotencyKey) -> str:
        return cut(self.request(key), MAX_LINE)

    @admin.display(description=_("state"))
    def state(self, key: Any) -> str:
        return str(KeyState(key.state).label)

    @admin.display(description=_("recovery point"))
    def progress(self, key: Any) -> str:
        return recovery_points.progress(key, key.declared)

    @admin.display(description=_("status"), empty_value="")
    def status(self, key: IdempotencyKey) -> int | str | None:
        """Return the status of the response; for a finished operation, how it ended."""
        is_operation = key.request_method == METHOD
        return status_word(key) if is_operation else key.response_code

    @admin.display(description=_("age"), ordering="-created_at")
    def age(self, key: Any) -> str:
        return duration(key.read_at - key.created_at)

    @admin.display(description=_("stuck because, last error"))
    def trouble(self, key: Any) -> SafeString:
        """Return the stuck code and the first line of the reason, or else of the last error; empty
        for a finished key."""
        text = "" if key.finished_at else key.stuck_reason or key.last_error
        line = format_html("{}", first_line_of(text))
        if text:
            state = "stuck" if key.state == KeyState.STUCK else "unfinished"
            query = urlencode({"state": state, "error_group": group_of(text)})
            page, title = self.page_url("changelist"), gettext("Keys with the same error")
            line = format_html('<a href="{}?{}" title="{}">{}</a>', page, query, title, line)
        if not key.stuck_code:
            return line
        return format_html("<strong>{}</strong><br>{}", key.stuck_code, line)

    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        """Show the dashboard to people who may view keys or jobs."""
        if not any(may_view(self.admin_site, request, rows) for rows in DASHBOARD_MODELS):
            return self.refused(request)
        title = {"title": gettext("Idempotency dashboard")}
        return self.page(request, "dashboard", title | dashboard.numbers(request, self))


@admin.register(Dashboard)
class DashboardAdmin(ReadOnlyAdmin):
    """The line of the dashboard on the first page of the admin and in its sidebar."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the person may view keys or jobs."""
        return any(may_view(self.admin_site, request, rows) for rows in DASHBOARD_MODELS)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        return HttpResponseRedirect(reverse(f"{self.admin_site.name}:idempotency_dashboard"))
