"""The action that answers many keys: its forms, and the preview of the answers."""

from typing import Any, NamedTuple

from django.db.models import Exists, OuterRef, Q
from django.utils.translation import gettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from idempotency import conf
from idempotency._bulk_answers import PROJECT, NoAnswer, stored_answer
from idempotency._engine.fence import StoredResponse
from idempotency._operations.definition import METHOD, work_line
from idempotency.admin.answering import AnswerFields, PreviewedForm
from idempotency.admin.bulk_keys import UNLOCKED, KeyAction
from idempotency.admin.bulk_pages import BulkForm
from idempotency.admin.operations import OperationAnswerFields, result_text
from idempotency.admin.reading import encodable
from idempotency.models import DownstreamCall, IdempotencyKey


class _BulkAnswerForm(PreviewedForm, BulkForm):
    """The answer to many keys. Its texts may contain fields of each key; with the setting
    ANSWER_FOR_KEY, a function of the project may answer instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Offer the function of the project."""
        super().__init__(*args, **kwargs)
        if conf.get().ANSWER_FOR_KEY is not None:
            kind: Any = self.fields["kind"]
            kind.choices = [*kind.choices, (PROJECT, _("what ANSWER_FOR_KEY returns"))]
        self.fields["body"].help_text = _(
            "Fields are replaced by the values of each key: {key.id}, {key.user_id},"
            " {request.NAME} of the stored body, {calls.NAME} of a recorded result. A JSON text"
            " that is one field becomes its value. A key without the field is not answered."
        )

    def clean(self) -> dict[str, Any]:
        """Build and check the answer, unless the project answers."""
        if self.cleaned_data.get("kind") != PROJECT:
            return super().clean() or {}
        self.cleaned_data["told"] = "the answer of the project"
        return self.cleaned_data


class RequestsForm(_BulkAnswerForm, AnswerFields):
    """The response to many requests."""


class OperationsForm(_BulkAnswerForm, OperationAnswerFields):
    """The result, or the refusal, of many operations."""


class Sample(NamedTuple):
    """A key, with the answer that it will get, or with the reason why it gets none."""

    key: IdempotencyKey
    line: str
    answer: str
    reason: str


class Answer(KeyAction):
    """Finish unfinished keys with an answer of the person."""

    name, label, permission = "answer", _("Answer"), "answer_idempotencykey"
    explanation = _(
        "These keys are then finished, and each retry gets the answer that you write here. Nothing"
        " is undone: undo the work that was begun, here and at downstream services, after the"
        " answer."
    )
    done = ngettext_lazy("%(count)s key was answered.", "%(count)s keys were answered.", "count")
    logged = "Answered with {told}."
    states = UNLOCKED
    changed = (*KeyAction.changed, "call_begun_at")

    def chosen(self, rows: Any, at: Any) -> Any:
        """Leave out keys of which a call was begun, recorded or reported as without effect since
        ``at`` too."""
        calls = DownstreamCall.objects.filter(key=OuterRef("pk"))
        since = calls.filter(Q(started_at__gt=at) | Q(recorded_at__gt=at))
        return super().chosen(rows, at).filter(~Exists(since)) if at else rows.none()

    def problem(self, rows: Any) -> str:
        """Return why these rows cannot be answered together: an operation has a result, and a
        request a response."""
        eligible = self.eligible(rows)
        calls = eligible.filter(request_method=METHOD)
        if calls.exists() and eligible.exclude(request_method=METHOD).exists():
            return gettext(
                "Answer requests and operations separately: filter by path or operation."
            )
        return ""

    def form_for(self, rows: Any) -> type[BulkForm]:
        is_of_calls = self.eligible(rows).filter(request_method=METHOD).exists()
        return OperationsForm if is_of_calls else RequestsForm

    def samples(self, keys: Any, answer: dict[str, Any]) -> list[Sample]:
        """Return the answers of these keys."""
        return [_sample(key, answer) for key in keys]


def _sample(key: IdempotencyKey, answer: dict[str, Any]) -> Sample:
    line = encodable(work_line(key.request_method, key.request_path))
    try:
        stored = stored_answer(key, answer)
    except NoAnswer as error:
        return Sample(key, line, "", gettext(str(error)))
    return Sample(key, line, encodable(_text(key.request_method, stored)), "")


def _text(method: str, stored: StoredResponse) -> str:
    if method == METHOD:
        parts = {"response_code": stored.code, "response_body": stored.body}
        return result_text(IdempotencyKey(request_method=method, **parts))
    return f"{stored.code}\n{(stored.body or b'').decode()}"
