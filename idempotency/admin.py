"""The admin: what became of each request, read-only, on tables with millions of rows.

No page counts a whole table, joins for a row, or loads a body for the list.
"""

import json
from datetime import datetime
from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Model, Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.functional import cached_property
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timesince import timesince

from idempotency import conf
from idempotency.models import ForeignCall, IdempotencyKey, IdempotencyKeyQuerySet, ProcessedMessage, StagedJob

#: A page of the list counts at most so many rows; the further ones are found by a filter or the search.
MAX_COUNT = 5000
MAX_SHOWN_CHARACTERS = 20_000
_BIGGEST_ID = 2**63 - 1
_LARGE_COLUMNS = ("request_body", "request_headers", "response_body", "response_headers", "history", "seed")
_REQUEST_PARTS = ("request_headers_shown", "request_shown")
_TIMES = ("created_at", "last_run_at", "locked_at", "finished_at", "stuck_at", "next_run_at")


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """A paginator that counts up to MAX_COUNT rows: counting a million takes longer than showing fifty."""

    @cached_property
    def count(self) -> int:
        """Return how many rows there are, or MAX_COUNT if there are more."""
        rows = self.object_list
        return rows.order_by()[:MAX_COUNT].count() if isinstance(rows, QuerySet) else len(rows)


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # generic in the stubs alone
    """Rows that the machine writes and a person reads."""

    actions = None
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # they count the whole table, once for each choice of a filter
    sortable_by = ()
    list_per_page = 50

    def has_add_permission(self, request: HttpRequest, *args: Any) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    @admin.display(description="last error")
    def last_error_line(self, row: Any) -> str:
        """Return the first line of the last error."""
        return _first_line(row.last_error)


class StateFilter(admin.SimpleListFilter):
    """The states of a key, by the QuerySet method of the same name."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [
            (name, name.replace("_", " ")) for name in ("stuck", "abandoned", "waiting_for_a_retry", "in_flight", "finished")
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        keys = IdempotencyKeyQuerySet(IdempotencyKey, query=queryset.query, using=queryset.db)
        match self.value():
            case "stuck" | "abandoned" | "in_flight" | "finished" as name:
                chosen: QuerySet[Any] = getattr(keys, name)()
                return chosen
            case "waiting_for_a_retry":
                everybody = IdempotencyKeyQuerySet(IdempotencyKey, using=queryset.db)
                return keys.unlocked().filter(stuck_at__isnull=True).exclude(pk__in=everybody.abandoned().values("pk"))
        return queryset


def state_of(key: IdempotencyKey, now: datetime) -> str:
    """Return the state of ``key`` in the words of the glossary; ``now`` is the time of the database."""
    limits = conf.get()

    def ago(moment: datetime) -> float:
        return (now - moment).total_seconds()

    if key.finished_at is not None:
        return "finished"
    if key.locked_at is not None and ago(key.locked_at) <= limits.LOCK_TIMEOUT_SECONDS:
        return "in flight"
    if key.stuck_at is not None:
        return "stuck"
    due = key.next_run_at is None or key.next_run_at <= now
    old = ago(key.created_at) > limits.COMPLETER_MIN_AGE_SECONDS and ago(key.last_run_at) > limits.COMPLETER_IDLE_SECONDS
    return "abandoned" if due and old else "waiting for a retry"


@admin.register(IdempotencyKey)
class IdempotencyKeyAdmin(ReadOnlyAdmin):
    """The list of keys, the stuck ones by filter, and one key with its request, response and history."""

    list_display = ("id", "request", "state", "recovery_point", "age", "attempts", "last_error_line", "reason", "user_number")
    list_filter = (StateFilter,)
    ordering = ("-created_at",)
    search_fields = ("idempotency_key",)
    search_help_text = "The whole idempotency key, or the number of its row."
    fieldsets = (
        (None, {"fields": ("state", "stuck_code", "stuck_reason", "last_error", "recovery_point", "timeline")}),
        ("Request", {"fields": ("request", "user_number", "scope", "idempotency_key", "remote_addr", *_REQUEST_PARTS)}),
        ("Response", {"fields": ("response_code", "response_headers_shown", "response_shown")}),
        ("Runs", {"fields": (*_TIMES, "attempts", "completer_attempts")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the keys with the time of the database; in the list without what the list does not show."""
        keys: QuerySet[Any] = super().get_queryset(request).annotate(read_at=Now())
        match = request.resolver_match
        if match and (match.url_name or "").endswith("_changelist"):
            keys = keys.defer(*_LARGE_COLUMNS)
        return keys

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[QuerySet[Any], bool]:
        """Find a key as a whole, case-sensitively as it counts, or by the number of its row."""
        if not search_term:
            return queryset, False
        found = Q(idempotency_key=search_term)
        if search_term.isdecimal() and int(search_term) <= _BIGGEST_ID:
            found |= Q(pk=int(search_term))
        return queryset.filter(found), False

    @admin.display(description="request")
    def request(self, key: IdempotencyKey) -> str:
        return f"{key.request_method} {key.request_path}"

    @admin.display(description="state")
    def state(self, key: Any) -> str:
        return state_of(key, key.read_at)

    @admin.display(description="age")
    def age(self, key: Any) -> str:
        return timesince(key.created_at, key.read_at, depth=1)

    @admin.display(description="stuck because")
    def reason(self, key: IdempotencyKey) -> str:
        return f"{key.stuck_code}: {_first_line(key.stuck_reason)}" if key.stuck_code else ""

    @admin.display(description="user")
    def user_number(self, key: IdempotencyKey) -> str:
        """Return the id alone: the user may be gone, and fetching it would cost a query for each row."""
        return "" if key.user_id is None else str(key.user_id)

    @admin.display(description="history")
    def timeline(self, key: IdempotencyKey) -> SafeString:
        """Return what happened to the key, the oldest first."""
        events = ((event["at"], event["at"][:19].replace("T", " "), event["event"], event["detail"]) for event in key.history)
        line = '<li><time datetime="{}">{} UTC</time> <strong>{}</strong> {}</li>'
        return format_html("<ol>{}</ol>", format_html_join("", line, events))

    @admin.display(description="headers")
    def request_headers_shown(self, key: IdempotencyKey) -> SafeString:
        return _preformatted(_pretty(key.request_headers))

    @admin.display(description="body")
    def request_shown(self, key: IdempotencyKey) -> SafeString:
        return _preformatted("(not kept)" if key.request_body is None else _pretty(key.request_params))

    @admin.display(description="headers")
    def response_headers_shown(self, key: IdempotencyKey) -> SafeString:
        return _preformatted(_pretty(key.response_headers))

    @admin.display(description="body")
    def response_shown(self, key: IdempotencyKey) -> SafeString:
        """Return the stored body, JSON indented."""
        if key.finished_at is None:
            return _preformatted("")
        if key.response_body is None:
            return _preformatted("(not kept)")
        text = bytes(key.response_body).decode("utf-8", "replace")
        try:
            return _preformatted(_pretty(json.loads(text)))
        except (ValueError, RecursionError):
            return _preformatted(text)


class JobStateFilter(admin.SimpleListFilter):
    """Jobs that wait for the enqueuer, and those that it gave up on."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("waiting", "waiting"), ("failed", "failed")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        return queryset.filter(failed_at__isnull=chosen == "waiting") if chosen in ("waiting", "failed") else queryset


@admin.register(StagedJob)
class StagedJobAdmin(ReadOnlyAdmin):
    """Jobs that the broker has not got yet."""

    list_display = ("id", "job_name", "queue", "run_at", "attempts", "failed_at", "last_error_line")
    list_filter = (JobStateFilter,)
    ordering = ("-id",)


@admin.register(ForeignCall)
class ForeignCallAdmin(ReadOnlyAdmin):
    """Calls to services that are not idempotent."""

    list_display = ("id", "name", "key_id", "started_at", "result")
    ordering = ("-id",)


@admin.register(ProcessedMessage)
class ProcessedMessageAdmin(ReadOnlyAdmin):
    """Messages that took effect."""

    list_display = ("id", "source", "message_id", "processed_at")
    ordering = ("-id",)


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 100 else f"{line[:99]}…"


def _pretty(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, indent=2, ensure_ascii=False)


def _preformatted(text: str) -> SafeString:
    shown = text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}\n… ({len(text)} characters)"
    # JSON may hold a lone surrogate, which no page can.
    return format_html("<pre>{}</pre>", shown.encode("utf-8", "replace").decode())
