"""The answer to a key: the form fields, their checks, the preview, and a template from the response
of an earlier key."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from django import forms
from django.db.models import QuerySet
from django.http import HttpResponse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from idempotency import conf, interventions
from idempotency._bulk_answers import response_of
from idempotency._http import responses
from idempotency._http.routes import options_for
from idempotency._operations.definition import METHOD
from idempotency.admin.reading import MAX_SHOWN_CHARACTERS, pretty
from idempotency.models import IdempotencyKey

#: The number of newest keys that are searched for a template.
MAX_SEARCHED = 1000
#: The fields of an answer, in the forms for requests and for operations.
_NAMES = ("kind", "status", "body", "code", "message")
_STATUS_HELP = _(
    "A 2xx if the work was done. If it was not: 409 or 410, or 422 if the request itself is at"
    " fault."
)


@dataclass(frozen=True, slots=True)
class Preview:
    """The response that each retry will get, and notes about details that are easy to miss."""

    status: str
    headers: list[tuple[str, str]]
    body: str
    notes: list[str]


class ConfirmationForm(forms.Form):
    """The form of a confirmation, with the note of the person below its other fields."""

    note = forms.CharField(
        label=_("Note"),
        max_length=150,
        required=False,
        help_text=_("For the history: what you found, or the number of a ticket."),
        widget=forms.TextInput(attrs={"size": 60}),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["note"] = self.fields.pop("note")

    def asks_again(self) -> bool:
        """Return whether the person must still confirm the data."""
        return False

    def answer(self) -> dict[str, Any] | None:
        """Return the fields of the answer, which bulk work stores; None for another action."""
        return None


class PreviewedForm(ConfirmationForm):
    """A form whose answer the person confirms in a preview before it is stored. A subclass cleans
    it to ``response``, and to ``told``, its text for the admin log."""

    def asks_again(self) -> bool:
        """Return whether the person has not confirmed a preview of exactly this answer."""
        return self.data.get("step") != "store" or self.data.get("previewed") != self.digest()

    def is_previewed(self) -> bool:
        """Return whether the form was sent and is valid, and the person does not want to edit the
        answer."""
        return self.is_valid() and self.data.get("step") != "edit"

    def shown(self, template: IdempotencyKey | None) -> Preview:
        """Return the preview of a valid form."""
        raise NotImplementedError

    def answer(self) -> dict[str, Any] | None:
        return {name: self.cleaned_data[name] for name in _NAMES if name in self.cleaned_data}

    def digest(self) -> str:
        """Return a hash of the answer. It ensures that only a previewed answer is stored."""
        return hashlib.sha256(json.dumps(self.answer()).encode()).hexdigest()


class AnswerFields(PreviewedForm):
    """The fields of the response that each retry of the client gets."""

    status = forms.IntegerField(
        label=_("Status"),
        initial=409,
        help_text=_STATUS_HELP,
        widget=forms.NumberInput(attrs={"min": 100, "max": 599}),
    )
    kind = forms.ChoiceField(
        choices=[("json", "JSON"), ("text", _("plain text"))],
        initial="json",
        label=_("Body is"),
        widget=forms.RadioSelect,
    )
    body = forms.CharField(
        label=_("Body"),
        widget=forms.Textarea(attrs={"rows": 12, "spellcheck": "false", "class": "idem-body"}),
        required=False,
        strip=False,
        help_text=_("May be empty. JSON is checked before it is stored."),
    )

    def clean_body(self) -> str:
        """Return the body with LF as line ends, because a browser sends CRLF."""
        body: str = self.cleaned_data["body"]
        return body.replace("\r\n", "\n")

    def clean(self) -> dict[str, Any]:
        """Build the response. Reject a status that is out of range, invalid JSON, and a response
        that ``interventions.answer`` rejects."""
        cleaned: dict[str, Any] = super().clean() or {}
        if not {"status", "kind", "body"} <= cleaned.keys():
            return cleaned
        if not 100 <= cleaned["status"] <= 599:
            self.add_error("status", _("A status is a number from 100 to 599."))
            return cleaned
        body = cleaned["body"]
        if body and cleaned["kind"] == "json" and (mistake := json_mistake(body)):
            self.add_error(
                "body",
                gettext("%(mistake)s Correct it, or choose plain text.") % {"mistake": mistake},
            )
            return cleaned
        cleaned["response"] = response = response_of(cleaned["status"], cleaned["kind"], body)
        cleaned["told"] = f"status {cleaned['status']}"
        if problem := interventions.answer_problem(response):
            self.add_error(None, problem)
        return cleaned

    def shown(self, template: IdempotencyKey | None) -> Preview:
        return _preview(self.cleaned_data["response"], self.cleaned_data["kind"], template)


def json_mistake(text: str) -> str:
    """Return why ``text`` is not JSON, with the line and column if they are known; an empty string
    for valid JSON."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        place = {"error": error.msg, "line": error.lineno, "column": error.colno}
        return gettext("This is not JSON: %(error)s, in line %(line)s, column %(column)s.") % place
    except ValueError as error:
        return gettext("This is not JSON: %(error)s.") % {"error": error}
    except RecursionError:
        return gettext("This is nested too deeply.")
    return ""


def _no_constant(name: str) -> None:
    raise ValueError(gettext("%(name)s is not a value of JSON") % {"name": name})


def _preview(response: HttpResponse, kind: str, template: IdempotencyKey | None) -> Preview:
    stored = responses.stored_parts(response)
    parts = {
        "response_code": stored.code,
        "response_headers": stored.headers,
        "response_body": stored.body,
    }
    replay = responses.stored_response(IdempotencyKey(**parts))
    replay[conf.get().REPLAYED_HEADER] = "true"
    text, notes = response.content.decode(), []
    if not text:
        notes.append(gettext("The body is empty."))
    elif kind == "text" and not json_mistake(text):
        notes.append(gettext("The body is valid JSON, and is sent as plain text."))
    if template is not None and text and _same(text, bytes(template.response_body or b"").decode()):
        note = gettext(
            "The body is that of key #%(key)s, unchanged. Are its values right for this request?"
        )
        notes.append(note % {"key": template.pk})
    return Preview(f"{stored.code} {replay.reason_phrase}", list(replay.items()), text, notes)


def _same(one: str, other: str) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return one == other


def template_for(key: IdempotencyKey, keys: QuerySet[Any]) -> IdempotencyKey | None:
    """Return the newest of ``keys`` with the method and path of ``key`` and a stored 2xx, among the
    newest MAX_SEARCHED keys of the database.

    Return None if there is no such key, or if the form cannot hold its response. Return None also
    if the path has no protected view, or if the view stores no body, because a response may quote
    it.
    """
    options = None if key.request_method == METHOD else options_for(key)
    if options is None or not options.store_body:
        return None
    path = key.request_path.partition("?")[0]
    newest_first = IdempotencyKey.objects.using(keys.db).order_by("-created_at")
    alike = keys.filter(
        pk__in=newest_first.values("pk")[:MAX_SEARCHED],
        request_method=key.request_method,
        response_code__range=(200, 299),
    )
    found = alike.filter(request_path=path) | alike.filter(request_path__startswith=f"{path}?")
    columns = ("response_code", "response_headers", "response_body")
    template = found.only(*columns).order_by("-created_at").first()
    return template if template is not None and filled_in(template) else None


def filled_in(template: IdempotencyKey) -> dict[str, Any]:
    """Return the initial values that repeat the response of ``template``; empty if the form cannot
    hold this response."""
    kind = {"application/json": "json", "text/plain": "text"}.get(_content_type(template))
    body = bytes(template.response_body or b"")
    if kind is None or template.response_body is None or len(body) > MAX_SHOWN_CHARACTERS:
        return {}
    try:
        text = body.decode()
        return {
            "status": template.response_code,
            "kind": kind,
            "body": pretty(json.loads(text)) if kind == "json" else text,
        }
    except (ValueError, RecursionError):
        return {}


def _content_type(key: IdempotencyKey) -> str:
    headers = key.response_headers or {}
    return str(headers.get("Content-Type", "")).partition(";")[0].strip().lower()
