"""A request that was claimed and left: built again from what its row keeps, and put to the view that its path leads to.

The view itself is called, not the middleware chain, so that no header, token or URL leads here from outside.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from asgiref.sync import sync_to_async
from django.conf import settings
from django.conf.urls.i18n import is_language_prefix_patterns_used
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import PermissionDenied
from django.core.handlers.wsgi import WSGIRequest
from django.db import Error
from django.http import HttpRequest, HttpResponseBase
from django.middleware.locale import LocaleMiddleware
from django.urls import Resolver404, get_script_prefix, get_urlconf, set_script_prefix, set_urlconf
from django.utils import timezone, translation
from django.utils.module_loading import import_string

from idempotency import conf, scopes
from idempotency.contexts import awaited
from idempotency.execution import CLAIMED_KEY_ATTRIBUTE
from idempotency.http import MULTIPART, NO_USER, REDACTED_MARK, SCRIPT_NAME
from idempotency.models import IdempotencyKey
from idempotency.options import URLCONF, Options, match_of, options_of

#: Where PREPARE_REQUEST says who sent the request; the last two are Django REST framework's.
_CALLER = ("user", "auth", "_force_auth_user", "_force_auth_token")


class CannotRun(Exception):
    """This request cannot be run again as it was; ``code`` is the stuck code."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


def run_again(key: IdempotencyKey) -> HttpResponseBase:
    """Call the view of a claimed key, and return its answer. Raises what the view raises.

    The view leaves the key finished, stuck or released, unless something before @idempotent has answered or raised.
    """
    request = _request(key)
    try:
        match = match_of(key)
    except Resolver404:
        raise CannotRun("view_missing", f"No view answers {request.path_info} any more.") from None
    options = options_of(match.func, key.request_method)
    if options is None:
        # An undecorated view would run its effects without the key.
        raise CannotRun(
            "view_missing", f"The view that answers {request.path_info} is not protected with @idempotent any more."
        )
    request.resolver_match = match
    if urlconf := key.request_headers.get(URLCONF):
        request.urlconf = urlconf
    setattr(request, CLAIMED_KEY_ATTRIBUTE, key)
    with _addresses_of(request), translation.override(_language_of(request)), timezone.override(None):
        _prepare(request, key, options)
        try:
            response: HttpResponseBase = awaited(match.func(request, *match.args, **match.kwargs))
        except PermissionDenied:
            _stop_if_refused(request, key, HTTPStatus.FORBIDDEN)
            raise
        _stop_if_refused(request, key, response.status_code)
        return response


def _prepare(request: HttpRequest, key: IdempotencyKey, options: Options) -> None:
    """Let PREPARE_REQUEST add what a middleware would have. Raises CannotRun when the sender is no user and has no name."""
    before = [getattr(request, name, None) for name in _CALLER]
    if (prepare := conf.get().PREPARE_REQUEST) is not None:
        awaited(conf.named(prepare)(request, key))
    named = any(getattr(request, name, None) is not was for name, was in zip(_CALLER, before, strict=True))
    if key.user_id is None and not named and not _is_anybodys(request, key, options):
        raise CannotRun(
            "user_missing",
            "The sender of the request is no user of Django's, and IDEMPOTENCY['PREPARE_REQUEST'] does not say who it is. It "
            "must set request.user or request.auth; where the client's request had neither, what scope= reads is enough.",
        )
    # Django REST framework takes them without asking an authenticator, as in its own force_authenticate().
    vars(request).setdefault("_force_auth_user", request.user)
    if hasattr(request, "auth"):
        vars(request).setdefault("_force_auth_token", request.auth)


def _is_anybodys(request: HttpRequest, key: IdempotencyKey, options: Options) -> bool:
    """Tell whether no sender is needed: for a visitor's session, and for a scope that is the same without one."""
    if NO_USER in key.request_headers:
        return False
    if options.scope in (None, scopes.session, scopes.user_or_session) and key.scope.startswith("session:"):
        return True
    try:
        return scopes.scope_of(request, options.scope) == key.scope
    except Error:
        raise
    except Exception:
        return False  # It reads what the client alone sends.


def _stop_if_refused(request: HttpRequest, key: IdempotencyKey, status: int) -> None:
    """Raise CannotRun when a check outside of @idempotent refuses the sender, and part of the request is done.

    While nothing is done the refusal is returned: it is left to the client.
    """
    if status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) or hasattr(request, "idempotency_key"):
        return  # @idempotent sets that attribute first: it was reached.
    if not key.untouched:
        raise CannotRun(
            "user_missing",
            f"The sender may not make this request any more: it was refused with status {status}, before @idempotent ran the "
            "view. Part of its work is done.",
        )


def _language_of(request: HttpRequest) -> str:
    """Return the language that LocaleMiddleware chose for the client; without it, that of all requests."""
    middlewares = [import_string(path) for path in settings.MIDDLEWARE]
    if not any(isinstance(middleware, type) and issubclass(middleware, LocaleMiddleware) for middleware in middlewares):
        return settings.LANGUAGE_CODE
    in_path, default_in_path = is_language_prefix_patterns_used(getattr(request, "urlconf", settings.ROOT_URLCONF))
    if in_path and not default_in_path and not translation.get_language_from_path(request.path_info):
        return settings.LANGUAGE_CODE
    return translation.get_language_from_request(request, check_path=in_path)


@contextmanager
def _addresses_of(request: HttpRequest) -> Iterator[None]:
    """Let reverse() return what it did for the client: under the path that the site is mounted at, in the request's URLconf."""
    prefix, urlconf = get_script_prefix(), get_urlconf()
    set_script_prefix(request.META["SCRIPT_NAME"])
    set_urlconf(getattr(request, "urlconf", None))
    try:
        yield
    finally:
        set_script_prefix(prefix)
        set_urlconf(urlconf)


def _request(key: IdempotencyKey) -> HttpRequest:
    """Build the request again. Raises CannotRun if that is not possible."""
    if REDACTED_MARK in key.request_headers:
        raise CannotRun("body_redacted", "Parts of the request were redacted, so it cannot be run again without its client.")
    if key.request_body is None:
        raise CannotRun("body_not_kept", "The body of the request was not kept, so it cannot be run again without its client.")
    body, content_type = bytes(key.request_body), key.request_content_type
    if MULTIPART in key.request_headers:
        body, content_type = _multipart(body)
    path, _, query = key.request_path.partition("?")
    headers = dict(key.request_headers)
    host = headers.pop("Host", "")
    for mark in (URLCONF, NO_USER, MULTIPART):
        headers.pop(mark, None)
    environ = {
        "REQUEST_METHOD": key.request_method,
        "SCRIPT_NAME": headers.pop(SCRIPT_NAME, "").encode().decode("latin-1"),  # as WSGI has it
        "PATH_INFO": unquote(path, "latin-1"),
        "QUERY_STRING": query,
        "CONTENT_TYPE": content_type,
        "CONTENT_LENGTH": str(len(body)),
        "REMOTE_ADDR": key.remote_addr,
        "SERVER_NAME": host.rpartition(":")[0] or host or "localhost",
        "SERVER_PORT": "443" if headers.get("scheme") == "https" else "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.url_scheme": headers.pop("scheme", "http"),
        "wsgi.input": BytesIO(body),
    }
    if host:
        environ["HTTP_HOST"] = host
    environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
    request = WSGIRequest(environ)
    # As if it had been read: a run that meets a serialization failure is made again, and the stream can be read only once.
    request._body = body
    # Cross-site forgery is a matter of the request that came in; it passed, or there would be no key.
    request._dont_enforce_csrf_checks = True  # type: ignore[attr-defined]
    request.user = _user(key)
    request.auser = sync_to_async(lambda: request.user)
    return request


def _multipart(fields: bytes) -> tuple[bytes, str]:
    """Return the kept fields as a multipart body, and its content type. Nobody can have put the boundary into a value."""
    boundary, parts = secrets.token_hex(16), []
    for name, value in parse_qsl(fields.decode(), keep_blank_values=True):
        # RFC 2231 takes any name, at three times its length: a part's header must not be longer than 1024 bytes.
        quoted = name.isprintable() and not {'"', "\\"} & set(name)
        named = f'name="{name}"' if quoted else f"name*=UTF-8''{quote(name, safe='')}"
        parts.append(f"--{boundary}\r\nContent-Disposition: form-data; {named}\r\n\r\n{value}\r\n")
    return f"{''.join(parts)}--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}; charset=utf-8"


def _user(key: IdempotencyKey) -> Any:
    if key.user_id is None:
        return AnonymousUser()
    user = get_user_model()._default_manager.filter(pk=key.user_id).first()
    if user is None or not getattr(user, "is_active", True):
        raise CannotRun("user_missing", f"The user {key.user_id}, who sent the request, is gone or not active any more.")
    return user
