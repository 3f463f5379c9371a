"""A phased view: claim its key, then run the view from the recovery point of the key.

==============================================================================  ======================================
outcome of a run                                                                its key
==============================================================================  ======================================
the response that a phase stored                                                finished, by the commit of that phase
an error before any phase or call, which is stored                              ``fence.finish``
a 4xx or an HTTP exception that is not stored, to a client                      ``fence.refuse``
another response that is not stored, an exception, no attempt left              ``fence.release``
the same, if the database fails twice                                           ``release_later``
``LockLost``: another run has taken over                                        ``fence.release``, which changes no other claim
``KeyStuck``, or an unknown recovery point                                      ``fence.mark_stuck``
``NotReplicated``                                                               ``release_later``
==============================================================================  ======================================
"""

import logging
from contextlib import suppress

from django.db import connections
from django.db.utils import Error
from django.http import HttpResponseBase

from idempotency import signals
from idempotency._request import problems, replays, responses
from idempotency._request.nesting import Run
from idempotency._request.options import Options
from idempotency._request.phased_run import Completion, PhasedRun
from idempotency._request.retry import Attempts, RequestState
from idempotency._request.stored_request import CannotRun, cause_of
from idempotency._request.view_call import Call
from idempotency._request.wait import Patience
from idempotency._store import claims, events, fence, rows
from idempotency._store.claims import ClaimedRequest, Outcome
from idempotency._store.database_errors import drop_connection, retryable_failure
from idempotency._store.late_releases import release_later
from idempotency._store.transactions import refuse_outer_transaction
from idempotency._text import error_text, first_line
from idempotency.exceptions import KeyStuck, LockLost, NotReplicated, ResponseNotCommitted, StuckCode
from idempotency.models import IdempotencyKey

logger = logging.getLogger("idempotency")


def run_phased(call: Call, options: Options, captured: ClaimedRequest, *, using: str) -> HttpResponseBase:
    refuse_outer_transaction(using)
    patience = Patience(options.wait_seconds, using=using)
    points = options.every_point()[:-1]
    while (claim := claims.claim_phased(captured, points, using=using)).outcome is Outcome.IN_PROGRESS and patience.waited():
        pass
    if claim.outcome is not Outcome.CLAIMED:
        return replays.answer_without_running(claim, call, using=using)
    if claim.key.attempts > 1:
        logger.info("key %s is resumed at %s", claim.key.key_hash, claim.key.recovery_point, extra=events.about(claim.key))
    events.emit(signals.key_claimed, claim.key, call.request)
    return run_claimed(call, options, claim.key)


def run_claimed(call: Call, options: Options, key: IdempotencyKey, *, completion: Completion | None = None) -> HttpResponseBase:
    """Run the view with a claimed key. On return or exception the key is finished, refused, stuck or released."""
    using = str(key._state.db)  # where it was claimed
    sender = call.request if completion is None else None
    run = PhasedRun(key, call, options.every_point(), sender, using=using)
    try:
        return _in_attempts(call, run, options)
    except LockLost:
        # The new lock holder continues from the last commit of this run.
        _release(run.key, "This run lost its lock, or the result of its COMMIT.", using=using)
        other = rows.read(key.pk, using=using)
        if other is not None and (other.scope, other.idempotency_key) != (key.scope, key.idempotency_key):
            other = None  # A failover that lost this key has given its id to another.
        if completion is not None:
            completion.note(other)
        return replays.answer_of_other_run(other, call, sender)
    except KeyStuck as stuck:
        if run.finished:
            raise  # The response is stored, and retries get it.
        code, reason = cause_of(stuck)
        _mark_stuck(run, code, reason)
        raise problems.key_stuck(code) from stuck
    except NotReplicated as error:
        # A release may wait without end now. A failover may undo the last commit, even if it finished the key.
        release_later(run.key, error_text(error), using=using)
        raise
    except BaseException as error:
        # After an HTTP exception _in_attempts() has released the key.
        if not run.finished and not isinstance(error, responses.HTTP_EXCEPTIONS):
            _release(run.key, error_text(error, withheld=not options.store_body), using=using)
        raise
    finally:
        if completion is not None and completion.outcome is None:
            completion.note(run.key)


def _in_attempts(call: Call, run: PhasedRun, options: Options) -> HttpResponseBase:
    """Run the view, and again after a serialization failure. An HTTP exception releases or refuses the key."""
    if run.key.recovery_point not in run.order:
        raise CannotRun(StuckCode.UNKNOWN_RECOVERY_POINT, replays.unknown_point(run.key))
    try:
        for attempt in Attempts(RequestState(call), lambda: run.level, using=run.using):
            with attempt:
                run.begin_attempt()
                with Run(call, options, run.key, run.by_completer, lambda: run.level, lambda: run.transaction).bound():
                    return _respond(call, run, options)
        raise problems.conflict()
    except responses.HTTP_EXCEPTIONS as error:
        # Outside the attempt, because a further attempt would need the lock.
        if run.finished:
            raise _not_committed(type(error).__name__) from error
        _let_go(run, error_text(error, withheld=not options.store_body), refusal=True)
        raise


def _respond(call: Call, run: PhasedRun, options: Options) -> HttpResponseBase:
    """Call the view once. The key is then finished with its response, or released or refused. Raises ResponseNotCommitted for
    a response that a retry could not get."""
    cause: Exception | None = None
    try:
        response = call.response()
    except Exception as error:
        retryable = retryable_failure(error, run.level, using=run.using)
        if retryable or (answer := responses.answer_to(error, call)) is None:
            raise
        if answer.status_code >= 500 and not run.key.untouched:
            if not run.finished:
                _release(run.key, error_text(error, withheld=not options.store_body), using=run.using)
            return answer
        response, cause = answer, error
    if run.has_stored(response):
        return response
    early = response.status_code >= 400 and run.key.untouched
    definitive = responses.is_stored(response) and (response.status_code < 500 or early)
    if run.by_completer and responses.is_login_redirect(response, call.request):
        definitive = False
    # Do not store an early response to the rebuilt request: the client might get another one.
    if not run.finished and (not definitive or (early and run.by_completer)):
        refusal = 400 <= response.status_code < 500
        told = responses.described(response, withheld=not options.store_body)
        _let_go(run, f"The view responded with {told}", refusal=refusal)
        return response
    if early:
        fence.finish(run.key, responses.stored_parts(response), using=run.using, untouched=True)
        run.note_finished(response)
        events.emit(signals.key_finished, run.key, run.sender)
        return response
    run.refuse_beside_doubt()
    raise _not_committed(f"A response with status {response.status_code}") from cause


def _not_committed(what: str) -> ResponseNotCommitted:
    return ResponseNotCommitted(
        f"{what} is not the response that a phase stored. Store it with phase.set_response(response) and return key.response()."
    )


def _let_go(run: PhasedRun, error: str, *, refusal: bool) -> None:
    """Release the key of a run that stores no response. After a ``refusal`` the completer must not run the request. Raises
    LockLost, and errors of the database, because the mark of a refusal must not be lost."""
    if refusal and not run.by_completer:
        fence.refuse(run.key, error, using=run.using)
    else:
        _release(run.key, error, using=run.using)


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


def _mark_stuck(run: PhasedRun, code: str, reason: str) -> None:
    """Mark the key as stuck; retry once on a new connection. Announce it unless its code is unchanged."""
    key, before = run.key, run.key.stuck_code
    with suppress(LockLost):  # If another claim holds the key now, its code is unchanged here.
        try:
            fence.mark_stuck(key, code, reason, using=run.using)
        except Error:
            drop_connection(connections[run.using])
            fence.mark_stuck(key, code, reason, using=run.using)
    if before != key.stuck_code:
        events.announce_stuck(key.pk, run.sender, using=run.using)
