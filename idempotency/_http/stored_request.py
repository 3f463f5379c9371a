"""The stored request: capture it for a claim, and rebuild it for the completer.

Only this module knows the format. The column ``request_headers`` contains headers of the client and
marks; marks have lower-case names, which no stored header has.
"""

import json
import secrets
from contextlib import suppress
from functools import partial
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import BadRequest
from django.core.handlers.wsgi import WSGIRequest
from django.db.utils import Error
from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from idempotency import conf
from idempotency._engine.adapter import ClaimedRequest
from idempotency._engine.replays import CannotRun
from idempotency._hidden import Hidden
from idempotency._http import fingerprint as fingerprints
from idempotency._http.bodies import FORM, body_to_store, parse
from idempotency._http.credentials import without_credentials
from idempotency._http.kept import kept_values, set_kept_values
from idempotency._http.key_header import in_meta
from idempotency._http.options import Options
from idempotency._http.view import Call
from idempotency._text import printable
from idempotency.exceptions import StuckCode
from idempotency.models import IdempotencyKey
from idempotency.scopes import is_no_user, user_pk

#: Stored for the rebuilt request, with host, scheme and mount point.
_KEPT_HEADERS = ("Accept", "Accept-Language", "X-Api-Version", "Api-Version", "Stripe-Version")
#: The mark of a query whose credentials are not stored.
_CREDENTIALS = "credentials"
#: The mark with the mount point of the site, unless it is the root.
_SCRIPT_NAME = "script_name"
#: The mark of a multipart request, whose fields are stored as a form.
_MULTIPART = "multipart"
#: The mark of a form that a middleware has parsed although the method is not POST: one of Django
#: Ninja, or one that overrides the method.
_PARSED = "parsed"
#: The mark of an authenticated sender that is not a Django user.
_NO_USER = "no_user"
#: The mark with the URLconf that a middleware chose, for instance by host.
_URLCONF = "urlconf"
#: The mark with the language that LocaleMiddleware chose, perhaps by a cookie.
_LANGUAGE = "language"
#: The mark with the values that ``keep=`` names, as JSON text: a column of JSON does not take each
#: text.
_KEPT = "kept"
#: The maximum size of that text. The values should be identifiers; rows can be read again.
MAX_KEPT_BYTES = 4096


def capture(call: Call, scope: str, key: Hidden[str], options: Options) -> ClaimedRequest:
    """Return the parts of the request that a claim stores. For a plain view these contain neither
    headers nor body, which only the completer needs. The body is read. Raises Problem
    ``body_incomplete`` for a truncated body, and the exceptions of Django for a body that is too
    large or invalid. If the values of ``keep=`` cannot be stored, ``unstorable`` has the error: a
    request that is only answered needs them no more."""
    request = call.request
    # A view of Django REST framework has parsers of its own.
    body, content_type = body_to_store(request, framework=call.view_request is not request)
    snapshot, unstorable = _kept(call, options) if options.keep else (Hidden(""), None)
    user_id, phased = user_pk(request), options.recovery_points is not None
    # An empty body contains no secret, and the completer can run it.
    is_stored = phased and body.value is not None and (options.store_body or not body.value)
    path, is_cut = without_credentials(fingerprints.target(request))
    # The completer cannot run a request without its body and its whole query.
    if is_cut or not is_stored:
        snapshot = Hidden("")
    by_host = conf.get().FINGERPRINT_HOST
    fingerprint = partial(fingerprints.fingerprint, request, body, by_host=by_host)
    # Parts that are not stored must not be guessed from the fingerprint.
    keyed = is_cut or not options.store_body
    return ClaimedRequest(
        scope=scope,
        idempotency_key=key.value,
        user_id=user_id,
        request_method=(request.method or "")[:20],
        request_path=path,
        request_body=body.value if is_stored else None,
        request_content_type=printable(content_type) if phased else "",
        request_headers=_headers(request, user_id, content_type, snapshot, is_cut)
        if phased
        else {},
        remote_addr=printable(request.META.get("REMOTE_ADDR", ""))[:45],
        request_fingerprint=fingerprint(keyed=keyed),
        fingerprint_as=partial(fingerprints.fingerprint_as, request=request, body=body),
        plain_fingerprint=partial(fingerprint, keyed=True),
        retention_hours=options.hours_kept(),
        lease_seconds=options.lease(),
        unstorable=unstorable,
    )


def _headers(
    request: HttpRequest, user_id: Any, content_type: str, kept: Hidden[str], is_cut: bool
) -> dict[str, str]:
    """Return the headers and the marks to store."""
    headers = {
        name: value
        for name in _KEPT_HEADERS
        if (value := request.META.get(in_meta(name))) and value.isprintable()
    }
    headers["Host"] = printable(fingerprints.host_of(request))
    headers["scheme"] = request.scheme or "http"
    is_form = fingerprints.is_multipart(request) and content_type == FORM
    is_parsed = request.method != "POST" and getattr(request, "_post", None)
    marks = {
        _NO_USER: "true" if user_id is None and is_no_user(request) else "",
        _MULTIPART: "true" if is_form else "",
        _PARSED: "true" if is_parsed else "",
        _SCRIPT_NAME: printable(request.META.get("SCRIPT_NAME") or ""),
        _URLCONF: fingerprints.chosen_urlconf(request),
        _CREDENTIALS: "true" if is_cut else "",
        _LANGUAGE: getattr(request, "LANGUAGE_CODE", ""),
        _KEPT: kept.value,
    }
    return headers | {name: value for name, value in marks.items() if value}


def _kept(call: Call, options: Options) -> tuple[Hidden[str], Exception | None]:
    """Return the values of ``keep=`` as JSON text, or an empty text and why they cannot be stored.
    To read a lazy value may raise any exception, for instance if the row behind it was
    deleted. Raises database errors, after which the client retries."""
    try:
        text = Hidden(json.dumps(kept_values(call.request, options.keep, call.name).value))
    except Error:
        raise
    except Exception as error:
        return Hidden(""), error
    if (length := len(text.value)) > MAX_KEPT_BYTES:
        return Hidden(""), ValueError(
            f"The values of the option keep of the view {call.name} have {length:,} bytes as JSON;"
            f" at most {MAX_KEPT_BYTES:,} are stored. Name identifiers, and read the rows again."
        )
    return text, None


def urlconf_of(key: IdempotencyKey) -> str | None:
    urlconf: str | None = key.request_headers.get(_URLCONF)
    return urlconf


def language_of(key: IdempotencyKey) -> str:
    """Return the language that LocaleMiddleware chose for the client, or LANGUAGE_CODE without
    it."""
    language: str = key.request_headers.get(_LANGUAGE) or settings.LANGUAGE_CODE
    return language


def client_headers(key: IdempotencyKey) -> dict[str, str]:
    """Return the headers of the client that are stored, without marks."""
    kept = key.request_headers
    return {name: kept[name] for name in _KEPT_HEADERS if name in kept}


def address_of(key: IdempotencyKey) -> tuple[str, str, str]:
    """Return the parts of the address to which the client sent the request: scheme, host, and path
    with query. The host is as the client sent it, or empty. The path begins with one slash, so it
    cannot change the host."""
    kept = key.request_headers
    path = f"{kept.get(_SCRIPT_NAME, '')}{key.request_path}"
    return kept.get("scheme", "http"), kept.get("Host", ""), f"/{path.lstrip('/')}"


def sender_is_no_user(key: IdempotencyKey) -> bool:
    return _NO_USER in key.request_headers


def has_whole_query(key: IdempotencyKey) -> bool:
    """Return whether the query is stored as the client sent it, with no credential left out."""
    return _CREDENTIALS not in key.request_headers


def has_headers(key: IdempotencyKey) -> bool:
    """Return whether the headers of the request are stored, as for each phased view. They name at
    least its scheme."""
    return bool(key.request_headers)


def can_rebuild(key: IdempotencyKey) -> bool:
    """Return whether all parts of the request are stored."""
    return key.request_body is not None and has_whole_query(key)


def refuse_partial(key: IdempotencyKey) -> None:
    """Raise CannotRun if a part of the request is not stored."""
    if not can_rebuild(key):
        missing = "The body" if key.request_body is None else "A credential in the query"
        reason = f"{missing} of the request was not stored, so only its client can send it again."
        raise CannotRun(StuckCode.BODY_NOT_KEPT, reason)


def rebuild(key: IdempotencyKey) -> HttpRequest:
    """Return the request of a key, without the parts that are not stored. Its user is read at the
    first access, in the database that the router names then."""
    request = _request_of(key)
    if _PARSED in key.request_headers:
        with suppress(BadRequest):  # In a charset that only the parsers of the view can read.
            parse(request)
    # The original request passed the CSRF check; otherwise there would be no key.
    request._dont_enforce_csrf_checks = True  # type: ignore[attr-defined]
    user: Any = SimpleLazyObject(partial(sender_of, key))
    request.user = user if key.user_id is not None else AnonymousUser()
    request.auser = sync_to_async(partial(_loaded_user, request))
    if urlconf := urlconf_of(key):
        request.urlconf = urlconf
    set_kept_values(request, json.loads(key.request_headers.get(_KEPT, "{}")), key)
    return request


def _request_of(key: IdempotencyKey) -> WSGIRequest:
    body, content_type = bytes(key.request_body or b""), key.request_content_type
    if _MULTIPART in key.request_headers:
        body, content_type = _multipart(body)
    request = WSGIRequest(_environ(key, body, content_type))
    # The body counts as read, because a stream could not serve a second attempt.
    request._body = body
    return request


def _environ(key: IdempotencyKey, body: bytes, content_type: str) -> dict[str, Any]:
    path, _, query = key.request_path.partition("?")
    kept = key.request_headers
    host, scheme = kept.get("Host", ""), kept.get("scheme", "http")
    return {in_meta(name): value for name, value in client_headers(key).items()} | {
        "REQUEST_METHOD": key.request_method,
        "SCRIPT_NAME": kept.get(_SCRIPT_NAME, "").encode().decode("latin-1"),  # as WSGI has it
        "PATH_INFO": unquote(path, "latin-1"),
        "QUERY_STRING": query,
        "CONTENT_TYPE": content_type,
        "CONTENT_LENGTH": str(len(body)),
        "REMOTE_ADDR": key.remote_addr,
        "SERVER_NAME": host.rpartition(":")[0] or host or "localhost",
        "SERVER_PORT": "443" if scheme == "https" else "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.url_scheme": scheme,
        "wsgi.input": BytesIO(body),
        **({"HTTP_HOST": host} if host else {}),
    }


def _multipart(fields: bytes) -> tuple[bytes, str]:
    """Return the stored fields as a multipart body, and its content type. The boundary is random,
    so no value contains it."""
    boundary, parts = secrets.token_hex(16), []
    for name, value in parse_qsl(fields.decode(), keep_blank_values=True):
        # RFC 2231 encodes any name, but may triple its length, and the header of a part is limited
        # to 1,024 bytes.
        quoted = name.isprintable() and not {'"', "\\"} & set(name)
        named = f'name="{name}"' if quoted else f"name*=UTF-8''{quote(name, safe='')}"
        parts.append(f"--{boundary}\r\nContent-Disposition: form-data; {named}\r\n\r\n{value}\r\n")
    body = f"{''.join(parts)}--{boundary}--\r\n".encode()
    return body, f"multipart/form-data; boundary={boundary}; charset=utf-8"


def sender_of(key: IdempotencyKey) -> Any:
    """Return the user who sent the request. Raises CannotRun if this user is deleted or not active
    any more."""
    user_id: Any = key.user_id
    user = get_user_model()._default_manager.filter(pk=user_id).first()
    if user is None or not getattr(user, "is_active", True):
        sender = f"The sender of the request, the user {key.user_id},"
        raise CannotRun(StuckCode.USER_MISSING, f"{sender} is deleted or not active any more.")
    return user


def _loaded_user(request: HttpRequest) -> Any:
    _ = request.user.__class__  # Reads the user.
    return request.user
