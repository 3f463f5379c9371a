"""The exceptions. The docstring of each is its default message, and names the cure.

The exceptions of the enqueuer and its backends are in ``idempotency.backends``.
"""

from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from django.db import OperationalError


class StuckCode(StrEnum):
    """The reason why a key is stuck. A subclass of KeyStuck may define its own code."""

    #: The view raised KeyStuck.
    VIEW_GAVE_UP = "view_gave_up"
    #: The view raised KeyStuck with best="answer".
    ANSWER_REQUIRED = "answer_required"
    #: The view ended the transaction of a phase, whose writes may be committed.
    TRANSACTION_ENDED = "transaction_ended"
    #: An at-most-once call has no recorded result.
    CALL_IN_DOUBT = "call_in_doubt"
    #: A derived key is older than its validity at the downstream service.
    DOWNSTREAM_KEY_EXPIRED = "downstream_key_expired"
    #: A deploy removed the recovery point. The completer continues with code that declares it.
    UNKNOWN_RECOVERY_POINT = "unknown_recovery_point"
    #: The rebuilt request is refused each time, before any effect.
    REFUSED_WHEN_REBUILT = "refused_when_rebuilt"
    #: The completer has run the key COMPLETER_MAX_ATTEMPTS times.
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    #: Runs of the completer hung three times.
    HUNG = "hung"
    #: The key was not finished within RETENTION_HOURS, and its view has no ``on_abandon``.
    RETENTION_PASSED = "retention_passed"
    #: The function ``on_abandon`` is running, or was interrupted or failed.
    ON_ABANDON = "on_abandon"
    #: No protected view answers the path of the request.
    VIEW_MISSING = "view_missing"
    #: The sender of the request is gone, inactive, not allowed, or unknown.
    USER_MISSING = "user_missing"
    #: The body of the request, or a credential in its query, was not stored.
    BODY_NOT_KEPT = "body_not_kept"
    #: A deploy removed the operation. The completer continues with code that defines it.
    OPERATION_MISSING = "operation_missing"
    #: The stored arguments do not fit the operation. The completer continues with code that they
    #: fit.
    ARGUMENTS_CHANGED = "arguments_changed"


#: The codes of keys that the completer looks at again, because a deploy may end their cause.
WAITS_FOR_DEPLOY = (
    StuckCode.UNKNOWN_RECOVERY_POINT,
    StuckCode.OPERATION_MISSING,
    StuckCode.ARGUMENTS_CHANGED,
)

#: The codes of requests that the completer cannot run, but a retry of the client may: the retry
#: claims the key, which clears the mark.
OPEN_TO_RETRIES = (
    *WAITS_FOR_DEPLOY,
    StuckCode.REFUSED_WHEN_REBUILT,
    StuckCode.VIEW_MISSING,
    StuckCode.USER_MISSING,
    StuckCode.BODY_NOT_KEPT,
)


class IdempotencyError(Exception):
    """The base class of all errors of this app."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or " ".join((self.__doc__ or "").split()))


class LockLost(IdempotencyError):
    """Another claim took over this key during this run, and this phase was rolled back. No action
    is needed: the decorator returns the other run's response."""


class PhaseDidNotAdvance(IdempotencyError):
    """This phase has no valid end, and was rolled back. End every atomic_phase block with
    set_recovery_point(), set_response() or no_op(). Declare the recovery points in
    @idempotent(recovery_points=[...]), in the order in which the phases commit them."""


class ResponseNotCommitted(IdempotencyError):
    """No phase has stored the response of a phased view, so a retry could not get it. Store it with
    phase.set_response(response) and return key.response(). A response with a status that is never
    stored must be returned outside the phases."""


class NoOpenTransaction(IdempotencyError):
    """A job was staged outside a transaction, so the job and its work could not commit together.
    Call stage_job() in an atomic_phase, in a plain @idempotent view, or in transaction.atomic()."""


class JobNotAllowed(IdempotencyError, ValueError):
    """The name of the job does not refer to a function, task or operation that may run. Correct the
    name, or add the function's module to IDEMPOTENCY["JOB_MODULES"]. A Celery task must be
    registered, and an operation must be in a module operations.py of an app."""


class MessageInProgress(IdempotencyError):
    """Another delivery of this message is being processed. Refuse this delivery, so that it is
    delivered again. A webhook view must respond with 503."""


class InProgress(IdempotencyError):
    """Another run holds this key. Retry after ``retry_after`` seconds, with the same key."""

    def __init__(self, message: str = "", *, retry_after: float = 2) -> None:
        super().__init__(message)
        #: At most the remaining time of the lock of the other run, in seconds.
        self.retry_after = retry_after


class KeyReused(IdempotencyError):
    """This key was used for a different request. Use a new key for each new request."""


class InterventionRequired(IdempotencyError):
    """The key is stuck, and requires manual intervention. Keep the key: after the intervention, a
    retry with it gets the answer. A view raises KeyStuck, not this exception, to give up its own
    key."""

    def __init__(self, message: str = "", *, stuck_code: str = "") -> None:
        super().__init__(message)
        self.stuck_code = stuck_code


#: The errors for the state of a key. If the work of a key raises one, it is about another key.
CONFLICTS = (InProgress, KeyReused, InterventionRequired)


class Unavailable(IdempotencyError, OperationalError):
    """The work cannot run or be confirmed now. Nothing that was committed is repeated. Retry later,
    with the same key. The attribute ``code`` names the cause."""

    def __init__(self, message: str = "", *, code: str = "database_unavailable") -> None:
        super().__init__(message)
        #: "database_unavailable", "time_limit_exceeded", "not_replicated",
        #: "unknown_recovery_point", or "conflict" if each attempt had a serialization failure.
        self.code = code


class NotReplicated(Unavailable):
    """A synchronous standby has not confirmed a commit of this request, so a failover could lose
    that commit (setting CONFIRM_REPLICATED). Retry later: the retry first waits until a standby has
    confirmed the commit. The log and ``idempotency_doctor`` name the cause."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message, code="not_replicated")


class Rejected(IdempotencyError):
    """The operation was refused for good. The refusal is stored, and each repeat raises it again.
    ``Rejected`` cannot be subclassed.

    ``raise Rejected(code, message, data)`` in a function of an operation rolls its transaction
    back; ``return Rejected(...)`` commits the transaction with the refusal. ``data`` is a JSON
    value.
    """

    def __init__(self, code: str, message: str = "", data: Any = None) -> None:
        super().__init__(message or code)
        # The message may be a lazy translation.
        self.code, self.message, self.data = code, f"{message or ''}", data
        self.args = (code, self.message, data)  # Pickle and Celery's result backend read these.

    def __init_subclass__(cls) -> None:
        raise TypeError("Rejected cannot be subclassed: a repeat raises Rejected itself.")

    def __str__(self) -> str:
        return str(self.message or self.code)

    def __repr__(self) -> str:
        return f"Rejected({self.code!r})"  # Reports of errors show it, and data may be personal.


class Unfinished(IdempotencyError):
    """The operation failed after a commit or a call. The completer continues it, so its effect may
    still follow. Call again with the same key for the result. ``__cause__`` is the error."""


class CallNotRecorded(IdempotencyError):
    """A block of key.call(name, at_most_once=True) ended without call.record(), so a retry could
    not know its result. End the block with call.record(result). If the call took no effect, use
    call.retryable(), and do not commit a phase after it: a retry then calls again."""


class KeyStuck(IdempotencyError):
    """This request requires manual intervention. A phased view may raise KeyStuck("why"), or a
    subclass with its own ``code``: the key becomes stuck, and the client gets 409 ``key_stuck``.
    With KeyStuck("why", best="answer") the admin recommends the action *Answer*, and warns
    before another run."""

    #: A short, stable code for filters and alerts.
    code: str = StuckCode.VIEW_GAVE_UP

    def __init__(self, reason: str = "", *, best: Literal["", "answer"] = "") -> None:
        super().__init__(reason or ("No reason was given." if type(self) is KeyStuck else ""))
        if best == "answer" and self.code == StuckCode.VIEW_GAVE_UP:
            self.code = StuckCode.ANSWER_REQUIRED

    @cached_property
    def reason(self) -> str:
        """The reason that the admin shows. A subclass may override it, and need not call
        ``__init__``."""
        return str(self)


class TransactionEnded(KeyStuck):
    """The view has ended the transaction of a phase with COMMIT or ROLLBACK. Its writes may be
    committed, and another run could repeat them. Check them, then answer the key in the admin. In
    the view, use transaction.atomic() instead."""

    code = StuckCode.TRANSACTION_ENDED


class DownstreamKeyExpired(KeyStuck):
    """The key for the downstream service has expired there, so another call could repeat the work.
    Check that service for the result, then answer the key in the admin."""

    code = StuckCode.DOWNSTREAM_KEY_EXPIRED


class CallInDoubt(KeyStuck):
    """A call to a service without idempotency keys was begun, and its result was never recorded.
    Another call could repeat the work. Check that service for the result, then answer the key in
    the admin."""

    code = StuckCode.CALL_IN_DOUBT
