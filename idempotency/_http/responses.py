"""Responses: which are stored, in which form, and the response made of a stored one."""

import json
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from django.conf import settings
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.exception import response_for_exception
from django.db.utils import Error
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.http.multipartparser import MultiPartParserError
from django.shortcuts import resolve_url
from django.urls import NoReverseMatch

from idempotency import conf
from idempotency._engine.fence import StoredResponse
from idempotency._http.credentials import is_credential
from idempotency._http.not_stored import is_not_stored
from idempotency._http.problems import Problem
from idempotency._http.view import Call
from idempotency._text import cut
from idempotency.exceptions import IdempotencyError
from idempotency.models import IdempotencyKey

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
BODY_OMITTED_HEADER = "Idempotent-Body-Omitted"
HTTP_EXCEPTIONS = (Http404, PermissionDenied, SuspiciousOperation, BadRequest, MultiPartParserError)

#: Headers that are not stored, because each response has its own, or they belong to one connection
#: or client.
_FRESH_HEADERS = frozenset((
    "connection", "content-length", "date", "proxy-authenticate", "server", "set-cookie",
    "transfer-encoding", "www-authenticate", "x-request-id", "x-correlation-id", "request-id",
    "traceparent",
))  # fmt: skip
_FRESH_PREFIXES = ("ratelimit", "x-ratelimit", "x-rate-limit")

#: The statuses that ask to be retried if the response has Retry-After.
_RETRIED_STATUSES = frozenset({409, 423, 429, 503})

#: A longer body is no message of an error; a longer message is cut.
_MAX_READ_BYTES = 20_000
_MAX_MESSAGE_LENGTH = 500


def is_stored(response: HttpResponseBase) -> bool:
    """Return whether this response finishes its key if a view returns it: 2xx, 3xx, definitive 4xx,
    and 5xx with STORE_5XX. A response that asks to be retried is not definitive."""
    asks_to_be_retried = response.status_code in _RETRIED_STATUSES and "Retry-After" in response
    return is_storable(response) and not asks_to_be_retried


def is_storable(response: HttpResponseBase) -> bool:
    """Return whether this response finishes its key if it is stored explicitly."""
    return not is_not_stored(response) and _is_stored(response.status_code)


def _is_stored(status: int) -> bool:
    limits = conf.get()
    return status not in limits.NEVER_STORED_STATUSES and (status < 500 or limits.STORE_5XX)


def is_refusal(response: HttpResponseBase) -> bool:
    """Return whether this response is a 4xx without the mark of ``not_stored``."""
    return 400 <= response.status_code < 500 and not is_not_stored(response)


def is_login_redirect(response: HttpResponseBase, request: HttpRequest) -> bool:
    """Return whether a check of access, such as ``permission_required``, redirects the sender to a
    login page: to LOGIN_URL, or to an URL whose query names the address of this request."""
    if not 300 <= response.status_code < 400 or "Location" not in response:
        return False
    target, own = urlsplit(response["Location"]), request.get_full_path()
    with suppress(NoReverseMatch):
        if target.path == urlsplit(resolve_url(settings.LOGIN_URL)).path:
            return True
    named = (urlsplit(value) for _, value in parse_qsl(target.query))
    return any(url._replace(scheme="", netloc="").geturl() == own for url in named)


def stored_parts(response: HttpResponseBase) -> StoredResponse:
    """Return status, headers and body to store; the body is None if it streams or is too large."""
    return StoredResponse(response.status_code, stored_headers(response), _stored_body(response))


def _stored_body(response: HttpResponseBase) -> bytes | None:
    body = response.content if isinstance(response, HttpResponse) else None
    return body if body is not None and len(body) <= conf.get().MAX_STORED_BODY_BYTES else None


def stored_headers(response: HttpResponseBase) -> dict[str, str]:
    """Return the headers of a response that its replay has too."""
    credentials = conf.get().CREDENTIAL_NAMES
    return {name: value for name, value in response.items() if not _is_left_out(name, credentials)}


@lru_cache(maxsize=256)
def _is_left_out(name: str, credentials: frozenset[str]) -> bool:
    """Return whether a response header is not stored. The names of credentials are those of the
    setting, on which the result depends."""
    fresh = name.lower() in _FRESH_HEADERS or name.lower().startswith(_FRESH_PREFIXES)
    return fresh or is_credential(name)


def described(response: HttpResponseBase, *, withheld: bool) -> str:
    """Return the status and the message of a response that is not stored, for the last error of a
    key. If ``withheld``, the message could quote what must not be stored."""
    status = f"status {response.status_code}"
    message = "" if withheld else _message(response)
    return f"{status}: {cut(message, _MAX_MESSAGE_LENGTH)}" if message else f"{status}."


def _message(response: HttpResponseBase) -> str:
    """Return the first line of a short text, or the member of a JSON body that describes the error;
    else an empty string."""
    if not isinstance(response, HttpResponse) or not getattr(response, "is_rendered", True):
        return ""
    content = response.content
    if len(content) > _MAX_READ_BYTES:
        return ""
    kind = response.get("Content-Type", "").partition(";")[0].strip().lower()
    text = content.decode("utf-8", "replace").strip()
    if kind == "text/plain":
        return text.partition("\n")[0].strip()
    if kind != "application/json" and not kind.endswith("+json"):
        return ""
    try:
        return _first_text(json.loads(text))
    except (ValueError, RecursionError):
        return ""


def _first_text(body: Any) -> str:
    if not isinstance(body, dict):
        return body.strip() if isinstance(body, str) else ""
    error = body.get("error")
    nested = error if isinstance(error, dict) else {}
    messages = nested.get("message"), body.get("message")
    told = (body.get("detail"), *messages, error, body.get("title"))
    return next((text.strip() for text in told if isinstance(text, str) and text.strip()), "")


def stored_response(key: IdempotencyKey) -> HttpResponse:
    """Return the stored response of a finished key: the same status, bytes and headers."""
    body, headers = key.response_body, key.response_headers or {}
    response = HttpResponse(bytes(body or b""), status=key.response_code, headers=headers)
    names = {name.lower() for name in headers}
    if "content-type" not in names:
        del response["Content-Type"]  # Django's default
    if body is None:
        response[BODY_OMITTED_HEADER] = "true"
    if "location" in names:
        response.url = response["Location"]  # type: ignore[attr-defined]  # like HttpResponseRedirect
    return response


def response_to(error: Exception, call: Call) -> HttpResponseBase | None:
    """Return the response of the framework to an exception, or that of Django if it is stored.
    Return None to raise the exception: the hooks of the framework or Django have then not run, or
    do not run again."""
    if isinstance(error, Error | IdempotencyError | Problem):
        return None
    if (answer := call.response_to(error)) is not None:
        return answer
    return response_for_exception(call.request, error) if _is_stored(status_of(error)) else None


def status_of(error: Exception) -> int:
    """Return the status of Django's response to an exception."""
    if isinstance(error, Http404):
        return 404
    if isinstance(error, PermissionDenied):
        return 403
    return 400 if isinstance(error, HTTP_EXCEPTIONS) else 500
