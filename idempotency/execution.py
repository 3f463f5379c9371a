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
from idempotency.contexts import awaited
from idempotency.exceptions import IdempotencyError, KeyStuck, LockLost, ResponseNotCommitted
from idempotency.late_releases import release_later
from idempotency.models import UNKNOWN_RECOVERY_POINT, IdempotencyKey
from idempotency.options import Options
from idempotency.problems import Problem
from idempotency.retries import State, retried
from idempotency.runs import PhasedRun
from idempotency.transactions import (
    atomic_request,
    connection_lost,
    drop_connection,
    durable_transaction,
    prepare_commits,
    refuse_outer_transaction,
)
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
        with _reachable(using, options):
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
def _reachable(using: str, options: Options) -> Iterator[None]:
    """Turn the loss of the database into an answer that sends the client round again: what was committed will be found."""
    try:
        yield
    except Error as error:
        if not connection_lost(error, using):
            raise
        text = keys.summary(keys.error_text(error, withheld=options.withholds))
        logger.warning("the database %r cannot be reached: %s", using, text)
        raise problems.database_unavailable() from error


def _plain(call: Call, options: Options, described: ClaimedRequest, *, using: str) -> HttpResponseBase:
    """Run a plain view: one transaction holds the claim, the view's writes and the stored response.

    A run that is rolled back leaves the request, its session and its messages as they were.
    """
    before = State(call)
    patience = Patience(options.wait_seconds, using=using)

    def attempt(run: Run) -> tuple[Claim, HttpResponseBase | None]:
        while True:
            claim, response = _run_plain(call, options, described, run, before, using=using)
            if claim.outcome is not Outcome.IN_PROGRESS or not patience.waited():
                return claim, response

    def tried(run: Run) -> tuple[Claim, HttpResponseBase | None]:
        try:
            return retried(lambda: attempt(run), before, options.level)
        except BaseException:
            before.put_back()
            raise

    try:
        claim, response = tried(call.response)
    except Exception as error:
        answer = _answer_to(error, call)
        if before.kept and (answer is not None or isinstance(error, HTTP_EXCEPTIONS)):
            raise RuntimeError("A hook of transaction.on_commit() raised this when the view's response was stored.") from error
        if answer is None:
            raise
        if not http.is_stored(answer):
            return answer
        # As under ATOMIC_REQUESTS, what the view wrote before it raised is rolled back; its answer alone is stored.
        claim, response = tried(lambda: answer)
    if response is None:
        return _refuse_or_replay(claim, call, options, using=using)
    if http.is_stored(response):
        keys.emit(signals.key_claimed, claim.key, call.request)
        keys.emit(signals.key_finished, claim.key, call.request)
    return response


def _run_plain(
    call: Call, options: Options, described: ClaimedRequest, run: Run, before: State, *, using: str
) -> tuple[Claim, HttpResponseBase | None]:
    """Claim the key and run the view in one transaction. The response is None when the key could not be claimed.

    Where other databases have ATOMIC_REQUESTS, they commit first, and the key last: a stored response is never one whose writes
    another database refused. Raises Problem ``database_unavailable`` when the key's COMMIT fails after that of another one: a
    retry in here would write there a second time without its client's knowledge.
    """
    committed: list[str] = []
    try:
        with durable_transaction(options.level(), using=using):
            claim = claims.claim_plain(described, using=using)
            if claim.outcome is not Outcome.CLAIMED:
                return claim, None
            # First in the line: what a later hook of the view raises does not undo the COMMIT.
            transaction.on_commit(before.keep, using=using)
            with atomic_request(call.view, besides=using) as others:
                with _bound(call.request, claim.key):
                    response = run()
                if stored := http.is_stored(response):
                    keys.finish(claim.key, *http.stored_parts(response), using=using)
                    if others:
                        prepare_commits(others, committed, last=using)
                else:
                    for alias in (using, *others):
                        transaction.set_rollback(True, using=alias)
    except Error as error:
        if not committed or before.kept:
            raise
        logger.error("%r has committed, and the database of the key %r has not: %s", committed, using, _first_line(error))
        raise problems.database_unavailable() from None  # A cause would have it tried again.
    if stored:
        before.keep()  # for TestCase, which never commits
    else:
        before.put_back()
    return claim, response


def _phased(call: Call, options: Options, described: ClaimedRequest, *, using: str) -> HttpResponseBase:
    """Claim the key of a phased view, then run the view from the key's recovery point."""
    refuse_outer_transaction(using)
    patience = Patience(options.wait_seconds, using=using)
    points = options.every_point()[:-1]
    while (claim := claims.claim_phased(described, points, using=using)).outcome is Outcome.IN_PROGRESS and patience.waited():
        pass
    if claim.outcome is not Outcome.CLAIMED:
        return _refuse_or_replay(claim, call, options, using=using)
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
            return _settled(call, run, options)

    try:
        if key.recovery_point not in run.order:
            raise _UnknownPoint(_unknown_point(key))
        try:
            return retried(attempt, State(call), lambda: run.level)
        except HTTP_EXCEPTIONS as error:
            # Not in attempt(): a run that is made again inside the process needs its lock, and is not refused yet.
            if run.finished:
                raise _not_committed(type(error).__name__) from error
            _let_go(run, keys.error_text(error, withheld=options.withholds), refusal=True)
            raise
    except LockLost:
        # Another claim took over: the new lock holder continues from what this run has committed.
        _release(key, "This run lost its key, or does not know how far it came.", using=using)
        return _answer_of_other(keys.read(key.pk, using=using), call, options, sender)
    except KeyStuck as stuck:
        if run.finished:
            raise  # There is nothing to hand over: the response is stored, and retries get it.
        _mark_stuck(key, stuck, sender, using=using)
        raise problems.key_stuck(stuck.code) from stuck
    except BaseException as error:
        # An HTTP exception has let its key go above.
        if not run.finished and not isinstance(error, HTTP_EXCEPTIONS):
            _release(key, keys.error_text(error, withheld=options.withholds), using=using)
        raise


def _settled(call: Call, run: PhasedRun, options: Options) -> HttpResponseBase:
    """Run the view once. Its response is stored, or releases the key, or is refused: no client gets what a retry would not."""
    cause: Exception | None = None
    try:
        response = call.response()
    except Exception as error:
        answer = _answer_to(error, call)
        if answer is None or (answer.status_code >= 500 and not run.key.untouched):
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
        keys.finish(run.key, *http.stored_parts(response), using=run.using, untouched=True)
        run.finished_with(response)
        keys.emit(signals.key_finished, run.key, run.sender)
        return response
    run.refuse_beside_doubt()
    raise _not_committed(f"A response with status {response.status_code}") from cause


def _not_committed(what: str) -> ResponseNotCommitted:
    return ResponseNotCommitted(
        f"{what} is not the response that a phase stored. Store it with phase.set_response(response) and return key.response()."
    )


def _let_go(run: PhasedRun, error: str, *, refusal: bool) -> None:
    """Free the key of a run that stores no answer. ``refusal``: its client is told "no", and must not be charged later.

    So what marks the key as refused may neither fail silently nor come from a run that has lost its key: raises LockLost, and
    what the database raises.
    """
    if refusal and run.sender is not None:
        keys.refuse(run.key, error, using=run.using)
    else:
        _release(run.key, error, using=run.using)


def _answer_to(error: Exception, call: Call) -> HttpResponseBase | None:
    """Return the answer that a framework makes of an exception, or the one of Django if it is stored; None: raise it on."""
    if isinstance(error, Error | IdempotencyError | Problem):
        return None
    if (answer := call.answer_to(error)) is not None:
        return answer
    if isinstance(error, HTTP_EXCEPTIONS) or conf.get().STORE_5XX:
        answer = response_for_exception(call.request, error)
    return answer if answer is not None and http.is_stored(answer) else None


def _refuse_or_replay(claim: Claim, call: Call, options: Options, *, using: str) -> HttpResponseBase:
    """Answer a request that may not run."""
    key, request = claim.key, call.request
    if claim.outcome is Outcome.FINISHED:
        return _replay(key, call, options)
    problem = _conflict(claim)
    keys.emit(signals.key_conflict, key, request, code=problem.code)
    if claim.outcome is Outcome.UNKNOWN_POINT and keys.give_up(
        key.pk, UNKNOWN_RECOVERY_POINT, _unknown_point(key), using=using
    ):
        keys.announce_stuck(key.pk, request, using=using)
    raise problem


def _replay(key: IdempotencyKey, call: Call, options: Options) -> HttpResponseBase:
    """Answer with the stored response, unless the view's ``replay_check`` refuses it; a refusal leaves the key as it is."""
    if (check := options.replay_check) is not None:
        refusal = awaited(check(call.seen_request, key, **call.named_by(check)))
        if refusal is not None:
            if not isinstance(refusal, HttpResponseBase):
                raise TypeError(f"replay_check must return None, or a response that refuses the stored one, not {refusal!r}.")
            return http.not_stored(call.rendered(refusal))
    response = http.replay(key)
    keys.emit(signals.key_replayed, key, call.request)
    return response


def _conflict(claim: Claim) -> Problem:
    match claim.outcome:
        case Outcome.MISMATCH:
            return problems.key_reused()
        case Outcome.IN_PROGRESS:
            return problems.key_in_use(claim.lock_seconds)
        case Outcome.STUCK:
            return problems.key_stuck(claim.key.stuck_code)
    return problems.key_stuck(UNKNOWN_RECOVERY_POINT)


def _answer_of_other(key: IdempotencyKey | None, call: Call, options: Options, sender: HttpRequest | None) -> HttpResponseBase:
    """Answer for a run that lost its key: with what the other run has stored, or by sending the client round again."""
    if key is not None and key.finished_at is not None:
        # The completer has nobody to replay it to.
        return _replay(key, call, options) if sender is not None else http.replay(key)
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
    """Mark the key stuck, at the second try on a new connection, and say so unless an earlier deploy has."""
    try:
        try:
            keys.mark_stuck(key, stuck.code, stuck.reason, using=using)
        except Error:
            drop_connection(connections[using])
            keys.mark_stuck(key, stuck.code, stuck.reason, using=using)
    except LockLost:
        return  # The new lock holder continues from there.
    if key.stuck_code != stuck.code:
        keys.announce_stuck(key.pk, sender, using=using)


def _release(key: IdempotencyKey, error: str, *, using: str) -> None:
    """Free the key, at the second try on a new connection; if that fails too, a thread tries until the lock has expired."""
    try:
        keys.release(key, error, using=using)
    except Error:
        drop_connection(connections[using])
        try:
            keys.release(key, error, using=using)
        except Error as again:
            logger.warning(
                "key %s could not be released yet, will try again until its lock expires: %s",
                key.key_hash,
                _first_line(again),
                extra=keys.about(key),
            )
            drop_connection(connections[using])
            release_later(key, error, using=using)


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
