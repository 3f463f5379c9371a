"""Run a stored request: call its view in the environment of a request, but without middleware.

The completer calls the view directly. No URL leads here, so no client can reach this code.
"""

from http import HTTPStatus

from django.core.exceptions import PermissionDenied
from django.db import Error
from django.http import HttpRequest, HttpResponseBase
from django.urls import Resolver404

from idempotency import scopes
from idempotency._async import awaited
from idempotency._request import responses
from idempotency._request.environment import Environment
from idempotency._request.lookup import match_of, options_of
from idempotency._request.options import Options
from idempotency._request.phased_run import Completion
from idempotency._request.stored_request import CannotRun, refuse_partial, sender_is_no_user, sender_of
from idempotency.exceptions import StuckCode
from idempotency.models import IdempotencyKey


def run_again(completion: Completion, environment: Environment) -> HttpResponseBase:
    """Call the view of a claimed key with the rebuilt request, and return its response. Raises the exceptions of the view.

    On return ``completion.outcome`` is the state of the key: finished, stuck or released. It is None, and the key still
    locked, if a decorator or the framework responded or raised before @idempotent.
    Raises CannotRun if the request cannot be rebuilt, has no protected view, or its sender is unknown or refused.
    Raises the failure of the environment.
    """
    key = completion.key
    refuse_partial(key)
    completion.request = request = environment.required()
    if key.user_id is not None:
        user = sender_of(key)  # Also if PREPARE_REQUEST has set another one: a user who is gone must not run anything.
        if not environment.sender_set:
            request.user = user
    try:
        match = match_of(key)
    except Resolver404:
        raise CannotRun(StuckCode.VIEW_MISSING, f"The URLconf has no view for {request.path_info} any more.") from None
    options = options_of(match.func, key.request_method)
    if options is None:
        # An undecorated view would run without the key.
        reason = f"The view for {request.path_info} is not protected with @idempotent any more."
        raise CannotRun(StuckCode.VIEW_MISSING, reason)
    request.resolver_match = match
    with completion.under_way():
        _name_sender(request, key, options, environment)
        try:
            response: HttpResponseBase = awaited(match.func(request, *match.args, **match.kwargs))
        except PermissionDenied:
            _stop_if_part_is_done(request, key, f"with status {HTTPStatus.FORBIDDEN}")
            raise
        if response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            _stop_if_part_is_done(request, key, f"with status {response.status_code}")
        elif responses.is_login_redirect(response, request):
            _stop_if_part_is_done(request, key, f"with a redirect to {response['Location']}")
        return response


def _name_sender(request: HttpRequest, key: IdempotencyKey, options: Options, environment: Environment) -> None:
    """Let Django REST framework use the sender. Raises CannotRun if the sender is not a Django user and is not set."""
    if key.user_id is None and not environment.sender_set and not _is_anybodys(request, key, options):
        raise CannotRun(
            StuckCode.USER_MISSING,
            "The sender of the request is not a Django user, and IDEMPOTENCY['PREPARE_REQUEST'] did not set it. The function "
            "must set request.user or request.auth. If the client's request had neither, the attributes that scope= reads "
            "suffice.",
        )
    # Django REST framework uses these without authentication, as in force_authenticate().
    vars(request).setdefault("_force_auth_user", request.user)
    if hasattr(request, "auth"):
        vars(request).setdefault("_force_auth_token", request.auth)


def _is_anybodys(request: HttpRequest, key: IdempotencyKey, options: Options) -> bool:
    """Return whether no sender is needed: the scope is a session, or is the same without a sender."""
    if sender_is_no_user(key):
        return False
    if options.scope in (None, scopes.session, scopes.user_or_session) and key.scope.startswith("session:"):
        return True
    try:
        return scopes.scope_of(request, options.scope) == key.scope
    except Error:
        raise
    except Exception:
        return False  # The scope reads data that only the client sends.


def _stop_if_part_is_done(request: HttpRequest, key: IdempotencyKey, told: str) -> None:
    """Raise CannotRun if a check outside @idempotent has refused the sender, and part of the request is done. If nothing is
    done, the caller releases the key, and the client may retry."""
    reached = hasattr(request, "idempotency_key")  # @idempotent sets the attribute.
    if not reached and not key.untouched:
        raise CannotRun(
            StuckCode.USER_MISSING,
            f"The sender may not make this request any more: a check before @idempotent refused it {told}. Part of its work is "
            "done.",
        )
