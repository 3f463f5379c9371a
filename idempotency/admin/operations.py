"""What the pages show of the key of an operation: its result, and the form that answers it; and the
filter by operation."""

import json
from typing import Any

from django import forms
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from idempotency import interventions
from idempotency._operations.definition import METHOD, registered
from idempotency._operations.results import REJECTED
from idempotency.admin.answering import Preview, PreviewedForm, json_mistake
from idempotency.admin.filters import NEWEST, ChosenFilter, newest, selects_unfinished
from idempotency.admin.reading import pretty
from idempotency.exceptions import Rejected
from idempotency.models import IdempotencyKey


def status_word(key: IdempotencyKey) -> str | None:
    """Return how a finished operation ended, in one word; None for an unfinished one."""
    if key.response_code is None:
        return None
    return gettext("rejected") if key.response_code == REJECTED else gettext("result")


def result_word(key: IdempotencyKey) -> str:
    """Return how a finished operation ended, in a few words, with the code of a refusal."""
    refusal = _refusal(key)
    if refusal is not None:
        return gettext("rejected, %(code)s") % {"code": refusal.code}
    return gettext("result stored") if key.response_code else gettext("without a result")


def result_text(key: IdempotencyKey) -> str:
    """Return the result of a finished operation as indented JSON, or its refusal."""
    if key.response_body is None:
        return ""
    refusal = _refusal(key)
    return _json(_stored(key)) if refusal is None else "\n".join(_lines(refusal))


def call_result(key: IdempotencyKey, result: Any) -> Any:
    """Return the recorded result of an at-most-once call, without what operations add to it."""
    if key.request_method != METHOD or not isinstance(result, dict):
        return result
    return result.get("value", result)


def _stored(key: IdempotencyKey) -> Any:
    return json.loads(bytes(key.response_body or b"null"))


def _refusal(key: IdempotencyKey) -> Rejected | None:
    if key.response_code != REJECTED or key.response_body is None:
        return None
    parts = _stored(key)
    return Rejected(parts["code"], parts["message"], parts["data"])


def _lines(refusal: Rejected) -> list[str]:
    """Return the code and the message of a refusal, and its data as JSON if it has some."""
    told = ", ".join(filter(None, (refusal.code, refusal.message)))
    line = gettext("Rejected: %(refusal)s") % {"refusal": told}
    return [line] if refusal.data is None else [line, _json(refusal.data)]


def _json(value: Any) -> str:
    if isinstance(value, dict | list):
        return pretty(value)
    return json.dumps(value, ensure_ascii=False)


class OperationFilter(ChosenFilter):
    """The operation, among the newest keys. With a filter by an unfinished state, which has an
    index, all keys in that state are searched."""

    title = _("operation")
    parameter_name = "operation"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        self.known = sorted(operation.name for operation in registered())
        return super().lookups(request, model_admin)

    def chosen(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        return rows.filter(request_method=METHOD, request_path=value)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = super().queryset(request, queryset)
        return chosen if not self.value() or selects_unfinished(request) else newest(chosen, NEWEST)


class OperationAnswerFields(PreviewedForm):
    """The fields of the result, or of the refusal, that each retry of the caller gets."""

    kind = forms.ChoiceField(
        choices=[("result", _("a result")), ("rejected", _("a refusal"))],
        initial="result",
        label=_("Answer is"),
        widget=forms.RadioSelect,
    )
    body = forms.CharField(
        label=_("Result, or data of the refusal"),
        widget=forms.Textarea(attrs={"rows": 12, "spellcheck": "false", "class": "idem-body"}),
        required=False,
        help_text=_("JSON. If it is empty, it is null."),
    )
    code = forms.CharField(
        label=_("Code"),
        max_length=100,
        required=False,
        help_text=_("Of a refusal: a short text that callers compare."),
    )
    message = forms.CharField(
        label=_("Message"),
        max_length=1000,
        required=False,
        help_text=_("Of a refusal: the reason in words."),
        widget=forms.TextInput(attrs={"size": 60}),
    )

    def clean(self) -> dict[str, Any]:
        """Build the result or the refusal. Reject invalid JSON, a refusal without a code, and an
        answer that ``interventions.answer`` rejects."""
        cleaned: dict[str, Any] = super().clean() or {}
        if not {"kind", "code", "message", "body"} <= cleaned.keys():
            return cleaned
        is_refusal, code = cleaned["kind"] == "rejected", cleaned["code"]
        if is_refusal and not code:
            self.add_error("code", _("A refusal has a code."))
        elif not is_refusal and (code or cleaned["message"]):
            self.add_error("kind", _("Only a refusal has a code and a message."))
        if cleaned["body"] and (mistake := json_mistake(cleaned["body"])):
            self.add_error("body", mistake)
        if self.errors:
            return cleaned
        value = json.loads(cleaned["body"] or "null")
        answer = Rejected(code, cleaned["message"], value) if is_refusal else value
        cleaned["response"] = answer
        cleaned["told"] = f"the refusal {code}" if is_refusal else "a result"
        key = IdempotencyKey(request_method=METHOD)
        if problem := interventions.answer_problem(answer, key=key):
            self.add_error(None, problem)
        return cleaned

    def shown(self, template: IdempotencyKey | None) -> Preview:
        answer = self.cleaned_data["response"]
        if isinstance(answer, Rejected):
            line, *data = _lines(answer)
            return Preview(line, [], "".join(data), [])
        return Preview(gettext("Result:"), [], _json(answer), [])
