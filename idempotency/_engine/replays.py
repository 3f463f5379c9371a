"""What a caller gets if its run does not do the work: the stored result of a finished key, or a
neutral exception."""

from logging import ERROR
from typing import Any

from django.db import connections

from idempotency import signals
from idempotency._engine import decisions, events, replication
from idempotency._engine.adapter import Work
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.claims import Claim, ClaimOutcome
from idempotency._engine.fence import storable_code
from idempotency._text import error_text
from idempotency.exceptions import (
    OPEN_TO_RETRIES,
    WAITS_FOR_DEPLOY,
    InProgress,
    InterventionRequired,
    KeyReused,
    KeyStuck,
    StuckCode,
    Unavailable,
)

#: The maximum of ``InProgress.retry_after``, in seconds: most runs end long before their lock
#: expires.
LOOK_AGAIN_SECONDS = 2

#: The codes of signals for these exceptions.
_CODES = {InProgress: "key_in_use", KeyReused: "key_reused", InterventionRequired: "key_stuck"}


class CannotRun(KeyStuck):
    """The work of a key cannot be run: the key becomes stuck with this code and reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def cause_of(stuck: KeyStuck) -> tuple[str, str]:
    """Return the stuck code and the reason of a key. Attributes of a project's subclass may raise
    any error. A code whose keys are open to retries is for CannotRun only: each retry would run a
    view that gave up again."""
    try:
        code = storable_code(stuck.code)
    except Exception:
        code = StuckCode.VIEW_GAVE_UP
    try:
        reason = str(stuck.reason)
    except Exception:
        reason = error_text(stuck)
    if code in OPEN_TO_RETRIES and not isinstance(stuck, CannotRun):
        code = StuckCode.VIEW_GAVE_UP
    return code, reason


def unknown_point(key: ClaimedKey) -> str:
    return (
        f"The running code does not declare the recovery point {key.recovery_point!r}. Deploy code"
        " that declares it: the next request or the completer then continues from there. Nothing"
        " is lost."
    )


def replay_or_raise(claim: Claim, work: Work, *, using: str) -> Any:
    """Return the stored value for a key that could not be claimed, or raise why it has none."""
    key = claim.key
    if claim.outcome is ClaimOutcome.FINISHED:
        return replay(key, work)
    error = _error_for(claim)
    events.emit_uncommitted(signals.key_conflict, key, work.request, code=code_of(error))
    if claim.outcome is ClaimOutcome.UNKNOWN_POINT:
        code, reason = StuckCode.UNKNOWN_RECOVERY_POINT, unknown_point(key)
        decisions.give_up(key.pk, code, reason, using=using, request=work.request)
    raise error


def replay_of_other_run(key: ClaimedKey | None, work: Work) -> Any:
    """Return the value that the run that has taken over the key has stored, or raise why it has
    none. For the completer, no replay is announced."""
    if key is not None and key.finished_at is not None:
        return _stored_value(key, work) if work.by_completer else replay(key, work)
    stuck_code = key.stuck_code if key is not None else ""
    error = (
        error_for_stuck(stuck_code) if stuck_code else InProgress(retry_after=LOOK_AGAIN_SECONDS)
    )
    events.emit_uncommitted(signals.key_conflict, key, work.request, code=code_of(error))
    raise error


def replay(key: ClaimedKey, work: Work) -> Any:
    """Return the stored value. Raises NotReplicated if the standbys have not confirmed it."""
    replication.confirm(str(key._state.db))
    value = _stored_value(key, work)
    events.emit_uncommitted(signals.key_replayed, key, work.request)
    return value


def _stored_value(key: ClaimedKey, work: Work) -> Any:
    if key.response_code is None:
        blocks = connections[str(key._state.db)].atomic_blocks
        if any(getattr(block, "key_id", None) == key.pk for block in blocks):
            raise RuntimeError(
                f"The {work.kind} {work.name} was called with its own key inside its own run, which"
                " has no result yet. Find the inner call, for example in a receiver of post_save."
            )
        text = (
            "key %s was committed without a result, probably because the %s %s ended the"
            " transaction with COMMIT. The writes before it are committed. The caller gets an"
            " error, and the key requires manual intervention. Remove the COMMIT from the code."
        )
        events.log(ERROR, text, key, work.kind, work.name)
        raise InterventionRequired
    return work.replayed(key)


def _error_for(claim: Claim) -> InProgress | KeyReused | InterventionRequired | Unavailable:
    match claim.outcome:
        case ClaimOutcome.MISMATCH:
            return KeyReused()
        case ClaimOutcome.IN_PROGRESS:
            return InProgress(retry_after=min(claim.lock_seconds, LOOK_AGAIN_SECONDS))
        case ClaimOutcome.STUCK:
            return error_for_stuck(claim.key.stuck_code)
    return error_for_stuck(StuckCode.UNKNOWN_RECOVERY_POINT)


def error_for_stuck(stuck_code: str) -> InProgress | InterventionRequired | Unavailable:
    """Return what the caller of a stuck key gets."""
    if stuck_code in WAITS_FOR_DEPLOY:
        return Unavailable(code=StuckCode.UNKNOWN_RECOVERY_POINT)
    if stuck_code in OPEN_TO_RETRIES:
        return InProgress(retry_after=LOOK_AGAIN_SECONDS)
    return InterventionRequired(stuck_code=stuck_code)


def code_of(error: Exception) -> str:
    """Return the code of an error for signals and clients."""
    return error.code if isinstance(error, Unavailable) else _CODES[type(error)]
