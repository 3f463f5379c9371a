"""The buttons of a key: the effect, the permission and the condition of each.

The UPDATE behind a button checks the state of the key again, because the key may change after the
page is shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest
from django.utils.crypto import salted_hmac
from django.utils.functional import Promise
from django.utils.text import format_lazy
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from idempotency import interventions
from idempotency._engine.outer_transactions import in_outer_transaction
from idempotency._operations.definition import METHOD
from idempotency._states import KeyState
from idempotency.admin.answering import AnswerFields, ConfirmationForm
from idempotency.admin.operations import OperationAnswerFields
from idempotency.admin.stuck_codes import LAST_CALL
from idempotency.exceptions import NotReplicated, StuckCode
from idempotency.models import IdempotencyKey

#: The level and the text of the message for the person, and the entry of the admin log in English,
#: "" for no entry.
Result = tuple[int, str | Promise, str]
_HANDED_BACK = "Handed back to the completer."

TOO_LATE = _(
    "Nothing was done: the key has changed since you loaded the page. This page shows its present"
    " state."
)


class PressForm(ConfirmationForm):
    """The data that every button sends: the digest of the key that the page showed, and a note."""

    seen = forms.CharField(widget=forms.HiddenInput)


class AnswerForm(AnswerFields, PressForm):
    """The form of the button "Answer": the response that each retry of the client gets."""


class OperationAnswerForm(OperationAnswerFields, PressForm):
    """The form of the button "Answer" for an operation: its result, or its refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """An intervention that the admin offers as a button."""

    label: str | Promise
    permission: str
    explanation: str | Promise
    possible: Callable[[Any], bool]
    #: The intervention; its arguments are the key, those that each intervention takes, and the data
    #: of the form. None: the key has changed, and nothing was done.
    press: Callable[[IdempotencyKey, dict[str, Any], dict[str, Any]], Result | None]
    form: type[PressForm] = PressForm
    #: Whether the button ends something that cannot be brought back.
    is_destructive: bool = False
    #: The form for the key of an operation, if it is another one.
    operation_form: type[PressForm] | None = None

    def form_for(self, key: IdempotencyKey) -> type[PressForm]:
        """Return the form for a key."""
        is_operation = key.request_method == METHOD
        return (self.operation_form if is_operation else None) or self.form


def _complete(key: IdempotencyKey, seen: dict[str, Any], sent: dict[str, Any]) -> Result | None:
    if in_outer_transaction(seen["using"]):
        text = _(
            "The key was handed back to the completer: it cannot run here, in a transaction of a"
            " middleware."
        )
        handed_back = interventions.hand_back(key.pk, **seen)
        return (messages.WARNING, text, _HANDED_BACK) if handed_back else None
    match interventions.complete_now(key.pk, **seen):
        case None:
            return None
        case "finished":
            text = _("It was completed: its response or result is stored.")
            return messages.SUCCESS, text, "Completed."
        case "stuck":
            text = _("It was run, and is stuck again: see the reason.")
            return messages.ERROR, text, "Run; it is stuck again."
        case "failed":
            text = _("It is not finished: see its last error. The completer tries again.")
            return messages.ERROR, text, "Not finished."
    text = _("The key was handed back, and another process is running it now.")
    return messages.WARNING, text, _HANDED_BACK


def _release(key: IdempotencyKey, seen: dict[str, Any], sent: dict[str, Any]) -> Result | None:
    text = _("The lock is released: the run that held it can commit nothing any more.")
    released = interventions.release_lock(key.pk, **seen)
    return (messages.SUCCESS, text, "Released the lock.") if released else None


def _answer(key: IdempotencyKey, seen: dict[str, Any], sent: dict[str, Any]) -> Result | None:
    logged, text = f"Answered with {sent['told']}.", gettext("Answered. Each retry gets this.")
    if key.request_method != METHOD:
        text = gettext(
            "Answered with status %(status)s. Each retry of the client gets this response."
        ) % {"status": sent["status"]}
    try:
        answered = interventions.answer(
            key.pk, response=sent["response"], calls=sent["calls"], **seen
        )
    except NotReplicated:
        text = gettext(
            "The answer is stored, but no standby has confirmed it. Until one does, retries are"
            " refused."
        )
        return messages.WARNING, text, f"{logged[:-1]}, not confirmed by a standby."
    return (messages.SUCCESS, text, logged) if answered else None


def _acknowledge(key: IdempotencyKey, seen: dict[str, Any], sent: dict[str, Any]) -> Result | None:
    text = _(
        "The key is off the list of stuck keys. It is still not finished, and it is not deleted."
    )
    acknowledged = interventions.acknowledge(key.pk, **seen)
    return (messages.SUCCESS, text, "Acknowledged.") if acknowledged else None


def _unacknowledge(
    key: IdempotencyKey, seen: dict[str, Any], sent: dict[str, Any]
) -> Result | None:
    text = _("The key is on the list of stuck keys again.")
    undone = interventions.unacknowledge(key.pk, **seen)
    return (messages.SUCCESS, text, "Unacknowledged.") if undone else None


BUTTONS = {
    "complete": Button(
        label=_("Complete now"),
        permission="complete_idempotencykey",
        explanation=format_lazy(
            "{} {}",
            _(
                "This process runs the view or the operation now, from the recovery point of the"
                " key. A view runs as the user who sent the request. Completed work is not"
                " repeated. If the run fails, the completer retries it, and its attempts are"
                " counted from zero again."
            ),
            LAST_CALL,
        ),
        possible=lambda key: (
            key.state not in (KeyState.IN_FLIGHT, KeyState.REFUSED, KeyState.FINISHED)
            and key.stuck_code != StuckCode.ON_ABANDON
        ),
        press=_complete,
    ),
    "answer": Button(
        label=_("Answer"),
        permission="answer_idempotencykey",
        explanation=_(
            "The key is then finished, and each retry gets the answer that you write here. Nothing"
            " is undone: if you answer with an error, then undo the work that was begun, here and"
            " at downstream services. Do this after the answer, because until then a retry may"
            " continue the work."
        ),
        possible=lambda key: key.state not in (KeyState.IN_FLIGHT, KeyState.FINISHED),
        press=_answer,
        form=AnswerForm,
        operation_form=OperationAnswerForm,
    ),
    "acknowledge": Button(
        label=_("Acknowledge"),
        permission="acknowledge_idempotencykey",
        explanation=_(
            "The key leaves the list of stuck keys. Nothing else changes: it is not finished, a"
            " retry is treated as before, and the key is kept while it is stuck."
        ),
        possible=lambda key: key.state == KeyState.STUCK,
        press=_acknowledge,
    ),
    "unacknowledge": Button(
        label=_("Undo acknowledge"),
        permission="acknowledge_idempotencykey",
        explanation=_("The key is on the list of stuck keys again. Nothing else changes."),
        possible=lambda key: key.state == KeyState.ACKNOWLEDGED,
        press=_unacknowledge,
    ),
    "release": Button(
        label=_("Release the lock"),
        permission="release_idempotencykey",
        explanation=_(
            "For a run that is known to be dead, or to hang. The run can commit nothing any more."
            " The next retry, or the completer, continues from the recovery point. If the run is"
            " calling a downstream service, that call is not stopped."
        ),
        possible=lambda key: key.state == KeyState.IN_FLIGHT,
        press=_release,
        is_destructive=True,
    ),
}


def fence_of(key: IdempotencyKey, using: str) -> dict[str, Any]:
    """Return the arguments of an intervention that make it change nothing if the key has changed:
    the claim token, the recovery point and the calls."""
    calls = interventions.calls_of(key.pk, using=using)
    return {"seen": key.claim_token, "at": key.recovery_point, "calls": calls}


def digest_of(fence: dict[str, Any]) -> str:
    """Return a keyed digest of the result of ``fence_of``, for URLs: access logs contain a URL, so
    it must not contain the claim token."""
    text = "\n".join(str(value) for value in fence.values())
    return salted_hmac(f"{__name__}.digest_of", text, algorithm="sha256").hexdigest()


def looked_at(key: IdempotencyKey, using: str) -> dict[str, str]:
    """Return the query of the buttons' links: a digest of the data that must not have changed when
    a button is pressed."""
    return {"seen": digest_of(fence_of(key, using))}


def offered(key: IdempotencyKey, may: Callable[[str], bool]) -> dict[str, Button]:
    """Return the buttons that are possible in the state of the key and that the person may
    press."""
    return {
        name: button
        for name, button in BUTTONS.items()
        if button.possible(key) and may(button.permission)
    }


def username(request: HttpRequest) -> str:
    """Return the name of the person for the history, at most 100 characters."""
    return request.user.get_username()[:100]


def noted(logged: str, note: str) -> str:
    """Return the text of an action for the admin log, in English, with the note of the person."""
    return f"{logged} {note}" if note else logged
