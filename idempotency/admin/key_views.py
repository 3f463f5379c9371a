"""The page of one key, its buttons, and their confirmations."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.auth import get_user_model
from django.db import router
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from idempotency._http.atomic_requests import EVERY_ALIAS
from idempotency._http.stored_request import has_headers
from idempotency._operations.definition import METHOD, work_line
from idempotency._text import cut
from idempotency.admin import answering, belongings, copying, key_page, recovery_points
from idempotency.admin.actions import (
    BUTTONS,
    TOO_LATE,
    digest_of,
    fence_of,
    looked_at,
    noted,
    offered,
    username,
)
from idempotency.admin.history import history_of
from idempotency.admin.key_timeline import KeyTimeline
from idempotency.admin.next_key import list_filters, next_url
from idempotency.admin.operations import result_text
from idempotency.admin.reading import ReadOnlyAdmin, encodable, preformatted, pretty
from idempotency.admin.refusals import refused
from idempotency.models import IdempotencyKey
from idempotency.templatetags.idempotency_admin import moment

_REQUEST_PARTS = ("request_headers_shown", "request_shown")
_TIMES = (
    "created_at", "last_run_at", "locked_until", "finished_at", "expires_at", "refused_at",
    "stuck_at", "acknowledged_at", "handed_back_at", "next_run_at",
)  # fmt: skip
_REQUEST = ("request", "sender", "scope", "idempotency_key", "remote_addr")
_CALL = ("operation", "sender", "scope", "idempotency_key")
_RUNS = (*(f"{name}_shown" for name in _TIMES), "attempts", "completer_attempts", "hangs")
_LABELS: dict[str, Any] = {field.name: field.verbose_name for field in IdempotencyKey._meta.fields}
_EMPTY = ("", str(preformatted("")))
#: A longer method and path are cut in the title of the page.
MAX_SUBTITLE = 100


class KeyPageAdmin(ReadOnlyAdmin):
    """The page of one key, and its buttons. A subclass must read the keys with ``state``,
    ``read_at`` and ``due_at``."""

    fieldsets: ClassVar[Any] = (
        (None, {"fields": ("error_shown",)}),
        (_("Request"), {"fields": (*_REQUEST, *_REQUEST_PARTS)}),
        (_("Response"), {"fields": ("response_code", "response_headers_shown", "response_shown")}),
        (_("Runs"), {"fields": _RUNS}),
    )
    operation_fieldsets: ClassVar[Any] = (
        (None, {"fields": ("error_shown",)}),
        (_("Operation"), {"fields": (*_CALL, "arguments_shown")}),
        (_("Result"), {"fields": ("result_shown",)}),
        (_("Runs"), {"fields": _RUNS}),
    )

    class Media:
        js = ["idempotency/copy.js", "idempotency/live.js"]

    def get_urls(self) -> list[URLPattern]:
        """Add the URLs of the buttons and of the JSON, below the path of the key."""
        view = self.admin_site.admin_view
        own = [
            path("<int:pk>/press/<slug:name>/", view(self.press_view), name="idempotency_press"),
            path("<int:pk>/json/", view(self.json_view), name="idempotency_json"),
        ]
        return own + super().get_urls()

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields that have a value; the other fields are in a last, collapsed part."""
        if obj is None:
            return self.fieldsets
        kept, empty = [], []
        is_operation = obj.request_method == METHOD
        for title, options in self.operation_fieldsets if is_operation else self.fieldsets:
            fields = list(options["fields"])
            if "error_shown" in fields and key_page.is_error_on_top(obj):
                fields.remove("error_shown")
            full = [name for name in fields if self._has_value(name, obj)]
            empty += [name for name in fields if name not in full]
            kept += [(title, {"fields": full})] if full else []
        return [*kept, (_("Empty"), {"fields": empty, "classes": ["collapse"]})] if empty else kept

    def _has_value(self, name: str, key: IdempotencyKey) -> bool:
        value = getattr(self, name)(key) if hasattr(self, name) else getattr(key, name)
        return value is not None and str(value) not in _EMPTY

    @admin.display(description=_("request"))
    def request(self, key: IdempotencyKey) -> str:
        return encodable(work_line(key.request_method, key.request_path))

    @admin.display(description=_("operation"))
    def operation(self, key: IdempotencyKey) -> str:
        return encodable(key.request_path)

    @admin.display(description=_("arguments"))
    def arguments_shown(self, key: IdempotencyKey) -> SafeString:
        """Return the stored arguments of an operation, JSON indented."""
        if key.request_body is None:
            return preformatted(gettext("(not kept)"))
        return preformatted(pretty(key.request_params))

    @admin.display(description=_("result"))
    def result_shown(self, key: IdempotencyKey) -> SafeString:
        """Return the result of an operation, or its refusal."""
        return preformatted(result_text(key) if key.finished_at else "")

    @admin.display(description=_("user"))
    def sender(self, key: Any) -> str:
        """Return the name and the id of the user; only the id if the user is deleted; empty without
        a user."""
        name = key.sent_by and key.sent_by.get_username()
        return f"{name} ({key.user_id})" if key.sent_by else str(key.user_id or "")

    @admin.display(description=_("last error"))
    def error_shown(self, key: IdempotencyKey) -> SafeString:
        return preformatted(key.last_error)

    @admin.display(description=_("headers"))
    def request_headers_shown(self, key: IdempotencyKey) -> SafeString:
        return preformatted(pretty(key.request_headers or None))

    @admin.display(description=_("body"))
    def request_shown(self, key: IdempotencyKey) -> SafeString:
        if not has_headers(key):  # The request of a plain view.
            return preformatted("")
        if key.request_body is None:
            return preformatted(gettext("(not kept)"))
        return preformatted(pretty(key.request_params))

    @admin.display(description=_("headers"))
    def response_headers_shown(self, key: IdempotencyKey) -> SafeString:
        return preformatted(pretty(key.response_headers or None))

    @admin.display(description=_("body"))
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

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Show the state of the key, its history, its next step, and the buttons that the person
        may press."""
        key = context["original"]
        events, url_path = history_of(key), key.request_path.partition("?")[0]
        # Read before the calls that the page shows: if a call begins in between, the button reports
        # that the key has changed.
        looked = urlencode(looked_at(key, self._alias(key)) | list_filters(request))
        context |= {
            **key_page.facts(key),
            "subtitle": cut(encodable(work_line(key.request_method, url_path)), MAX_SUBTITLE),
            "line": recovery_points.line(key, key.declared),
            "events": events,
            "timeline": KeyTimeline(key, events).drawn(),
            "best": key_page.best_action(key),
            "buttons": offered(key, partial(self.holds, request)),
            "missing": offered(key, lambda permission: not self.holds(request, permission)),
            "looked_at": looked,
            "next_url": next_url(self.admin_site, request, key.pk),
            "is_operation": key.request_method == METHOD,
            "curl": encodable(copying.curl(key, request)) if has_headers(key) else "",
            "linked": belongings.belongings(key, self.admin_site, request, using=self._alias(key)),
        }
        return super().render_change_form(request, context, *args, **kwargs)

    def json_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Return the key as JSON, without its secrets."""
        if not self.has_view_permission(request):
            return refused(self, request)
        key = self.get_object(request, str(pk))
        if key is None:
            raise Http404
        linked = belongings.belongings(key, self.admin_site, request, using=self._alias(key))
        return JsonResponse(copying.as_json(key, linked), json_dumps_params={"indent": 2})

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        """Return the key with its declared recovery points and the user who sent it, for its
        page."""
        key: Any = super().get_object(request, object_id, from_field)
        if key is not None:
            key.declared = recovery_points.DeclaredPoints().of(key)
            users = get_user_model()._default_manager.filter(pk=key.user_id)
            key.sent_by = users.first() if key.user_id else None
        return key

    def _alias(self, key: IdempotencyKey) -> str:
        return router.db_for_write(IdempotencyKey, instance=key)

    def press_view(self, request: HttpRequest, pk: int, name: str) -> HttpResponse:
        """Show the confirmation of a button. If the person confirms, perform the action, write the
        admin log, and redirect to the page of the key."""
        button = BUTTONS.get(name)
        if button is None:
            raise Http404
        if not self.holds(request, button.permission):
            return refused(self, request, button.permission)
        key = self.get_object(request, str(pk))
        if key is None:
            raise Http404
        page = reverse(f"{self.admin_site.name}:idempotency_idempotencykey_change", args=(pk,))
        page = "?".join(filter(None, (page, urlencode(list_filters(request)))))
        fence = fence_of(key, self._alias(key))
        looked = {"seen": digest_of(fence)}
        # The page with the button sends the digest of the data that it showed.
        if (request.POST or request.GET).get("seen") != looked["seen"]:
            self.message_user(request, TOO_LATE, messages.WARNING)
            return HttpResponseRedirect(page)
        template, filled = None, {}
        if name == "answer":
            template = answering.template_for(key, self.get_queryset(request))
            if template is not None and "template" in request.GET:
                filled = answering.filled_in(template)
        form = button.form_for(key)(request.POST or None, initial=looked | filled)
        if request.method == "POST" and form.is_valid() and not form.asks_again():
            by, using = username(request), self._alias(key)
            level, text, logged = button.press(key, form.cleaned_data | fence, by, using)
            if logged:
                self.log_change(request, key, noted(logged, form.cleaned_data["note"]))
            further = next_url(self.admin_site, request, pk) if level == messages.SUCCESS else ""
            told = format_html('<a href="{}">{}</a>: {}', page, key, text) if further else str(text)
            self.message_user(request, told, level)
            return HttpResponseRedirect(further or page)
        question: dict[str, Any] = {"title": button.label, "name": name, "button": button}
        question |= {"looked_at": urlencode(looked | list_filters(request))}
        question |= {"form": form, "page": page, "template": template, "filled": bool(filled)}
        return self._ask(request, key, question)

    # A view must not run inside a transaction, and a later error of the page must not undo the
    # action of the button.
    press_view._non_atomic_requests = EVERY_ALIAS  # type: ignore[attr-defined]

    def _ask(
        self, request: HttpRequest, key: IdempotencyKey, question: dict[str, Any]
    ) -> HttpResponse:
        """Return the confirmation of a button, with the facts that the person needs for the
        decision."""
        form, preview = question["form"], None
        body = self.arguments_shown if key.request_method == METHOD else self.request_shown
        if isinstance(form, answering.PreviewedForm):
            preview = form.preview(question["template"])
        shown = {
            "opts": self.opts,
            "media": self.media,
            "key": key,
            "request_line": self.request(key),
            "is_operation": key.request_method == METHOD,
            "request_body": body(key),
            "sender": self.sender(key),
            "preview": preview,
            **key_page.facts(key),
            "linked": belongings.belongings(key, self.admin_site, request, using=self._alias(key)),
        }
        template = "admin/idempotency/idempotencykey/press.html"
        context = self.admin_site.each_context(request) | shown | question
        return TemplateResponse(request, template, context)


def _shown(name: str) -> Callable[[KeyPageAdmin, IdempotencyKey], str]:
    """Return a method of the page that shows the time in the column ``name`` of a key."""

    @admin.display(description=_LABELS[name])
    def shown(self: KeyPageAdmin, key: IdempotencyKey) -> str:
        # A key that the completer has finished keeps the time of its next run, which was planned in
        # case of failure.
        return moment(None if name == "next_run_at" and key.finished_at else getattr(key, name))

    return shown


for _name in _TIMES:
    setattr(KeyPageAdmin, f"{_name}_shown", _shown(_name))
