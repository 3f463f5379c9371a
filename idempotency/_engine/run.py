"""Run the work of a key: claim the key, call the work, and settle the key.

A plain run has one transaction (``plain_run``). A phased run claims the key first, continues from
the recovery point of the key, and settles the key at the end.
"""

from functools import partial
from logging import INFO, WARNING
from operator import attrgetter
from typing import Any

from django.db import connections
from django.db.utils import Error

from idempotency import signals
from idempotency._engine import claims, events, fence, replays, rows
from idempotency._engine.adapter import ClaimedRequest, Outcome, Work
from idempotency._engine.attempts import Attempts, Wait, conflict, repeat
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.claims import ClaimOutcome
from idempotency._engine.errors import drop_connection, retryable_failure
from idempotency._engine.late_releases import release_later
from idempotency._engine.outer_transactions import require_no_transaction, roll_back_unknown
from idempotency._engine.phased_run import PhasedRun
from idempotency._engine.plain_run import PlainRun, RolledBack
from idempotency._text import error_text, first_line
from idempotency.exceptions import (
    CONFLICTS,
    KeyStuck,
    LockLost,
    NotReplicated,
    ResponseNotCommitted,
    StuckCode,
)

_value = attrgetter("scope", "idempotency_key", "seed")


def run_plain(work: Work, request: ClaimedRequest, *, using: str) -> Any:
    """Claim the key and do the work in one transaction. A rollback of the transaction also restores
    the state of the work in memory.

    Raises InProgress, KeyReused, InterventionRequired or Unavailable if the key cannot be claimed.
    """
    run = PlainRun(work, request, using)
    try:
        claim, outcome = run.attempt(work.call)
    except Exception as error:
        instead = error.outcome if isinstance(error, RolledBack) else work.outcome_of(error)
        try:
            # The caller must not take it for the refusal of this key, whose work is done.
            if work.is_committed and (instead is not None or isinstance(error, CONFLICTS)):
                raise RuntimeError(
                    "A hook of transaction.on_commit() raised this exception after the COMMIT."
                ) from error
            if instead is None or instead.is_raised:
                raise
            if instead.keeps_writes:
                raise RuntimeError(
                    f"The writes of the {work.kind} {work.name} are rolled back, because it raised"
                    " an exception or marked its transaction for rollback. It cannot respond with"
                    " not_stored(keep_writes=True)."
                ) from error
            if not instead.is_stored:
                return instead.value
            # The work raised: its writes are rolled back, as under ATOMIC_REQUESTS. Only its
            # outcome is stored.
            claim, outcome = run.attempt(lambda: instead)
        finally:
            # Break the cycle between this frame and the traceback of the cause. The cycle would
            # keep the request in memory.
            del instead
    if outcome is None:
        return replays.replay_or_raise(claim, work, using=using)
    if outcome.is_stored:
        events.emit(signals.key_claimed, claim.key, work.request)
        events.emit(signals.key_finished, claim.key, work.request)
    return outcome.value


def run_phased(work: Work, request: ClaimedRequest, *, using: str) -> Any:
    """Claim the key and continue the work from its recovery point.

    On return or exception the key is finished, refused, stuck or released, or another run has it.
    Raises InProgress, KeyReused, InterventionRequired or Unavailable if the key cannot be claimed.
    """
    require_no_transaction(using)
    wait = Wait(work.wait_seconds)
    while True:
        claim = claims.claim_phased(request, work.points[:-1], using=using)
        if claim.outcome is not ClaimOutcome.IN_PROGRESS or not wait.pause():
            break
    if claim.outcome is not ClaimOutcome.CLAIMED:
        return replays.replay_or_raise(claim, work, using=using)
    key = claim.key
    run = PhasedRun(key, work)  # Handlers of logs and receivers of signals may lose a session.
    if key.attempts > 1:
        events.log(INFO, "key %s is resumed at %s", key, key.recovery_point)
    events.emit(signals.key_claimed, key, work.request)
    if signals.key_claimed.receivers:  # They may have opened one.
        run.sessions.note()
    return run_claimed(run)


def run_claimed(run: PhasedRun) -> Any:
    """Do the work of a claimed key, and settle the key. On return or exception, ``run.final_state``
    is the last state of the key that this process knows."""
    key = run.key
    try:
        outcome = _run_and_settle(run)
    except LockLost:
        return _value_of_other_run(run, key)
    finally:
        if run.final_state is None:
            run.note_final_state(run.key)
    try:
        if outcome.is_raised and outcome.cause is not None:
            raise outcome.cause
        return outcome.value
    finally:
        del outcome  # Break the cycle, as in run_plain.


def _run_and_settle(run: PhasedRun) -> Outcome:
    """Do the work and settle the key. An exception of ``settle`` is settled too."""
    try:
        return settle(run, _outcome(run))
    except BaseException as error:
        _settle_exception(run, error)
        raise


def _outcome(run: PhasedRun) -> Outcome:
    try:
        return _run_attempts(run)
    except Exception as error:
        # The last attempt did not call ``outcome_of``, because the exception was one to retry. If
        # the exception refuses the caller, it still has an outcome.
        if (refusal := run.work.refusal_of(error)) is None:
            raise
    return refusal


def _run_attempts(run: PhasedRun) -> Outcome:
    """Do the work. After a serialization failure, do it again."""
    work = run.work
    if run.key.recovery_point not in work.points:
        raise replays.CannotRun(StuckCode.UNKNOWN_RECOVERY_POINT, replays.unknown_point(run.key))
    for attempt in Attempts(run):
        with attempt:
            run.begin_attempt()
            with work.bind(run):
                try:
                    try:
                        return work.call()
                    finally:
                        roll_back_unknown(run.using)
                except Exception as error:
                    retryable = retryable_failure(error, run.level, using=run.using)
                    outcome = None if retryable else work.outcome_of(error)
                    if outcome is None:
                        raise
                    try:
                        return outcome
                    finally:
                        del outcome  # Break the cycle, as in run_plain.
    raise conflict()


def settle(run: PhasedRun, result: Outcome) -> Outcome:
    """Write the final state of the key of a phased run, whose work has returned ``result``. Return
    the outcome for the caller.

    The first case that fits decides:

    - the outcome that a phase has stored: the commit of the phase has finished the key.
    - an exception with a code from 500, after something was begun: the key is released.
    - an outcome to store that no phase has stored: ResponseNotCommitted is raised.
    - an error to store, before anything was begun: the error finishes the key.
    - another refusal: the key is refused, so that only a repeat of the caller runs it.
    - any other outcome: the key is released.
    """
    key, using = run.key, run.using
    is_early_error = result.code >= 400 and key.untouched
    is_definitive = result.is_stored and (result.code < 500 or is_early_error)
    match result:
        case _ if run.has_stored(result):
            pass
        case Outcome(cause=Exception() as cause) if result.code >= 500 and not key.untouched:
            if not run.finished:
                _release(key, error_text(cause, withheld=run.work.hides_errors), using=using)
        case _ if run.finished or (is_definitive and not is_early_error):
            run.calls.require_no_doubt()
            raise _uncommitted(result) from result.cause
        # No caller waits for the completer. It stores no early error, because a repeat of the
        # caller may get another result.
        case _ if is_definitive and not run.work.by_completer:
            run.sessions.require_all(status=result.code, cause=result.cause)
            stored = run.work.stored(result.value)
            finish = partial(fence.finish, key, stored, using=using, untouched=True)
            repeat(finish, using=using)
            run.note_finished(result)
            with run.work.bind(run):
                events.emit(signals.key_finished, key, run.work.request)
        case _ if result.is_refusal and not run.work.by_completer:
            run.sessions.require_all(status=result.code, cause=result.cause)
            refuse = partial(fence.refuse, key, _description(run, result), using=using)
            repeat(refuse, using=using)
        case _:
            _release(key, _description(run, result), using=using)
    return result


def _settle_exception(run: PhasedRun, error: BaseException) -> None:
    """Write the final state of the key after an exception, which the caller raises.

    The first case that fits decides:

    - ``LockLost``: another run has the key, and continues from the last commit of this run.
    - ``KeyStuck``, if the key is not finished: the key is stuck. Raises the error for the caller.
    - ``NotReplicated`` and other exceptions: the key is released at its last recovery point.
    """
    match error:
        case LockLost():
            pass
        case KeyStuck() if not run.finished:
            code, reason = replays.cause_of(error)
            _mark_stuck(run, code, reason)
            raise replays.error_for_stuck(code) from error
        case NotReplicated():
            # A release could now wait without end for the standby. The last commit may have
            # finished the key, but a failover may undo that commit.
            release_later(run.key, error_text(error), using=run.using)
        case _ if not run.finished:
            _release(run.key, error_text(error, withheld=run.work.hides_errors), using=run.using)


def _description(run: PhasedRun, outcome: Outcome) -> str:
    if outcome.is_raised and outcome.cause is not None:
        return error_text(outcome.cause, withheld=run.work.hides_errors)
    return run.work.described(outcome.value)


def _uncommitted(outcome: Outcome) -> ResponseNotCommitted:
    status = f"A result with status {outcome.code}"
    what = type(outcome.cause).__name__ if outcome.is_raised else status
    return ResponseNotCommitted(
        f"{what} is not the one that a phase stored. Store it with"
        " phase.set_response(response) and return key.response()."
    )


def _value_of_other_run(run: PhasedRun, key: ClaimedKey) -> Any:
    """Return the value of the run that has taken over the key. If the connection was lost during a
    COMMIT of this run, the value may be that of this run itself."""
    _release(run.key, "This run lost its lock, or the result of its COMMIT.", using=run.using)
    other = rows.read(key.pk, using=run.using)
    if other is not None and _value(other) != _value(key):
        other = None  # A failover lost this key, and another key has got its id.
    run.note_final_state(other)
    return replays.replay_of_other_run(other, run.work)


def _release(key: ClaimedKey, error: str, *, using: str) -> None:
    """Release the key. After a database error, retry once on a new connection, and then in a thread
    until the lock expires."""
    release = partial(fence.release, key, error, using=using)
    for attempt in (1, 2):
        try:
            repeat(release, using=using)
            return
        except Error as failure:
            drop_connection(connections[using])
            if attempt == 1 and not isinstance(failure, NotReplicated):
                continue
            text = "key %s could not be released, retrying until its lock expires: %s"
            events.log(WARNING, text, key, first_line(failure))
            release_later(key, error, using=using)
            return


def _mark_stuck(run: PhasedRun, code: str, reason: str) -> None:
    """Mark the key as stuck; after a database error, retry once on a new connection. Announce the
    stuck key if its code has changed.

    Raises LockLost if another run has the key, whose result the caller then gets, or NotReplicated.
    """
    key, before = run.key, run.key.stuck_code
    mark = partial(fence.mark_stuck, key, code, reason, using=run.using)
    try:
        repeat(mark, using=run.using)
    except NotReplicated:  # A second write could wait without end for the standby.
        raise
    except Error:
        drop_connection(connections[run.using])
        mark()
    if before != key.stuck_code:
        events.announce_stuck(key.pk, run.work.request, using=run.using)
