"""Signals for metrics and logs.

The sender is ``IdempotencyKey``. The arguments are ``key`` and ``request``. The ``request`` is None
for operations, in a run of the completer, in the reaper, and in interventions. The ``key`` is None
in ``key_conflict`` while the row of plain work is not committed, in ``request_answered`` if no key
was claimed, and in ``key_stuck`` and ``key_finished`` if the row was deleted meanwhile.

The signal ``key_conflict`` also has the ``code`` of the error. Each signal is sent after COMMIT
with ``send_robust``: Django logs an exception of a receiver, and it has no other effect. Inside
``atomic()`` of the caller, in any database, the signal waits for the COMMIT of the caller, and is
not sent after a rollback. The signal ``request_answered`` is sent at the end of each protected
request of a client, and of each call of an operation, with its ``outcome``, a ``RequestOutcome``,
and the ``seconds`` that it took.
"""

from enum import StrEnum

from django.dispatch import Signal


class RequestOutcome(StrEnum):
    """The outcome of a protected request of a client, or of a call of an operation."""

    #: The view or ``validate`` returned a response below 500, or raised an exception that the
    #: framework turns into one, such as ``Http404``. Or the operation returned a result, or was
    #: rejected.
    RAN = "ran"
    #: The caller got the stored response, result or refusal.
    REPLAYED = "replayed"
    #: The key was in use, stuck, or used with another request or other arguments, or each attempt
    #: had a serialization failure.
    CONFLICT = "conflict"
    #: No key was claimed, because the scope was missing or the body was incomplete. This differs
    #: from the state ``refused`` of a key: the request that causes that state has the outcome RAN.
    REFUSED = "refused"
    #: Any other exception, or a response of 500 or above.
    FAILED = "failed"


key_claimed = Signal()
key_replayed = Signal()
key_conflict = Signal()
phase_committed = Signal()
key_finished = Signal()
key_stuck = Signal()
request_answered = Signal()
