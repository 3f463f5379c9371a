"""Run a stored request: call its view in the environment of a request, but without middleware.

The completer calls the view directly. No URL leads here, so no client can reach this code.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import Error
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import Resolver404
from django.utils.translation import gettext

from idempotency import conf, scopes
from idempotency._async import FAILURES, awaited
from idempotency._engine.adapter import Abandoned, RerunResult
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.fence import StoredResponse
from idempotency._engine.replays import CannotRun, cause_of
from idempotency._environment import Environment, in_environment
from idempotency._http import responses, routes, stored_request
from idempotency._http.environment import enter_request
from idempotency._http.options import OnAbandon, Options
from idempotency._http.rebuilt import RebuiltRun
from idempotency._http.view import rendered
from idempotency._text import error_text
from idempotency.exceptions import KeyStuck, StuckCode


class HttpAdapter:
    """The adapter of HTTP; see ``idempotency._engine.adapter``."""

    def with_stored_work(self, key: ClaimedKey, use: Callable[["StoredView"], Any]) -> Any:
        return in_environment(
            key, enter_request, lambda environment: use(StoredView(key, environment))
        )

    def answer(self, value: Any) -> StoredResponse:
        """Clients stop retrying only after a stored 2xx or 4xx."""
        if not isinstance(value, HttpResponse):
            kind = type(value).__name__
            raise ValueError(f"The answer to the key of a request is an HttpResponse, not {kind}.")
        code = value.status_code
        if not (200 <= code < 300 or 400 <= code < 500) or not responses.is_storable(value):
            text = gettext(
                "A client may retry after status %(code)s: choose a 2xx, or a 4xx such as 409, 410"
                " or 422."
            )
            raise ValueError(text % {"code": code})
        if len(value.content) > (limit := conf.get().MAX_STORED_BODY_BYTES):
            text = gettext("The body is longer than %(limit)s bytes (MAX_STORED_BODY_BYTES).")
            raise ValueError(text % {"limit": limit})
        if code in (204, 205) and value.content:
            text = gettext("A response with status %(code)s has no body.")
            raise ValueError(text % {"code": code})
        return responses.stored_parts(value)


class StoredView:
    """The view of a stored request."""

    def __init__(self, key: ClaimedKey, environment: Environment) -> None:
        self._key, self._environment = key, environment
        self._on_abandon: OnAbandon | None = None
        self.is_whole = stored_request.can_rebuild(key)
        self.hides_errors = key.request_body is None

    def declares(self, recovery_point: str) -> bool:
        options = routes.options_for(self._key) if self._environment.failure is None else None
        return options is not None and recovery_point in options.every_point()

    def run(self) -> RerunResult:
        rebuilt = RebuiltRun(self._key, self._environment.request)
        try:
            response = _call(rebuilt, self._environment)
        except KeyStuck as stuck:  # CannotRun, or raised by PREPARE_REQUEST.
            code, reason = cause_of(stuck)
            text = f"The completer cannot run this request: {reason}"
            return RerunResult(text, rebuilt.run, error=stuck, stuck=(code, reason))
        except FAILURES as error:
            is_refused = isinstance(error, responses.HTTP_EXCEPTIONS)
            return RerunResult(error_text(error), rebuilt.run, is_refused, error)
        # A request without its body was not run.
        told = responses.described(response, withheld=False)
        text = f"A decorator or the framework, outside of @idempotent, responded with {told}"
        is_redirect = responses.is_login_redirect(response, rebuilt.request)
        return RerunResult(text, rebuilt.run, is_redirect or responses.is_refusal(response))

    def has_on_abandon(self) -> bool | None:
        return routes.has_on_abandon(self._key) if self._environment.failure is None else None

    def require_on_abandon(self) -> bool:
        self._environment.required()
        self._on_abandon = routes.on_abandon_of(self._key)
        return self._on_abandon is not None

    def abandon(self, key: ClaimedKey) -> Abandoned:
        if self._on_abandon is None:
            raise RuntimeError("The view has no on_abandon.")
        response = rendered(awaited(self._on_abandon(key)))
        if not isinstance(response, HttpResponseBase):
            raise TypeError(f"it returned {type(response).__name__}, not a response")
        if responses.is_storable(response):
            return Abandoned(responses.stored_parts(response))
        told = responses.described(response, withheld=self.hides_errors)
        return Abandoned(None, f"The response of on_abandon cannot be stored: {told}")


def _call(rebuilt: RebuiltRun, environment: Environment) -> HttpResponseBase:
    """Call the view of a claimed key with the rebuilt request, and return its response. Raises the
    exceptions of the view.

    Raises CannotRun if the request cannot be rebuilt, has no protected view, or its sender is
    unknown or refused.
    Raises the failure of the environment.
    """
    key = rebuilt.key
    stored_request.refuse_partial(key)
    request = environment.required()
    if key.user_id is not None:
        # Also if PREPARE_REQUEST has set another one: a user who is gone must not run anything.
        user = stored_request.sender_of(key)
        if not environment.sender_set:
            request.user = user
    try:
        match = routes.match_of(key)
    except Resolver404:
        reason = f"The URLconf has no view for {request.path_info} any more."
        raise CannotRun(StuckCode.VIEW_MISSING, reason) from None
    options = routes.options_of(match.func, key.request_method)
    if options is None:
        # An undecorated view would run without the key.
        reason = f"The view for {request.path_info} is not protected with @idempotent any more."
        raise CannotRun(StuckCode.VIEW_MISSING, reason)
    request.resolver_match = match
    with rebuilt.current():
        _set_sender(request, key, options, environment)
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


def _set_sender(
    request: HttpRequest, key: ClaimedKey, options: Options, environment: Environment
) -> None:
    """Let Django REST framework use the sender. Raises CannotRun if the sender is not a Django user
    and is not set."""
    is_set = key.user_id is not None or environment.sender_set
    if not is_set and not _needs_no_sender(request, key, options):
        raise CannotRun(
            StuckCode.USER_MISSING,
            "The sender of the request is not a Django user, and IDEMPOTENCY['PREPARE_REQUEST'] did"
            " not set it. The function must set request.user or request.auth. If the request of the"
            " client had neither, it must set the attributes that scope= reads.",
        )
    # Django REST framework uses these without authentication, as in force_authenticate().
    vars(request).setdefault("_force_auth_user", request.user)
    if hasattr(request, "auth"):
        vars(request).setdefault("_force_auth_token", request.auth)


def _needs_no_sender(request: HttpRequest, key: ClaimedKey, options: Options) -> bool:
    """Return whether no sender is needed: the scope is a session, or is the same without a
    sender."""
    if stored_request.sender_is_no_user(key):
        return False
    by_session = options.scope in (None, scopes.session, scopes.user_or_session)
    if by_session and key.scope.startswith("session:"):
        return True
    try:
        return scopes.scope_of(request, options.scope) == key.scope
    except Error:
        raise
    except Exception:
        return False  # The scope reads data that only the client sends.


def _stop_if_part_is_done(request: HttpRequest, key: ClaimedKey, told: str) -> None:
    """Raise CannotRun if a check outside @idempotent has refused the sender, and part of the
    request is done. If nothing is done, the caller releases the key, and the client may retry."""
    reached = hasattr(request, "idempotency_key")  # @idempotent sets the attribute.
    if not reached and not key.untouched:
        raise CannotRun(
            StuckCode.USER_MISSING,
            "The sender may not make this request any more: a check before @idempotent refused it"
            f" {told}. Part of its work is done.",
        )
