"""Run the work of a key: claim the key, call the work, and settle the key.

A plain run has one transaction (``plain_run``). A phased run claims the key first, continues from its recovery point, and
settles the key at its end.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import connections
from django.db.utils import Error

from idempotency import conf, signals
from idempotency._engine import claims, events, fence, rows
from idempotency._engine.adapter import Outcome, Work
from idempotency._engine.attempts import Attempts, Wait, conflict
from idempotency._engine.claims import ClaimedRequest
from idempotency._engine.claims import Outcome as ClaimOutcome
from idempotency._engine.errors import drop_connection, retryable_failure, serialization_failed
from idempotency._engine.key_run import KeyRun
from idempotency._engine.late_releases import release_later
from idempotency._engine.plain_run import PlainRun, RolledBack
from idempotency._engine.replays import CannotRun, cause_of, of_other_run, refusal_of_stuck, unknown_point, without_running
from idempotency._engine.transactions import (
    refuse_outer_transaction,
)
from idempotency._text import error_text, first_line
from idempotency.exceptions import (
    KeyStuck,
    LockLost,
    NotReplicated,
    ResponseNotCommitted,
    StuckCode,
)
from idempotency.models import IdempotencyKey

logger = logging.getLogger("idempotency")


def run_plain(work: Work, request: ClaimedRequest, *, using: str) -> Any:
    """Claim the key and do the work in one transaction. A rollback also restores the state of the work.

    Raises InProgress, KeyReused, InterventionRequired or Unavailable if the key cannot be claimed.
    """
    run = PlainRun(work, request, using)
    try:
        claim, outcome = run.attempt(work.call)
    except Exception as error:
        answer = error.outcome if isinstance(error, RolledBack) else work.outcome_of(error)
        if answer is None:
            raise
        if work.is_committed:
            raise RuntimeError(
                "A hook of transaction.on_commit() raised this exception after the response was stored."
            ) from error
        if answer.is_raised:
            raise
        if answer.keeps_writes:
            raise RuntimeError(
                f"The writes of the view {work.name} are rolled back, because it raised an exception or marked its transaction "
                f"for rollback. It cannot respond with not_stored(keep_writes=True)."
            ) from error
        if not answer.is_stored:
            return answer.value
        # The writes of work that raised are rolled back, as under ATOMIC_REQUESTS; its outcome is stored.
        claim, outcome = run.attempt(lambda: answer)
    if outcome is None:
        return without_running(claim, work, using=using)
    if outcome.is_stored:
        events.emit_committed(signals.key_claimed, claim.key, work.context)
        events.emit_committed(signals.key_finished, claim.key, work.context)
    return outcome.value


def run_phased(work: Work, request: ClaimedRequest, *, using: str) -> Any:
    """Claim the key and continue the work from its recovery point.

    On return or exception the key is finished, refused, stuck or released, or another run has it.
    Raises InProgress, KeyReused, InterventionRequired or Unavailable if the key cannot be claimed.
    """
    refuse_outer_transaction(using)
    wait = Wait(work.wait_seconds, using=using)
    while True:
        claim = claims.claim_phased(request, work.points[:-1], using=using)
        if claim.outcome is not ClaimOutcome.IN_PROGRESS or not wait.pause():
            break
    if claim.outcome is not ClaimOutcome.CLAIMED:
        return without_running(claim, work, using=using)
    if claim.key.attempts > 1:
        logger.info("key %s is resumed at %s", claim.key.key_hash, claim.key.recovery_point, extra=events.about(claim.key))
    events.emit(signals.key_claimed, claim.key, work.context)
    return run_claimed(KeyRun(claim.key, work))


def run_claimed(run: KeyRun) -> Any:
    """Do the work of a claimed key, and settle the key. On return or exception ``run.end`` is the state of the key."""
    key = run.key
    try:
        outcome = _settled(run)
    except LockLost:
        return _taken_over(run, key)
    finally:
        if run.end is None:
            run.note_end(run.key)
    if outcome.is_raised and outcome.cause is not None:
        raise outcome.cause
    return outcome.value


def _settled(run: KeyRun) -> Outcome:
    try:
        return settle(run, _in_attempts(run))
    except LockLost:
        raise
    except BaseException as error:
        return settle(run, error)


def _in_attempts(run: KeyRun) -> Outcome:
    """Do the work, and again after a serialization failure."""
    work = run.work
    if run.key.recovery_point not in work.points:
        raise CannotRun(StuckCode.UNKNOWN_RECOVERY_POINT, unknown_point(run.key))
    for attempt in Attempts(run):
        with attempt:
            run.begin_attempt()
            with work.current(run):
                try:
                    return work.call()
                except Exception as error:
                    retryable = retryable_failure(error, run.level, using=run.using)
                    if retryable or (outcome := work.outcome_of(error)) is None:
                        raise
                    return outcome
    raise conflict()


def settle(run: KeyRun, end: Outcome | BaseException) -> Outcome:
    """Write what becomes of a key at the end of its run. Return the outcome for the caller, or raise the exception.

    Raises LockLost if another run has taken over the key: the new lock holder continues from the last commit of this run.
    """
    key, using, withheld = run.key, run.using, run.work.withheld
    match end:
        case LockLost():
            raise end
        case KeyStuck() if not run.finished:
            code, reason = cause_of(end)
            _mark_stuck(run, code, reason)
            raise refusal_of_stuck(code) from end
        case NotReplicated():
            # A release may wait without end now. A failover may undo the last commit, even if it finished the key.
            release_later(key, error_text(end), using=using)
            raise end
        case BaseException():
            if not run.finished:
                _release(key, error_text(end, withheld=withheld), using=using)
            raise end
        case _ if run.has_stored(end):
            pass  # The commit of its phase has finished the key.
        case Outcome(cause=Exception() as cause) if end.code >= 500 and not key.untouched:
            if not run.finished:
                _release(key, error_text(cause, withheld=withheld), using=using)
        case _ if run.finished or (end.is_stored and end.code < 500 and not _is_early(run, end)):
            run.calls.refuse_doubt()
            raise _not_committed(end) from end.cause
        # The caller of a rebuilt request is gone, and its repeat might get another early error: that one is not stored.
        case _ if end.is_stored and _is_early(run, end) and not run.work.by_completer:
            _repeated(partial(fence.finish, key, run.work.stored(end.value), using=using, untouched=True))
            run.note_finished(end)
            events.emit(signals.key_finished, run.key, run.work.context)
        case _ if end.is_refusal and not run.work.by_completer:
            _repeated(partial(fence.refuse, key, _described(run, end), using=using))
        case _:
            _release(key, _described(run, end), using=using)
    return end


def _is_early(run: KeyRun, outcome: Outcome) -> bool:
    """Return whether the outcome is an error before any phase or call."""
    return outcome.code >= 400 and run.key.untouched


def _described(run: KeyRun, outcome: Outcome) -> str:
    if outcome.is_raised and outcome.cause is not None:
        return error_text(outcome.cause, withheld=run.work.withheld)
    return f"The view responded with {run.work.described(outcome.value)}"


def _not_committed(outcome: Outcome) -> ResponseNotCommitted:
    what = type(outcome.cause).__name__ if outcome.is_raised else f"A response with status {outcome.code}"
    return ResponseNotCommitted(
        f"{what} is not the response that a phase stored. Store it with phase.set_response(response) and return key.response()."
    )


def _repeated(write: Callable[[], None]) -> None:
    """Send one statement, and again after a serialization failure, which is possible at a high default level."""
    for _ in range(conf.get().SERIALIZATION_RETRIES):
        try:
            return write()
        except Error as error:
            if not serialization_failed(error):
                raise
    write()


def _taken_over(run: KeyRun, key: IdempotencyKey) -> Any:
    """Return the value of the run that has taken over the key."""
    _release(run.key, "This run lost its lock, or the result of its COMMIT.", using=run.using)
    other = rows.read(key.pk, using=run.using)
    if other is not None and (other.scope, other.idempotency_key) != (key.scope, key.idempotency_key):
        other = None  # A failover that lost this key has given its id to another.
    run.note_end(other)
    return of_other_run(other, run.work)


def _release(key: IdempotencyKey, error: str, *, using: str) -> None:
    """Release the key; after a database error retry on a new connection, then in a thread until the lock expires."""
    for attempt in (1, 2):
        try:
            fence.release(key, error, using=using)
            return
        except Error as failure:
            drop_connection(connections[using])
            if attempt == 1 and not isinstance(failure, NotReplicated):
                continue
            logger.warning(
                "key %s could not be released, retrying until its lock expires: %s",
                key.key_hash,
                first_line(failure),
                extra=events.about(key),
            )
            release_later(key, error, using=using)
            return


def _mark_stuck(run: KeyRun, code: str, reason: str) -> None:
    """Mark the key as stuck; retry once on a new connection. Announce it unless its code is unchanged."""
    key, before = run.key, run.key.stuck_code
    with suppress(LockLost):  # If another claim holds the key now, its code is unchanged here.
        try:
            fence.mark_stuck(key, code, reason, using=run.using)
        except Error:
            drop_connection(connections[run.using])
            fence.mark_stuck(key, code, reason, using=run.using)
    if before != key.stuck_code:
        events.announce_stuck(key.pk, run.work.context, using=run.using)
