"""Keys: the list, the page of one, and the buttons."""

import json
from functools import partial
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.auth import get_user_model
from django.db import router
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timesince import timesince

from idempotency._request.atomic_requests import EVERY_ALIAS
from idempotency._states import KeyState, due_at
from idempotency.admin import dashboard, key_page
from idempotency.admin.actions import BUTTONS, TOO_LATE, looked_at, not_offered, noted, offered, username
from idempotency.admin.bulk_keys import Acknowledge, HandBack
from idempotency.admin.bulk_pages import BulkAdmin
from idempotency.admin.export import csv_of
from idempotency.admin.filters import (
    AgeFilter,
    ErrorGroupFilter,
    MineFilter,
    PathFilter,
    RecoveryPointFilter,
    StateFilter,
    StatusFilter,
    StuckCodeFilter,
)
from idempotency.admin.reading import first_line_of, masked, preformatted, pretty, refused
from idempotency.admin.search import HELP, search
from idempotency.admin.stuck_codes import STUCK_CODES
from idempotency.exceptions import StuckCode
from idempotency.models import IdempotencyKey
from idempotency.monitoring.error_groups import group_of

#: The links above the list: their texts, and the filters behind them.
SAVED_VIEWS = (
    ("Oldest stuck", {"state": "stuck"}),
    ("In doubt", {"state": "stuck", "stuck_code": StuckCode.CALL_IN_DOUBT.value}),
    ("Mine", {"mine": "1"}),
)
_LARGE_COLUMNS = ("request_body", "response_body", "response_headers", "history", "seed")
_REQUEST_PARTS = ("request_headers_shown", "request_shown")
_TIMES = (
    *("created_at", "last_run_at", "locked_at", "finished_at", "refused_at", "stuck_at", "acknowledged_at"),
    *("handed_back_at", "next_run_at"),
)


@admin.register(IdempotencyKey)
class IdempotencyKeyAdmin(BulkAdmin):
    """The list of keys, the page of one key, its buttons, and the dashboard."""

    list_display = ("id", "request", "state", "status", "progress", "age", "attempts", "trouble", "sender")
    list_filter = (
        *(StateFilter, AgeFilter, StuckCodeFilter, RecoveryPointFilter, PathFilter, StatusFilter, MineFilter),
        ErrorGroupFilter,  # The last: it reads what the others let through.
    )
    sortable_by = ("age",)
    bulk = (HandBack(), Acknowledge())
    ordering = ("-created_at",)
    search_fields = ("idempotency_key",)
    search_help_text = HELP
    fieldsets = (
        (None, {"fields": ("error_shown",)}),
        ("Request", {"fields": ("request", "sender", "scope", "idempotency_key", "remote_addr", *_REQUEST_PARTS)}),
        ("Response", {"fields": ("response_code", "response_headers_shown", "response_shown")}),
        ("Runs", {"fields": (*_TIMES, "attempts", "completer_attempts")}),
    )

    def get_urls(self) -> list[URLPattern]:
        """Add the dashboard and the buttons; the button of a key is under its own path."""
        view = self.admin_site.admin_view
        own = [
            path("dashboard/", view(self.dashboard_view), name="idempotency_dashboard"),
            path("csv/", view(self.csv_view), name="idempotency_keys_csv"),
            path("<int:pk>/press/<slug:name>/", view(self.press_view), name="idempotency_press"),
        ]
        return own + super().get_urls()

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the keys with their state and the time of the database; in the list without what the list does not show."""
        keys: Any = super().get_queryset(request)
        keys = keys.with_state().annotate(read_at=Now(), due_at=due_at())
        match = request.resolver_match
        if match and (match.url_name or "").endswith("_changelist"):
            keys = keys.defer(*_LARGE_COLUMNS)
        return keys

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[QuerySet[Any], bool]:
        """Find keys by what a person has at hand; see ``search``."""
        return (search(queryset, search_term, self.admin_site, request) if search_term else queryset), False

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        """Return the oldest first for what waits for a person, else the youngest first."""
        return ("created_at", "pk") if request.GET.get("state") == "stuck" else ("-created_at",)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Add the saved views, and the link to the file of what is listed."""
        csv_url = f"{reverse(f'{self.admin_site.name}:idempotency_keys_csv')}?{request.GET.urlencode()}"
        views = [(label, f"?{urlencode(query)}") for label, query in SAVED_VIEWS]
        return super().changelist_view(request, {"saved_views": views, "csv_url": csv_url} | (extra_context or {}))

    def csv_view(self, request: HttpRequest) -> HttpResponse:
        """Return the keys that the filters and the search of the query let through, as a file."""
        if not self.has_view_permission(request):
            return refused(self, request)
        try:
            return csv_of(admin.ModelAdmin.get_changelist_instance(self, request).queryset)
        except IncorrectLookupParameters:
            return HttpResponseRedirect(reverse(f"{self.admin_site.name}:idempotency_idempotencykey_changelist"))

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Look up, once for the page, what the rows need beside their own columns."""
        changelist = super().get_changelist_instance(request)
        keys, points = list(changelist.result_list), key_page.DeclaredPoints()
        users = get_user_model()._default_manager.in_bulk({key.user_id for key in keys if key.user_id is not None})
        for key in keys:
            key.declared, key.sent_by = points.of(key), users.get(key.user_id)
        changelist.result_list = keys
        return changelist

    @admin.display(description="request")
    def request(self, key: IdempotencyKey) -> SafeString:
        return masked(f"{key.request_method} {key.request_path}")

    @admin.display(description="state")
    def state(self, key: Any) -> str:
        return str(key.state)

    @admin.display(description="recovery point")
    def progress(self, key: Any) -> str:
        return key_page.progress(key, key.declared)

    @admin.display(description="status", empty_value="")
    def status(self, key: IdempotencyKey) -> int | None:
        return key.response_code

    @admin.display(description="age", ordering="-created_at")
    def age(self, key: Any) -> str:
        return timesince(key.created_at, key.read_at, depth=1)

    @admin.display(description="stuck because, last error")
    def trouble(self, key: Any) -> SafeString:
        """Return why it is stuck, if it is; else the first line of its last error, unless it is finished."""
        text = "" if key.finished_at else key.stuck_reason or key.last_error
        line = format_html("{}", first_line_of(text))
        if text:
            page = reverse(f"{self.admin_site.name}:idempotency_idempotencykey_changelist")
            query = urlencode(
                {"state": "stuck" if key.state == KeyState.STUCK else "unfinished", "error_group": group_of(text)}
            )
            line = format_html('<a href="{}?{}" title="Keys with the same error">{}</a>', page, query, line)
        return format_html("<strong>{}</strong><br>{}", key.stuck_code, line) if key.stuck_code else line

    @admin.display(description="user")
    def sender(self, key: Any) -> str:
        """Return the id, and the name of a user who is still there."""
        return f"{key.sent_by.get_username()} ({key.user_id})" if key.sent_by else str(key.user_id or "")

    @admin.display(description="last error")
    def error_shown(self, key: IdempotencyKey) -> SafeString:
        return preformatted(key.last_error)

    @admin.display(description="headers")
    def request_headers_shown(self, key: IdempotencyKey) -> SafeString:
        return preformatted(pretty(key.request_headers))

    @admin.display(description="body")
    def request_shown(self, key: IdempotencyKey) -> SafeString:
        return preformatted("(not kept)" if key.request_body is None else pretty(key.request_params))

    @admin.display(description="headers")
    def response_headers_shown(self, key: IdempotencyKey) -> SafeString:
        return preformatted(pretty(key.response_headers))

    @admin.display(description="body")
    def response_shown(self, key: IdempotencyKey) -> SafeString:
        """Return the stored body, JSON indented."""
        if key.finished_at is None:
            return preformatted("")
        if key.response_body is None:
            return preformatted("(not kept)")
        text = bytes(key.response_body).decode("utf-8", "replace")
        try:
            return preformatted(pretty(json.loads(text)))
        except (ValueError, RecursionError):
            return preformatted(text)

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> HttpResponse:
        """Show where the key stands, what happened, what comes next, and what the person may do about it."""
        key = context["original"]
        context |= {
            "state": key.state,
            "line": key_page.line(key, key.declared),
            "events": key_page.history_of(key),
            "last_call": key_page.last_call(key, key.read_at),
            "next_step": key_page.next_step(key, has_view=key.declared is not None),
            "stuck_code": STUCK_CODES.get(key.stuck_code),
            "buttons": offered(key, partial(self.holds, request)),
            "not_offered": not_offered(key, partial(self.holds, request)),
            "looked_at": urlencode(looked_at(key, self._alias(key))),  # before the calls below are read, which may be newer
            **key_page.belongings(key, self.admin_site, request, using=self._alias(key)),
        }
        return super().render_change_form(request, context, *args, **kwargs)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Return the key with what its page needs beside its own columns."""
        key: Any = super().get_object(request, object_id, from_field)
        if key is not None:
            key.declared = key_page.DeclaredPoints().of(key)
            key.sent_by = get_user_model()._default_manager.filter(pk=key.user_id).first() if key.user_id else None
        return key

    def _alias(self, key: IdempotencyKey) -> str:
        return router.db_for_write(IdempotencyKey, instance=key)

    def press_view(self, request: HttpRequest, pk: int, name: str) -> HttpResponse:
        """Ask, then do what a button says, write it into the admin log, and show the key again."""
        button = BUTTONS.get(name)
        if button is None:
            raise Http404
        if not self.holds(request, button.permission):
            return refused(self, request, button.permission)
        key = self.get_object(request, str(pk))
        if key is None:
            raise Http404
        page = reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_change", args=(pk,))
        # As it was on the page with the button, not as it is by now.
        looked = {name: request.GET.get(name) for name in ("seen", "at", "calls")}
        if request.method == "GET" and looked != looked_at(key, self._alias(key)):
            self.message_user(request, TOO_LATE, messages.WARNING)
            return HttpResponseRedirect(page)
        form = button.form(request.POST or None, initial=looked)
        if request.method == "POST" and form.is_valid():
            level, text, logged = button.press(key, form.cleaned_data, username(request), self._alias(key))
            if logged:
                self.log_change(request, key, noted(logged, form.cleaned_data["note"]))
            self.message_user(request, text, level)
            return HttpResponseRedirect(page)
        context = {"title": button.label, "opts": self.opts, "key": key, "button": button, "form": form, "page": page}
        context["last_call"] = key_page.last_call(key, key.read_at)
        template = "admin/idempotency/idempotencykey/press.html"
        return TemplateResponse(request, template, self.admin_site.each_context(request) | {"media": self.media} | context)

    # A run of a view must not happen inside a transaction, and what was done is not to be undone by a later error of the page.
    press_view._non_atomic_requests = EVERY_ALIAS  # type: ignore[attr-defined]

    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        """Show how much waits, where, and for whom."""
        if not self.has_view_permission(request):
            return refused(self, request)
        context = {"title": "Idempotency dashboard", "opts": self.opts, **dashboard.numbers(request, self.admin_site)}
        template = "admin/idempotency/dashboard.html"
        return TemplateResponse(request, template, self.admin_site.each_context(request) | {"media": self.media} | context)
