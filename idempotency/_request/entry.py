"""The entry point of a protected request: read its key and scope, capture it, and run it as a plain or a phased view."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from django.db.utils import Error
from django.http import HttpResponseBase

from idempotency import scopes
from idempotency._request import key_header, problems, stored_request
from idempotency._request.options import Options
from idempotency._request.phased import run_claimed, run_phased
from idempotency._request.phased_run import completion_of
from idempotency._request.plain import run_plain
from idempotency._request.problems import Problem
from idempotency._request.responses import SAFE_METHODS
from idempotency._request.view_call import Call
from idempotency._store.transactions import atomic_request, connection_lost
from idempotency._text import error_text, summary

logger = logging.getLogger("idempotency")


def answer_request(call: Call, options: Options) -> HttpResponseBase:
    """Return the response to one request. Problems before the claim are refused without claiming the key."""
    request = call.request
    request.idempotency_key = None  # type: ignore[attr-defined]
    if request.method in SAFE_METHODS:
        return _unprotected(call)
    try:
        if (completion := completion_of(request)) is not None:
            return run_claimed(call, options, completion.key, completion=completion)
        value = key_header.key_of(request, call.seen_request, options.key_from)
        if value is None:
            if options.required:
                raise problems.key_missing()
            return _unprotected(call)
        using = options.alias(request)
        with _reachable(using, options):
            scope = _scope(call, options)
            if options.validate is not None and (refusal := options.validate(call.seen_request)) is not None:
                return refusal
            captured = stored_request.capture(request, scope, value, options)
            run = run_plain if options.recovery_points is None else run_phased
            return run(call, options, captured, using=using)
    except Problem as problem:
        return problem.response()


def _unprotected(call: Call) -> HttpResponseBase:
    """Call the view with the transactions of ATOMIC_REQUESTS, from which it was excluded for all methods."""
    with atomic_request(call.view):
        return call()  # type: ignore[no-any-return]


def _scope(call: Call, options: Options) -> str:
    try:
        return scopes.scope_of(call.seen_request, options.scope)
    except scopes.NoScope:
        raise problems.scope_missing() from None


@contextmanager
def _reachable(using: str, options: Options) -> Iterator[None]:
    """Turn the loss of the database into 503, after which the client retries."""
    try:
        yield
    except Error as error:
        if not connection_lost(error, using):
            raise
        text = summary(error_text(error, withheld=options.withholds))
        logger.warning("the database %r cannot be reached: %s", using, text)
        raise problems.database_unavailable() from error
