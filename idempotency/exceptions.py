"""What can go wrong, as a tree. A docstring is the message; it names the cure.

::

    IdempotencyError
    ├── LockLost                 another claim took over this key
    ├── PhaseDidNotAdvance       a phase, or a pass through the loop, moved nothing
    ├── UnknownRecoveryPoint     a recovery point that the view does not declare, or a step backwards
    ├── ResponseNotCommitted     a phased view returned what no phase stored
    ├── ResponseNotStorable      set_response() got a response that may not be stored
    ├── NoOpenTransaction        a job was staged where nothing would commit it
    ├── JobNotAllowed            the name of a job leads to no function that a worker may run
    ├── MessageInProgress        another delivery of this message runs just now
    ├── CallNotRecorded          a foreign_call block made its call and recorded nothing
    └── KeyStuck                 the machine gives up; a person must look
        ├── DownstreamKeyExpired the other system may have forgotten the key: calling again could do the work twice
        └── CallInDoubt          a foreign call was begun, and nobody knows whether it took effect

Those of the enqueuer and its backends stand in ``idempotency.backends``.
"""

from functools import cached_property


class IdempotencyError(Exception):
    """Base of every error that this app raises."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or " ".join((self.__doc__ or "").split()))


class LockLost(IdempotencyError):
    """Another claim took over this key while this run was at work; what this phase wrote was rolled back. Nothing to
    do: the decorator answers with what the other run stored."""


class PhaseDidNotAdvance(IdempotencyError):
    """This phase ended without set_recovery_point(), set_response() or no_op(); what it wrote was rolled back. End every
    atomic_phase block with one of the three."""


class UnknownRecoveryPoint(IdempotencyError):
    """This recovery point is not declared in @idempotent(recovery_points=[...]), or it lies behind the one reached.
    Declare the points in the order in which the phases commit them."""


class ResponseNotCommitted(IdempotencyError):
    """A phased view returned a response that no phase stored: a retry could not get it again. Store it with
    phase.set_response(response) and return key.response()."""


class ResponseNotStorable(IdempotencyError):
    """set_response() got a response with a status that is never stored. Return it from outside the phase instead: the
    key is released, and the retry goes on from the last recovery point."""


class NoOpenTransaction(IdempotencyError):
    """stage_job() was called outside a transaction, so the job could be kept while the work is lost, or the reverse. Call it
    in an atomic_phase, in a plain @idempotent view, or in transaction.atomic()."""


class JobNotAllowed(IdempotencyError, ValueError):
    """The name of a job leads to no function or task that a worker may run. Correct the name, or add the module of the function
    to IDEMPOTENCY["JOB_MODULES"]; a Celery task must be registered."""


class MessageInProgress(IdempotencyError):
    """Another delivery of this message is being processed. Refuse this one, so that it is delivered again: a webhook view
    answers 503."""


class CallNotRecorded(IdempotencyError):
    """A foreign_call block ended without call.record(): a retry could not know that the call was made. End it with
    call.record(result); if the call took no effect, say call.retryable() and end no phase after it, so that a retry calls; if
    another service is called instead, record that."""


class KeyStuck(IdempotencyError):
    """The machine gives up on this request; a person must look. A phased view may raise KeyStuck("why"), or a subclass with a
    ``code`` of its own, to hand its key to a person; the client gets 409 ``key_stuck``."""

    #: Short and stable, for filters and alerts; the message is for people.
    code = "view_gave_up"

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)

    @cached_property
    def reason(self) -> str:
        """What the person is told. A subclass may set its own, and need not call this ``__init__``."""
        return str(self)


class DownstreamKeyExpired(KeyStuck):
    """The key for the other system is past its validity: that system may have forgotten it, so calling again could do the
    work twice. Find out there what happened, then answer the key from the admin."""

    code = "downstream_key_expired"


class CallInDoubt(KeyStuck):
    """A call to a service that is not idempotent was begun, and its result was never recorded: calling again could do the work
    twice. Find out there what happened, then answer the key from the admin."""

    code = "call_in_doubt"
