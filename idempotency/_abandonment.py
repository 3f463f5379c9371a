"""Settle an overdue key: its ``on_abandon`` runs once, or the key becomes stuck."""

from functools import partial
from logging import ERROR

from django.db import Error

from idempotency import _text, conf, signals
from idempotency._async import FAILURES
from idempotency._boundary import (
    checked_at_end,
    drop_broken_connections,
    drop_unusable_connections,
)
from idempotency._engine import claims, decisions, events, fence, rows
from idempotency._engine.adapter import StoredWork, with_stored_work
from idempotency._engine.calls import Calls
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.errors import accepts_writes
from idempotency._engine.hung import watched_key
from idempotency._engine.replays import cause_of
from idempotency.exceptions import CallInDoubt, KeyStuck, LockLost, StuckCode
from idempotency.models import DownstreamCall

#: The reason while ``on_abandon`` runs; it remains if ``on_abandon`` is interrupted.
BEGUN = (
    "The function on_abandon was begun and did not end. Check its effects on downstream services,"
    " then answer the key."
)

ROLLED_BACK = (
    "The function on_abandon left a transaction open on {}, which was rolled back. Check its other"
    " effects, then answer the key."
)


def settle(pk: int, *, using: str) -> bool | None:
    """Settle an unfinished key past its retention. Several processes may try; one succeeds.

    On return the key is finished with the response of ``on_abandon`` (True) or stuck (False). The
    result is None in these cases: a run, an operator or another process has the key; only a retry
    of its client runs it from now on; PREPARE_REQUEST fails or leaves a transaction open, or a path
    converter fails, because the view may have an ``on_abandon``.

    Before ``on_abandon`` runs, outside any transaction, the key is marked as stuck. If the process
    dies during it, the key stays stuck and ``on_abandon`` does not run again.
    """
    if (key := rows.read(pk, using=using)) is None:
        return None
    return with_stored_work(key, partial(_settle, key, using))


def _settle(key: ClaimedKey, using: str, work: StoredWork) -> bool | None:
    try:
        has_on_abandon = work.require_on_abandon()
    except KeyStuck as stuck:  # Raised by PREPARE_REQUEST.
        return False if decisions.give_up(key.pk, *cause_of(stuck), using=using) else None
    except FAILURES as error:
        if isinstance(error, Error) and not accepts_writes(using):
            raise
        # The next pass tries again. If it fails for days, the completer marks the key after its
        # last attempt.
        text = "key %s is not settled, because its view cannot be found or prepared"
        events.log(ERROR, text, key, exc_info=error)
        return None
    if not has_on_abandon and (work.is_whole or not key.untouched):
        reason = (
            f"The request was not finished within {conf.get().RETENTION_HOURS} hours of its"
            f" creation or its last hand-back. Its last error: {_text.summary(key.last_error)}"
        )
        given_up = decisions.give_up(key.pk, StuckCode.RETENTION_PASSED, reason, using=using)
        return False if given_up else None
    seen, by = key.claim_token, "reaper"  # An operator may have handed the key back meanwhile.
    claimed = claims.claim_by_id(key.pk, delay_seconds=0, seen=seen, by=by, using=using)
    if claimed is None:
        return None
    if not has_on_abandon:
        # Only a retry of the client can run it, and nothing is to be undone.
        fence.leave_to_client(claimed, "Only its client can send the request again.", using=using)
        return None
    try:
        if _run(work, claimed, using):
            events.emit(signals.key_finished, rows.read(key.pk, using=using), None)
            return True
    except LockLost:
        return None  # An operator answered the key or released its lock meanwhile.
    events.announce_stuck(key.pk, None, using=using)
    return False


def _run(work: StoredWork, key: ClaimedKey, using: str) -> bool:
    """Run ``on_abandon`` and store its response; return whether it was stored. Raises LockLost if
    the key was answered meanwhile."""
    if DownstreamCall.objects.using(using).filter(key_id=key.pk, recorded_at__isnull=True).exists():
        # The result of the call decides which effects to undo.
        doubt = CallInDoubt()
        fence.mark_stuck(key, doubt.code, doubt.reason, using=using)
        return False
    fence.mark_stuck(key, StuckCode.ON_ABANDON, BEGUN, using=using)
    key.calls = Calls(key, using=using, stuck_code=StuckCode.ON_ABANDON)
    try:
        try:
            with watched_key(key), checked_at_end():
                abandoned = work.abandon(key)
                rolled_back = drop_broken_connections()
        finally:
            drop_unusable_connections()  # Its session may have ended during a long call.
        if rolled_back:
            failure = ROLLED_BACK.format(", ".join(map(repr, rolled_back)))
        elif abandoned.stored is not None:
            key.calls.require_results()
            fence.finish(key, abandoned.stored, using=using)
            return True
        else:
            failure = abandoned.failure
    except LockLost:
        raise
    except FAILURES as error:
        failure = f"on_abandon failed: {_text.error_text(error, withheld=work.hides_errors)}"
        events.log(ERROR, "on_abandon of key %s failed", key, exc_info=not work.hides_errors)
    fence.mark_stuck(key, StuckCode.ON_ABANDON, failure, using=using)
    return False
