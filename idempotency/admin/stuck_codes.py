"""The cause and the cure of each stuck code."""

from dataclasses import dataclass

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a stuck code: its cause, its cure, and the name of the recommended button
    in ``actions.BUTTONS``; an empty name if the reason of the key decides."""

    cause: str | Promise
    cure: str | Promise
    best: str

    @property
    def needs_an_answer(self) -> bool:
        """Return whether another run would stop at the same place, or could repeat work."""
        return self.best == "answer"


#: A part of the explanation of each action that runs a request again.
LAST_CALL = _(
    "If the page of a key shows a last call, that call may be made again with its former key. The"
    " service may have forgotten that key, so check the service first. If the call took effect, do"
    " the missing steps by hand and answer the key."
)

STUCK_CODES = {
    "attempts_exhausted": Explanation(
        _("The completer has used up its attempts. Each run failed."),
        _(
            "If the page shows a last call, check its service first: the service may have"
            " forgotten the key of the call, and would then repeat the work. If the call took"
            " effect, do the missing steps by hand and answer the key. Otherwise correct the cause"
            " of the last error, then complete the key: its attempts are counted from zero again."
        ),
        "complete",
    ),
    "hung": Explanation(
        _(
            "Three runs of the completer hung: each made no progress for the time of two leases."
            " The last error names the place in the code."
        ),
        _(
            "If the page shows a last call, check its service first: the service may have"
            " forgotten the key of the call, and would then repeat the work. If the call took"
            " effect, do the missing steps by hand and answer the key. Otherwise deploy a time"
            " limit for the call at that place, and only then complete the key: without the limit,"
            " the new run would hang too."
        ),
        "complete",
    ),
    "call_in_doubt": Explanation(
        _("A call to a service without idempotency keys was begun, and its result is unknown."),
        _(
            "Check that service. If the call took effect, answer the key with the result. If it did"
            " not, answer the key with an error such as 409, or reject the operation; the caller"
            " may then use a new key. If the page of the key shows a recorded result of the call,"
            " complete the key."
        ),
        "answer",
    ),
    "downstream_key_expired": Explanation(
        _(
            "The downstream service may have forgotten the key of an earlier call. Another call"
            " could repeat the work."
        ),
        _(
            "Check that service. If the call took effect, do the missing steps by hand and answer"
            " the key with the result. If it did not, answer the key with an error such as 409, or"
            " reject the operation; the caller may then use a new key. Do not complete the key: the"
            " new run would stop at the same place."
        ),
        "answer",
    ),
    "view_gave_up": Explanation(
        _("The view or the operation gave up. Its reason is shown."),
        _("Do what the reason says. Then complete the key, or answer it."),
        "",
    ),
    "answer_required": Explanation(
        _("The view or the operation gave up, because another run could repeat work."),
        _("Do what the reason says. Then answer the key."),
        "answer",
    ),
    "transaction_ended": Explanation(
        _(
            "The view or the operation ended the transaction of a phase with COMMIT or ROLLBACK."
            " The writes of that phase may be committed."
        ),
        _("Check these writes, then answer the key. Another run could repeat them."),
        "answer",
    ),
    "retention_passed": Explanation(
        _(
            "The request or the operation was not finished within RETENTION_HOURS. A view may have"
            " an on_abandon function for this case; here there is none."
        ),
        _(
            "The caller has probably stopped its retries. If the page shows a last call, check its"
            " service first: the service may have forgotten the key of the call, and would then"
            " repeat the work. If the call took effect, do the missing steps by hand and answer the"
            " key. If no call took effect and the work is still wanted, complete the key. If the"
            " work is no longer wanted, answer the key, then undo what was done."
        ),
        "complete",
    ),
    "on_abandon": Explanation(
        _(
            "The on_abandon function of the view, which handles overdue requests, began and did"
            " not finish. It may have taken effect at downstream services."
        ),
        _(
            "Check those services, do the missing steps by hand, then answer the key. The key"
            " cannot be completed, because the view would continue from work that was undone."
        ),
        "answer",
    ),
    "unknown_recovery_point": Explanation(
        _(
            "The running code does not declare the recovery point of the key, or does not make a"
            " call that was begun: a deploy renamed or removed it."
        ),
        _(
            "Deploy code that declares the recovery point, and makes the call. The next retry or"
            " the completer then continues."
        ),
        "complete",
    ),
    "operation_missing": Explanation(
        _(
            "The running code does not have the operation with this name: a deploy renamed or"
            " removed it."
        ),
        _(
            "Deploy code that defines the operation under this name, in the module operations.py of"
            " an installed app. The next retry or the completer then continues."
        ),
        "complete",
    ),
    "arguments_changed": Explanation(
        _(
            "The stored arguments do not fit the parameters of the operation: a deploy changed the"
            " parameters."
        ),
        _(
            "Deploy a default for each new parameter, and restore each parameter that was removed."
            " The completer then continues."
        ),
        "complete",
    ),
    "refused_when_rebuilt": Explanation(
        _(
            "The completer ran the stored request several times. Each time the view refused it,"
            " before any work was done. A retry of the client may get another answer."
        ),
        _(
            "A retry of the client runs the request. If the stored request lacks data that a"
            " middleware adds, add the data in the function of the setting PREPARE_REQUEST, deploy,"
            " and complete the key. Otherwise, if the client does not retry, answer the key."
        ),
        "complete",
    ),
    "view_missing": Explanation(
        _("The path of the request no longer leads to a view with @idempotent."),
        _(
            "Either deploy a view that answers this path, and complete the key. Or answer the key,"
            " and only then undo what the request did: until the answer, a late retry could"
            " continue the request."
        ),
        "complete",
    ),
    "user_missing": Explanation(
        _(
            "The sender of the request is deleted, inactive or no longer allowed to send the"
            " request. Or the sender is not a Django user, and PREPARE_REQUEST set neither"
            " request.user nor request.auth."
        ),
        _(
            "The page shows which of these applies. Either correct it, and complete the key. Or"
            " answer the key, and only then undo what the request did: until the answer, a late"
            " retry could continue the request."
        ),
        "complete",
    ),
    "body_not_kept": Explanation(
        _(
            "The completer cannot run the request, because a part of it was not stored: an upload,"
            " a body with store_body=False, or a credential in the query. A part of its work is"
            " done."
        ),
        _(
            "Only a retry of the client can run the request. Do not complete the key: the new run"
            " would stop at the same place. If the client does not retry, answer the key, and only"
            " then undo or finish the work by hand: until the answer, a late retry could continue"
            " the request."
        ),
        "answer",
    ),
}
