"""How a protected request runs: the order of its events, from the top of this page to the bottom."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.exception import response_for_exception
from django.db import connections, transaction
from django.db.utils import Error
from django.http import Http404, HttpRequest, HttpResponseBase
from django.http.multipartparser import MultiPartParserError

from idempotency import claims, conf, header, http, keys, problems, scopes, signals
from idempotency.calls import Call
from idempotency.claims import Claim, ClaimedRequest, Outcome
from idempotency.exceptions import IdempotencyError, KeyStuck, LockLost, ResponseNotCommitted
from idempotency.models import UNKNOWN_RECOVERY_POINT, IdempotencyKey
from idempotency.options import Options
from idempotency.problems import Problem
from idempotency.retries import retried
from idempotency.runs import PhasedRun
from idempotency.transactions import atomic_request, connection_lost, durable_transaction, refuse_outer_transaction
from idempotency.waiting import Patience

logger = logging.getLogger("idempotency")

#: Where the completer puts the key that it has claimed. Nothing that comes over the network can set it.
CLAIMED_KEY_ATTRIBUTE = "_idempotency_claimed_key"
#: What Django itself turns into an answer.
HTTP_EXCEPTIONS = (Http404, PermissionDenied, SuspiciousOperation, BadRequest, MultiPartParserError)

Run = Callable[[], HttpResponseBase]


class _UnknownPoint(KeyStuck):
    """A deploy left the key at a recovery point that this code does not know."""

    code = UNKNOWN_RECOVERY_POINT


def answer(call: Call, options: Options) -> HttpResponseBase:
    """Answer one request: parse its key, refuse what can be refused without it, then claim and run it."""
    request = call.request
    request.idempotency_key = None  # type: ignore[attr-defined]
    if request.method in http.SAFE_METHODS:
        return _unprotected(call)
    try:
        claimed: IdempotencyKey | None = getattr(request, CLAIMED_KEY_ATTRIBUTE, None)
        if claimed is not None:
            return _run_phased(call, None, options, claimed, using=claimed._state.db or options.alias(request))
        value = header.key_of(request, call.seen_request, options.key_from)
        if value is None:
            if options.required:
                raise problems.key_missing()
            return _unprotected(call)
        using = options.alias(request)
        with _reachable(using):
            scope = scopes.scope_of(call.seen_request, options.scope)
            if options.validate is not None and (refusal := options.validate(call.seen_request)) is not None:
                return refusal
            described = http.describe(request, scope, value, options)
            protect = _plain if options.recovery_points is None else _phased
            return protect(call, options, described, using=using)
    except Problem as problem:
        return problem.response()


def _unprotected(call: Call) -> HttpResponseBase:
    """Call the view as Django would have done: it takes protected views out of ATOMIC_REQUESTS for all of their requests."""
    with atomic_request(call.view):
        return call()  # type: ignore[no-any-return]


@contextmanager
def _reachable(using: str) -> Iterator[None]:
    """Turn the loss of the database into an answer that sends the client round again: what was committed will be found."""
    try:
        yield
    except Error as error:
        if not connection_lost(error, using):
            raise
        logger.warning("the database %r cannot be reached: %s", using, _first_line(error))
        raise problems.database_unavailable() from error


def _plain(call: Call, options: Options, described: ClaimedRequest, *, using: str) -> HttpResponseBase:
    """Run a plain view: one transaction holds the claim, the view's writes and the stored response."""
    request = call.request
    level = options.level()
    patience = Patience(options.wait_seconds, using=using)

    def attempt(run: Run) -> HttpResponseBase:
        while True:
            # The key's own transaction is the inner one: should its COMMIT fail, the others are rolled back.
            with atomic_request(call.view, besides=using) as others, durable_transaction(level, using=using):
                claim = claims.claim_plain(described, using=using)
                if claim.outcome is Outcome.CLAIMED:
                    with _bound(request, claim.key):
                        response = run()
                    if stored := http.is_stored(response):
                        keys.finish(claim.key, *http.stored_parts(response), using=using)
                    else:
                        for alias in (using, *others):
                            transaction.set_rollback(True, using=alias)
            if claim.outcome is not Outcome.IN_PROGRESS or not patience.waited():
                break
        if claim.outcome is not Outcome.CLAIMED:
            return _refuse_or_replay(claim, request, using=using)
        if stored:
            keys.emit(signals.key_claimed, claim.key, request)
            keys.emit(signals.key_finished, claim.key, request)
        return response

    try:
        return retried(lambda: attempt(call.response), call, options.level)
    except Exception as error:
        answer = _answer_to(error, call)
        if answer is None:
            raise
        if not http.is_stored(answer):
            return answer
        # As under ATOMIC_REQUESTS, what the view wrote before it raised is rolled back; its answer alone is stored.
        return retried(lambda: attempt(lambda: answer), call, options.level)


def _phased(call: Call, options: Options, described: ClaimedRequest, *, using: str) -> HttpResponseBase:
    """Claim the key of a phased view, then run the view from the key's recovery point."""
    refuse_outer_transaction(using)
    patience = Patience(options.wait_seconds, using=using)
    points = options.every_point()[:-1]
    while (claim := claims.claim_phased(described, points, using=using)).outcome is Outcome.IN_PROGRESS and patience.waited():
        pass
    if claim.outcome is not Outcome.CLAIMED:
        return _refuse_or_replay(claim, call.request, using=using)
    if claim.key.attempts > 1:
        logger.info("key %s is resumed at %s", claim.key.key_hash, claim.key.recovery_point, extra=keys.about(claim.key))
    keys.emit(signals.key_claimed, claim.key, call.request)
    return _run_phased(call, call.request, options, claim.key, using=using)


def _run_phased(
    call: Call, sender: HttpRequest | None, options: Options, key: IdempotencyKey, *, using: str
) -> HttpResponseBase:
    """Run a phased view over a claimed key, and leave the key finished, stuck or released. ``sender`` is what signals carry."""
    run = PhasedRun(key, call, options.every_point(), sender, using=using)

    def attempt() -> HttpResponseBase:
        nonlocal run
        resumed = run.started or key.attempts > 1
        if run.started:
            run = run.again(keys.read_own(key, using=using))
        run.started = True
        if resumed:
            run.recall_doubts()
        with _bound(call.request, run.key):
            return _settled(call, run)

    try:
        if key.recovery_point not in run.order:
            raise _UnknownPoint(_unknown_point(key))
        return retried(attempt, call, lambda: run.level)
    except LockLost:
        # Another claim took over. What this run committed before is the other's to build on; it has the say now.
        _release(key, "This run lost its key, or does not know how far it came.", using=using)
        return _answer_of_other(keys.read(key.pk, using=using), sender)
    except KeyStuck as stuck:
        if run.finished:
            raise  # There is nothing to hand over: the response is stored, and retries get it.
        _mark_stuck(key, stuck, sender, using=using)
        raise problems.key_stuck(stuck.code) from stuck
    except BaseException as error:
        # An HTTP exception has released its key in _settled().
        if not run.finished and not isinstance(error, HTTP_EXCEPTIONS):
            _release(key, _described(error), using=using)
        raise


def _settled(call: Call, run: PhasedRun) -> HttpResponseBase:
    """Run the view once. Its response is stored, or releases the key, or is refused: no client gets what a retry would not."""
    cause: Exception | None = None
    try:
        response = call.response()
    except Exception as error:
        answer = _answer_to(error, call)
        if answer is None or (answer.status_code >= 500 and not run.key.untouched):
            if isinstance(error, HTTP_EXCEPTIONS) and not run.finished:
                _let_go(run, _described(error), refusal=True)
            raise
        response, cause = answer, error
    if run.stored(response):
        return response
    early = response.status_code >= 400 and run.key.untouched
    definitive = http.is_stored(response) and (response.status_code < 500 or early)
    # Nobody has seen what the completer's rebuilt request is answered, and its client might be answered otherwise.
    if not run.finished and (not definitive or (early and run.sender is None)):
        refusal = 400 <= response.status_code < 500
        _let_go(run, f"The view answered with status {response.status_code}.", refusal=refusal)
        return response
    if early:
        keys.finish(run.key, *http.stored_parts(response), using=run.using)
        run.finished_with(response)
        keys.emit(signals.key_finished, run.key, run.sender)
        return response
    run.refuse_beside_doubt()
    raise ResponseNotCommitted(
        f"A response with status {response.status_code} is not the one a phase stored. Store it with "
        f"phase.set_response(response) and return key.response()."
    ) from cause


def _let_go(run: PhasedRun, error: str, *, refusal: bool) -> None:
    """Free the key of a run that stores no answer. ``refusal``: its client is told "no", and must not be charged later.

    So what marks the key as refused may neither fail silently nor come from a run that has lost its key: raises LockLost, and
    what the database raises.
    """
    if refusal and run.sender is not None:
        keys.refuse(run.key, error, using=run.using)
    else:
        _release(run.key, error, using=run.using)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _answer_to(error: Exception, call: Call) -> HttpResponseBase | None:
    """Return the answer that a framework makes of an exception, or the one of Django if it is stored; None: raise it on."""
    if isinstance(error, Error | IdempotencyError | Problem):
        return None
    if (answer := call.answer_to(error)) is not None:
        return answer
    if isinstance(error, HTTP_EXCEPTIONS) or conf.get().STORE_5XX:
        answer = response_for_exception(call.request, error)
    return answer if answer is not None and http.is_stored(answer) else None


def _refuse_or_replay(claim: Claim, request: HttpRequest, *, using: str) -> HttpResponseBase:
    """Answer a request that may not run."""
    key = claim.key
    if claim.outcome is Outcome.FINISHED:
        response = http.replay(key)
        keys.emit(signals.key_replayed, key, request)
        return response
    problem = _conflict(claim)
    keys.emit(signals.key_conflict, key, request, code=problem.code)
    if claim.outcome is Outcome.UNKNOWN_POINT and keys.give_up(
        key.pk, UNKNOWN_RECOVERY_POINT, _unknown_point(key), using=using
    ):
        keys.announce_stuck(key.pk, request, using=using)
    raise problem


def _conflict(claim: Claim) -> Problem:
    match claim.outcome:
        case Outcome.MISMATCH:
            return problems.key_reused()
        case Outcome.IN_PROGRESS:
            return problems.key_in_use(claim.lock_seconds)
        case Outcome.STUCK:
            return problems.key_stuck(claim.key.stuck_code)
    return problems.key_stuck(UNKNOWN_RECOVERY_POINT)


def _answer_of_other(key: IdempotencyKey | None, sender: HttpRequest | None) -> HttpResponseBase:
    """Answer for a run that lost its key: with what the other run has stored, or by sending the client round again."""
    if key is not None and key.finished_at is not None:
        response = http.replay(key)
        if sender is not None:  # The completer has nobody to replay it to.
            keys.emit(signals.key_replayed, key, sender)
        return response
    stuck_code = key.stuck_code if key is not None else ""
    problem = problems.key_stuck(stuck_code) if stuck_code else problems.key_in_use()
    keys.emit(signals.key_conflict, key, sender, code=problem.code)
    raise problem


def _unknown_point(key: IdempotencyKey) -> str:
    return (
        f"The code that runs now does not know the recovery point {key.recovery_point!r}. Nothing is lost: deploy code that "
        f"declares it, and the next request or the completer goes on from there."
    )


def _mark_stuck(key: IdempotencyKey, stuck: KeyStuck, sender: HttpRequest | None, *, using: str) -> None:
    """Mark the key stuck, and say so unless an earlier deploy has."""
    try:
        keys.mark_stuck(key, stuck.code, stuck.reason, using=using)
    except LockLost:
        return  # The run that took over has the say.
    if key.stuck_code != stuck.code:
        keys.announce_stuck(key.pk, sender, using=using)


def _release(key: IdempotencyKey, error: str, *, using: str) -> None:
    """Free the key if that can be done at all; what cannot be freed expires after LOCK_TIMEOUT_SECONDS."""
    try:
        keys.release(key, error, using=using)
    except Error:
        connection = connections[using]
        if not connection.in_atomic_block:
            # The connection may be what failed: a new one may still get through.
            connection.close()
        try:
            keys.release(key, error, using=using)
        except Error as again:
            logger.warning(
                "key %s could not be released; its lock will expire: %s",
                key.key_hash,
                _first_line(again),
                extra=keys.about(key),
            )


def _first_line(error: Error) -> str:
    return str(error).partition("\n")[0]


@contextmanager
def _bound(request: HttpRequest, key: IdempotencyKey) -> Iterator[None]:
    """Let the view, and what it stages, find the key."""
    request.idempotency_key = key  # type: ignore[attr-defined]
    token = keys.current.set(key)
    try:
        yield
    finally:
        keys.current.reset(token)
