"""The page of one key, its buttons, and their confirmations."""

from functools import partial
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.auth import get_user_model
from django.db import router
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.urls import URLPattern, path
from django.utils.html import format_html

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
from idempotency.admin.bodies import PERMISSION, log_looks, look, may_view_bodies
from idempotency.admin.history import history_of
from idempotency.admin.key_fields import KeyFieldsAdmin
from idempotency.admin.key_timeline import KeyTimeline
from idempotency.admin.next_key import list_filters, next_url
from idempotency.admin.reading import encodable
from idempotency.models import IdempotencyKey

#: A longer method and path are cut in the title of the page.
MAX_SUBTITLE = 100


class KeyPageAdmin(KeyFieldsAdmin):
    """The page of one key, and its buttons. A subclass must read the keys with ``state``,
    ``read_at`` and ``due_at``."""

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
            "look": look(request, key) if key.with_bodies else "",
            "linked": belongings.belongings(key, self.admin_site, request, using=self._alias(key)),
        }
        return super().render_change_form(request, context, *args, **kwargs)

    def json_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Return the key as JSON, without its secrets."""
        if not self.holds(request, PERMISSION):
            return self.refused(request, PERMISSION)
        key = self.get_object(request, str(pk))
        if key is None:
            raise Http404
        log_looks(request, [key], "the JSON")
        linked = belongings.belongings(key, self.admin_site, request, using=self._alias(key))
        return JsonResponse(copying.as_json(key, linked), json_dumps_params={"indent": 2})

    def get_object(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Return the key with its declared recovery points and the user who sent it, for its
        page."""
        key: Any = super().get_object(request, *args, **kwargs)
        if key is not None:
            key.with_bodies = may_view_bodies(request)
            key.declared = recovery_points.declared_points(key)
            users = get_user_model()._default_manager.filter(pk=key.user_id)
            key.sent_by = users.first() if key.user_id else None
            if key.finished_at is not None:
                key.next_run_at = None  # The completer plans a run before it runs the key.
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
            return self.refused(request, button.permission)
        key = self.get_object(request, str(pk))
        if key is None:
            raise Http404
        chosen = urlencode(list_filters(request))
        page = "?".join(filter(None, (self.page_url("change", pk), chosen)))
        fence = fence_of(key, self._alias(key))
        looked = {"seen": digest_of(fence)}
        # The page with the button sends the digest of the data that it showed.
        if (request.POST or request.GET).get("seen") != looked["seen"]:
            self.message_user(request, TOO_LATE, messages.WARNING)
            return HttpResponseRedirect(page)
        template = self._template(request, key) if name == "answer" and key.with_bodies else None
        filled = answering.filled_in(template) if template and "template" in request.GET else {}
        form = button.form_for(key)(request.POST or None, initial=looked | filled)
        if request.method == "POST" and form.is_valid() and not form.asks_again():
            sent = form.cleaned_data | {"calls": fence.pop("calls")}
            fence |= {"by": username(request), "note": sent["note"], "using": self._alias(key)}
            done = button.press(key, fence, sent)
            level, text, logged = done or (messages.WARNING, TOO_LATE, "")
            if logged:
                self.log_change(request, key, noted(logged, sent["note"]))
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

    def _template(self, request: HttpRequest, key: Any) -> IdempotencyKey | None:
        """Return the key from whose response an answer may start; None also if the rows of ``key``
        say that its work is not done in the same way."""
        found = answering.template_for(key, self.get_queryset(request))
        alias = self._alias(key)
        if found is None or belongings.lack_values(key, found, using=alias):
            return None
        return found

    def _ask(self, request: HttpRequest, key: Any, question: dict[str, Any]) -> HttpResponse:
        """Return the confirmation of a button, with the facts that the person needs for the
        decision."""
        form, preview = question["form"], None
        body = self.arguments_shown if key.request_method == METHOD else self.request_shown
        if key.with_bodies:
            log_looks(request, [key, *([question["template"]] if question["filled"] else ())])
        if isinstance(form, answering.PreviewedForm) and form.is_previewed():
            preview = form.shown(question["template"])
        shown = {
            "key": key,
            "request_line": self.request(key),
            "is_operation": key.request_method == METHOD,
            "request_body": body(key),
            "sender": self.sender(key),
            "preview": preview,
            **key_page.facts(key),
            "linked": belongings.belongings(key, self.admin_site, request, using=self._alias(key)),
        }
        return self.page(request, "idempotencykey/press", shown | question)
