"""The entry point of a protected request: read its key and scope, capture it, and run its view."""

import logging
import time
from collections.abc import Callable

import psycopg
from django.db.utils import Error
from django.http import HttpRequest, HttpResponseBase

from idempotency import scopes
from idempotency._engine import events
from idempotency._engine.errors import (
    SessionLost,
    connection_lost,
    exceeded_time_limit,
    name_missing_migration,
)
from idempotency._engine.phased_run import PhasedRun
from idempotency._engine.run import run_claimed, run_phased, run_plain
from idempotency._hidden import Hidden
from idempotency._http import bodies, key_header, problems, stored_request
from idempotency._http.nesting import join, outer_run
from idempotency._http.options import Options
from idempotency._http.problems import REFUSALS, Problem, problem_of
from idempotency._http.rebuilt import RebuiltRun, rebuilt_run_of
from idempotency._http.responses import HTTP_EXCEPTIONS, SAFE_METHODS
from idempotency._http.view import Call, atomic_request
from idempotency._http.work import ViewWork
from idempotency._text import error_text, summary
from idempotency.exceptions import NotReplicated, Unavailable
from idempotency.signals import RequestOutcome

logger = logging.getLogger("idempotency")

#: The codes of problems that are raised before the claim, of requests with a key.
_NOT_CLAIMED = frozenset({"body_incomplete", "scope_missing"})

_TIME_LIMIT = (
    "the view %s exceeded %s, and PostgreSQL rolled its transaction back. A plain view or a phase"
    " must send a statement at least every %d s (LOCK_TIMEOUT_SECONDS, or lease_seconds of the"
    " view), or more often if the database has a stricter limit. Make slow calls between phases."
)


def respond(call: Call, options: Options) -> HttpResponseBase:
    """Return the response to one request. A Problem becomes its error response."""
    request = call.request
    outer = outer_run(request)
    if outer is None or outer.call.request is not request:
        request.idempotency_key = None  # type: ignore[attr-defined]
    if request.method in SAFE_METHODS:
        return _unprotected(call)
    try:
        if outer is None and (rebuilt := rebuilt_run_of(request)) is not None:
            return _run_rebuilt(call, options, rebuilt)
        bodies.note_stream(request)
        if call.view_request is not request:
            bodies.read_into_memory(request)
        if options.applies is not None and not _applies(call, options.applies):
            return _unprotected(call)
        if outer is not None and join(outer, call, options):
            return call()  # type: ignore[no-any-return]
        key = key_header.key_of(request, call.view_request, options.key_from)
        if key is not None:
            return _run_with_signal(call, options, key)
        if options.required:
            raise problems.key_missing()
        refusal = _refusal(call, options)
        return refusal if refusal is not None else _unprotected(call)
    except Problem as problem:
        # The frames of its traceback hold what the client sent, and the renderer may raise.
        return problem.with_traceback(None).response(request)


def _applies(call: Call, applies: Callable[[HttpRequest], bool]) -> bool:
    """Return whether the request is to be protected. An exception of ``applies`` is handled like an
    exception of the view."""
    answer = applies(call.view_request)
    if not isinstance(answer, bool):
        raise TypeError(
            f"The function applies of the view {call.name} must return True or False, not"
            f" {type(answer).__name__}."
        )
    return answer


def _refusal(call: Call, options: Options) -> HttpResponseBase | None:
    return options.validate(call.view_request) if options.validate is not None else None


def _unprotected(call: Call) -> HttpResponseBase:
    """Call the view with the transactions of ATOMIC_REQUESTS, from which it was excluded for all
    methods."""
    with atomic_request(call.view):
        return call()  # type: ignore[no-any-return]


def _run_rebuilt(call: Call, options: Options, rebuilt: RebuiltRun) -> HttpResponseBase:
    # A decorator may call the view twice.
    key = rebuilt.run.key if rebuilt.run is not None else rebuilt.key
    rebuilt.run = PhasedRun(key, ViewWork(call, options, by_completer=True))
    try:
        return run_claimed(rebuilt.run)  # type: ignore[no-any-return]
    except NotReplicated:
        raise  # The completer ends its pass.
    except REFUSALS as refusal:
        raise problem_of(refusal) from None


def _run(work: ViewWork, call: Call, options: Options, key: Hidden[str]) -> HttpResponseBase:
    """Run a protected request. Raises Problem for what refuses the run, and for the loss of the
    database or of its standby."""
    using = options.alias(call.request)
    try:
        if not (scope := scopes.scope_of(call.view_request, options.scope)):
            raise Problem("scope_missing")
        if (refusal := _refusal(call, options)) is not None:
            return refusal
        captured = stored_request.capture(call, scope, key, options)
        run = run_plain if options.recovery_points is None else run_phased
        return run(work, captured, using=using)  # type: ignore[no-any-return]
    except REFUSALS as refused:
        if isinstance(refused, NotReplicated):
            text = "a response from the database %r is not confirmed: %s"
            logger.warning(text, using, str(refused))
        raise problem_of(refused) from None
    except Error as error:
        name_missing_migration(error, using)
        if not connection_lost(error, using):
            raise
        raise _problem_of_loss(error, using, call, options) from error


def _run_with_signal(call: Call, options: Options, key: Hidden[str]) -> HttpResponseBase:
    """Run a protected request, and send ``request_answered`` with the outcome of the request and
    its time."""
    start, outcome = time.monotonic(), RequestOutcome.FAILED
    work = ViewWork(call, options)
    try:
        response = _run(work, call, options, key)
        if response.status_code < 500:
            outcome = RequestOutcome.REPLAYED if work.is_replayed else RequestOutcome.RAN
        return response
    except Problem as problem:
        if problem.status < 500:
            is_early = problem.code in _NOT_CLAIMED
            outcome = RequestOutcome.REFUSED if is_early else RequestOutcome.CONFLICT
        raise
    except Exception as error:
        # of other libraries too, in which it may be a text
        status = getattr(error, "status_code", None)
        if isinstance(error, HTTP_EXCEPTIONS) or (isinstance(status, int) and status < 500):
            outcome = RequestOutcome.RAN  # The framework makes a 4xx of it.
        raise
    finally:
        seconds = time.monotonic() - start
        claimed = call.request.idempotency_key  # type: ignore[attr-defined]
        events.emit_answered(claimed, call.request, outcome, seconds)


def _problem_of_loss(error: Error, using: str, call: Call, options: Options) -> Problem:
    """Return the problem for a lost database. If the view itself has exceeded a time limit of its
    transaction, say so."""
    if (limit := exceeded_time_limit(error)) is not None:
        logger.error(_TIME_LIMIT, call.name, limit, options.lease())
        return problem_of(Unavailable(code="time_limit_exceeded"))
    if isinstance(error, SessionLost):
        logger.warning("the request of the view %s got 503: %s", call.name, error)
    else:
        # The text of the driver quotes no value of the request.
        withheld = not (options.store_body or isinstance(error.__cause__, psycopg.Error))
        text = summary(error_text(error, withheld=withheld))
        logger.warning("the database %r cannot be reached: %s", using, text)
    return problem_of(Unavailable(code="database_unavailable"))
