"""Keys: the list, and what is done to many keys at once."""

from typing import Any

from django.contrib import admin
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timesince import timesince

from idempotency._states import due_at
from idempotency.admin import dashboard, key_page
from idempotency.admin.bulk_keys import Acknowledge, HandBack
from idempotency.admin.bulk_pages import BulkAdmin
from idempotency.admin.filters import AgeFilter, RecoveryPointFilter, StateFilter, StuckCodeFilter
from idempotency.admin.key_views import KeyPageAdmin
from idempotency.admin.reading import first_line_of
from idempotency.models import IdempotencyKey
from idempotency.scopes import OWN

_BIGGEST_ID = 2**63 - 1
_LARGE_COLUMNS = ("request_body", "response_body", "response_headers", "history", "seed")


@admin.register(IdempotencyKey)
class IdempotencyKeyAdmin(KeyPageAdmin, BulkAdmin):
    """The list of keys with its actions, and the dashboard."""

    list_display = ("id", "request", "state", "progress", "age", "attempts", "trouble", "sender")
    list_filter = (StateFilter, AgeFilter, StuckCodeFilter, RecoveryPointFilter)
    bulk = (HandBack(), Acknowledge())
    ordering = ("-created_at",)
    search_fields = ("idempotency_key",)
    search_help_text = "The whole idempotency key, the number of its row, a scope such as user:7, or the name of a user."

    def get_urls(self) -> list[URLPattern]:
        """Add the dashboard."""
        dashboard_page = self.admin_site.admin_view(self.dashboard_view)
        return [path("dashboard/", dashboard_page, name="idempotency_dashboard"), *super().get_urls()]

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the keys with their state and the time of the database; in the list without what the list does not show."""
        keys: Any = super().get_queryset(request)
        keys = keys.with_state().annotate(read_at=Now(), due_at=due_at())
        match = request.resolver_match
        if match and (match.url_name or "").endswith("_changelist"):
            keys = keys.defer(*_LARGE_COLUMNS)
        return keys

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[QuerySet[Any], bool]:
        """Find a key as a whole, case-sensitively as it counts, or by the number of its row, its scope, or its user's name."""
        if not search_term:
            return queryset, False
        found = Q(idempotency_key=search_term) | Q(scope__in=[search_term, OWN + search_term])
        if search_term.isdecimal() and len(search_term) <= len(str(_BIGGEST_ID)) and int(search_term) <= _BIGGEST_ID:
            found |= Q(pk=int(search_term))
        users = get_user_model()
        if user := users._default_manager.filter(**{users.USERNAME_FIELD: search_term}).only("pk").first():
            # By scope, which has an index; the column of the user has none.
            found |= Q(scope=f"user:{user.pk}")
        return queryset.filter(found), False

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Look up, once for the page, what the rows need beside their own columns."""
        changelist = super().get_changelist_instance(request)
        keys, points = list(changelist.result_list), key_page.DeclaredPoints()
        users = get_user_model()._default_manager.in_bulk({key.user_id for key in keys if key.user_id is not None})
        for key in keys:
            key.declared, key.sent_by = points.of(key), users.get(key.user_id)
        changelist.result_list = keys
        return changelist

    @admin.display(description="state")
    def state(self, key: Any) -> str:
        return str(key.state)

    @admin.display(description="recovery point")
    def progress(self, key: Any) -> str:
        return key_page.progress(key, key.declared)

    @admin.display(description="age")
    def age(self, key: Any) -> str:
        return timesince(key.created_at, key.read_at, depth=1)

    @admin.display(description="stuck because, last error")
    def trouble(self, key: IdempotencyKey) -> SafeString:
        """Return why it is stuck, if it is; else the first line of its last error, unless it is finished."""
        if key.stuck_code:
            return format_html("<strong>{}</strong><br>{}", key.stuck_code, first_line_of(key.stuck_reason))
        return format_html("{}", "" if key.finished_at else first_line_of(key.last_error))

    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        """Show how much waits, where, and for whom."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = {"title": "Idempotency dashboard", "opts": self.opts, **dashboard.numbers(request, self.admin_site)}
        template = "admin/idempotency/dashboard.html"
        return TemplateResponse(request, template, self.admin_site.each_context(request) | {"media": self.media} | context)
