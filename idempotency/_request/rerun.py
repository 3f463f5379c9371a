"""Run a stored request: call its view in the environment of a request, but without middleware.

The completer calls the view directly. No URL leads here, so no client can reach this code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from django.conf import settings
from django.conf.urls.i18n import is_language_prefix_patterns_used
from django.core.exceptions import PermissionDenied
from django.db import Error
from django.http import HttpRequest, HttpResponseBase
from django.middleware.locale import LocaleMiddleware
from django.urls import Resolver404, get_script_prefix, get_urlconf, set_script_prefix, set_urlconf
from django.utils import timezone, translation
from django.utils.module_loading import import_string

from idempotency import conf, scopes
from idempotency._async import awaited
from idempotency._request.lookup import match_of, options_of
from idempotency._request.options import Options
from idempotency._request.phased_run import Completion
from idempotency._request.stored_request import CannotRun, rebuild, sender_is_no_user
from idempotency.exceptions import StuckCode
from idempotency.models import IdempotencyKey

#: The attributes in which PREPARE_REQUEST may set the sender; the last two are those of Django REST framework.
_CALLER = ("user", "auth", "_force_auth_user", "_force_auth_token")


def run_again(completion: Completion) -> HttpResponseBase:
    """Call the view of a claimed key with the rebuilt request, and return its response. Raises the exceptions of the view.

    On return ``completion.outcome`` is the state of the key: finished, stuck or released. It is None, and the key still
    locked, if a decorator or the framework responded or raised before @idempotent.
    Raises CannotRun if the request cannot be rebuilt, has no protected view, or its sender is unknown or refused.
    """
    key = completion.key
    completion.request = request = rebuild(key)
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
    language = translation.override(_language_of(request))
    with completion.under_way(), _addresses_of(request), language, timezone.override(None):
        _prepare(request, key, options)
        try:
            response: HttpResponseBase = awaited(match.func(request, *match.args, **match.kwargs))
        except PermissionDenied:
            _stop_if_refused(request, key, HTTPStatus.FORBIDDEN)
            raise
        _stop_if_refused(request, key, response.status_code)
        return response


def _prepare(request: HttpRequest, key: IdempotencyKey, options: Options) -> None:
    """Let PREPARE_REQUEST add the attributes of middleware. Raises CannotRun if the sender is not a Django user and is not
    set."""
    before = [getattr(request, name, None) for name in _CALLER]
    if (prepare := conf.get().PREPARE_REQUEST) is not None:
        awaited(conf.named(prepare)(request, key))
    named = any(getattr(request, name, None) is not was for name, was in zip(_CALLER, before, strict=True))
    if key.user_id is None and not named and not _is_anybodys(request, key, options):
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


def _stop_if_refused(request: HttpRequest, key: IdempotencyKey, status: int) -> None:
    """Raise CannotRun if a check outside @idempotent refuses the sender and part of the request is done. If nothing is done,
    the caller releases the key, and the client may retry."""
    if status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) or hasattr(request, "idempotency_key"):
        return  # @idempotent was reached: it has set the attribute.
    if not key.untouched:
        raise CannotRun(
            StuckCode.USER_MISSING,
            f"The sender may not make this request any more: a check before @idempotent refused it with status {status}. "
            "Part of its work is done.",
        )


def _language_of(request: HttpRequest) -> str:
    """Return the language that LocaleMiddleware chose for the client, or LANGUAGE_CODE without it."""
    middlewares = [import_string(path) for path in settings.MIDDLEWARE]
    if not any(isinstance(middleware, type) and issubclass(middleware, LocaleMiddleware) for middleware in middlewares):
        return settings.LANGUAGE_CODE
    in_path, default_in_path = is_language_prefix_patterns_used(getattr(request, "urlconf", settings.ROOT_URLCONF))
    if in_path and not default_in_path and not translation.get_language_from_path(request.path_info):
        return settings.LANGUAGE_CODE
    return translation.get_language_from_request(request, check_path=in_path)


@contextmanager
def _addresses_of(request: HttpRequest) -> Iterator[None]:
    """Set the script prefix and the URLconf of the request, so that reverse() returns the same URLs."""
    prefix, urlconf = get_script_prefix(), get_urlconf()
    set_script_prefix(request.META["SCRIPT_NAME"])
    set_urlconf(getattr(request, "urlconf", None))
    try:
        yield
    finally:
        set_script_prefix(prefix)
        set_urlconf(urlconf)
