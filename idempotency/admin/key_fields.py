"""The fields on the page of one key."""

import json
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from idempotency import conf
from idempotency._engine.events import trace_id_of
from idempotency._http.stored_request import has_headers
from idempotency._operations.definition import METHOD, work_line
from idempotency.admin import key_page
from idempotency.admin.bodies import body
from idempotency.admin.operations import result_text
from idempotency.admin.reading import ReadOnlyAdmin, encodable, preformatted, pretty
from idempotency.models import IdempotencyKey

_TIMES = (
    "created_at", "last_run_at", "locked_until", "finished_at", "expires_at", "refused_at",
    "stuck_at", "acknowledged_at", "handed_back_at", "next_run_at",
)  # fmt: skip
_SENDER = ("sender", "scope", "key_shown")
#: The parts of the page that differ, each with its title and its fields.
_OF_REQUEST: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        _("Request"),
        ("request", *_SENDER, "remote_addr", "trace", "request_headers_shown", "request_shown"),
    ),
    (_("Response"), ("response_code", "response_headers_shown", "response_shown")),
)
_OF_OPERATION: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (_("Operation"), ("operation", *_SENDER, "trace", "arguments_shown")),
    (_("Result"), ("result_shown",)),
)
_RUNS = (*_TIMES, "attempts", "completer_attempts", "hangs")
_EMPTY = ("", str(preformatted("")))


class KeyFieldsAdmin(ReadOnlyAdmin):
    """The fields of a key. The key has ``with_bodies``: whether the person may view bodies."""

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields that have a value; the other fields are in a last, collapsed part.
        Times have seconds and a time zone."""
        kept, empty = [], []
        parts = _OF_OPERATION if obj.request_method == METHOD else _OF_REQUEST
        for title, names in ((None, ("error_shown",)), *parts, (_("Runs"), _RUNS)):
            fields = [name for name in names if name != "trace" or obj.traceparent]
            if "error_shown" in fields and key_page.is_error_on_top(obj):
                fields.remove("error_shown")
            full = [name for name in fields if self._has_value(name, obj)]
            empty += [name for name in fields if name not in full]
            kept += [(title, {"fields": self._with_times(full)})] if full else []
        rest = {"fields": self._with_times(empty), "classes": ["collapse"]}
        return [*kept, (_("Empty"), rest)] if empty else kept

    def _has_value(self, name: str, key: IdempotencyKey) -> bool:
        value = getattr(self, name)(key) if hasattr(self, name) else getattr(key, name)
        return value is not None and str(value) not in _EMPTY

    @admin.display(description=_("request"))
    def request(self, key: IdempotencyKey) -> str:
        return encodable(work_line(key.request_method, key.request_path))

    @admin.display(description=_("operation"))
    def operation(self, key: IdempotencyKey) -> str:
        return encodable(key.request_path)

    @admin.display(description=_("idempotency key"))
    @body
    def key_shown(self, key: IdempotencyKey) -> SafeString:
        return format_html("{}", encodable(key.idempotency_key))

    @admin.display(description=_("arguments"))
    @body
    def arguments_shown(self, key: IdempotencyKey) -> SafeString:
        """Return the stored arguments of an operation, JSON indented."""
        if key.request_body is None:
            return preformatted(gettext("(not kept)"))
        return preformatted(pretty(key.request_params))

    @admin.display(description=_("result"))
    @body
    def result_shown(self, key: IdempotencyKey) -> SafeString:
        """Return the result of an operation, or its refusal."""
        return preformatted(result_text(key) if key.finished_at else "")

    @admin.display(description=_("user"))
    def sender(self, key: Any) -> str:
        """Return the name and the id of the user; only the id if the user is deleted; empty without
        a user."""
        name = key.sent_by and key.sent_by.get_username()
        return f"{name} ({key.user_id})" if key.sent_by else str(key.user_id or "")

    @admin.display(description=_("trace"))
    def trace(self, key: IdempotencyKey) -> str:
        """Return the id of the trace of the first request, as a link if TRACE_URL is set."""
        trace_id, url = trace_id_of(key.traceparent) or "", conf.get().TRACE_URL
        if not url:
            return trace_id
        return format_html('<a href="{}">{}</a>', url.replace("{trace_id}", trace_id), trace_id)

    @admin.display(description=_("last error"))
    def error_shown(self, key: IdempotencyKey) -> SafeString:
        return preformatted(key.last_error)

    @admin.display(description=_("headers"))
    @body
    def request_headers_shown(self, key: IdempotencyKey) -> SafeString:
        return preformatted(pretty(key.request_headers or None))

    @admin.display(description=_("body"))
    @body
    def request_shown(self, key: IdempotencyKey) -> SafeString:
        if not has_headers(key):  # The request of a plain view.
            return preformatted("")
        if key.request_body is None:
            return preformatted(gettext("(not kept)"))
        return preformatted(pretty(key.request_params))

    @admin.display(description=_("headers"))
    @body
    def response_headers_shown(self, key: IdempotencyKey) -> SafeString:
        return preformatted(pretty(key.response_headers or None))

    @admin.display(description=_("body"))
    @body
    def response_shown(self, key: IdempotencyKey) -> SafeString:
        """Return the stored body, JSON indented."""
        if key.finished_at is None:
            return preformatted("")
        if key.response_body is None:
            return preformatted(gettext("(not kept)"))
        text = bytes(key.response_body).decode("utf-8", "replace")
        try:
            return preformatted(pretty(json.loads(text)))
        except (ValueError, RecursionError):
            return preformatted(text)
