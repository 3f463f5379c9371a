"""The HTTP side: the key in the request, the problem in the answer, the response in the row and out of it again."""

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlencode

from django.contrib.auth import get_user_model
from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse, HttpResponseBase, RawPostDataException
from django.utils.crypto import salted_hmac

from idempotency import conf, problems
from idempotency.fingerprint import fingerprint, is_multipart, target
from idempotency.keys import ClaimedRequest
from idempotency.models import IdempotencyKey
from idempotency.sql import RETIRED_SCOPE

Response = TypeVar("Response", bound=HttpResponseBase)

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
BODY_OMITTED_HEADER = "Idempotent-Body-Omitted"

#: Kept for the completer's request; nothing else of the headers is.
_KEPT_REQUEST_HEADERS = ("Accept", "Accept-Language", "X-Api-Version", "Api-Version", "Stripe-Version")
#: Never kept of a response: made fresh by each answer, or nobody else's business.
_FRESH_RESPONSE_HEADERS = frozenset(
    {"authorization", "connection", "content-length", "date", "proxy-authenticate", "retry-after", "server", "set-cookie"}
    | {"transfer-encoding", "www-authenticate", "x-request-id", "x-correlation-id", "request-id", "traceparent"}
)
_FRESH_RESPONSE_PREFIXES = ("ratelimit", "x-ratelimit", "x-rate-limit")

# RFC 9651: a quoted string, then parameters, which draft-07 ignores.
_QUOTED = re.compile(
    r'"(?P<text>(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"'
    r'(?:[ ]*;[ ]*[a-z*][a-z0-9_.*-]*(?:=(?:"(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*"|[^\s;,"]+))?)*'
)
# As every SDK sends it. A comma would be two header lines that a server has joined.
_BARE = re.compile(r"[\x21\x23-\x2b\x2d-\x7e]+")


def key_of(request: HttpRequest) -> str | None:
    """Return the key that the request carries, None if it carries none. Raises Problem for one that is not valid."""
    limits = conf.get()
    values = [value for name in limits.HEADER_NAMES if (value := request.headers.get(name)) is not None]
    if not values:
        return None
    found = {_parse(value, strict=limits.STRICT_KEY_SYNTAX) for value in values}
    if len(found) > 1:
        raise problems.key_invalid("The request carries two different keys. Send one.")
    key = found.pop()
    if not limits.KEY_MIN_LENGTH <= len(key) <= limits.KEY_MAX_LENGTH:
        raise problems.key_invalid(
            f"The key has {len(key)} characters; it must have {limits.KEY_MIN_LENGTH} to {limits.KEY_MAX_LENGTH}."
        )
    return key


def _parse(value: str, *, strict: bool) -> str:
    value = value.strip(" \t")
    if quoted := _QUOTED.fullmatch(value):
        return re.sub(r'\\(["\\])', r"\1", quoted["text"])
    if not strict and _BARE.fullmatch(value):
        return value
    form = 'a quoted string, like "8e03978e-40d5-43e8-bc93-6894a57f9324"' + (
        "" if strict else ", or the same without quotes, in visible ASCII characters without a comma"
    )
    raise problems.key_invalid(f"The header must carry one key: {form}.")


def scope_of(request: HttpRequest, scope: Callable[[HttpRequest], str] | None) -> str:
    """Return whose key it is. Raises Problem when the request does not say: strangers must not share a scope."""
    if scope is not None:
        own = scope(request)
        if not isinstance(own, str) or len(own) > 200 or own.startswith(RETIRED_SCOPE) or "\x00" in own:
            raise ValueError(
                f"scope= must return a string of at most 200 characters that does not begin with {RETIRED_SCOPE!r}."
            )
        if own:
            return own
    elif (user := _user(request)) is not None:
        return f"user:{user.pk}"
    elif (session := _session_scope(request)) is not None:
        return session
    raise problems.scope_missing()


def _session_scope(request: HttpRequest) -> str | None:
    """Return the id kept in the session. It is derived from the first session key, so that two first requests agree on it."""
    session = getattr(request, "session", None)
    if session is None:
        return None
    if "idempotency_scope" not in session:
        if session.session_key is None:  # Asked after loading: the key of a session that is gone is gone as well.
            return None
        session["idempotency_scope"] = salted_hmac("idempotency.scope", session.session_key, algorithm="sha256").hexdigest()
    return f"session:{session['idempotency_scope']}"


def _user(request: HttpRequest) -> Any:
    user = getattr(request, "user", None)
    return user if isinstance(user, get_user_model()) and user.pk is not None else None


def describe(request: HttpRequest, scope: str, key: str) -> ClaimedRequest:
    """Return what a claim writes down of the request.

    The body is read. What Django refuses to read (too large, broken multipart) is raised, as it would be in the view.
    """
    body, content_type = _body(request)
    user = _user(request)
    headers = {name: value for name in _KEPT_REQUEST_HEADERS if (value := request.headers.get(name)) and value.isprintable()}
    host = request.META.get("HTTP_HOST", "")
    return ClaimedRequest(
        scope=scope,
        idempotency_key=key,
        user_id=user.pk if user is not None else None,
        method=request.method or "",
        path=target(request),
        body=body,
        content_type=_printable(content_type),
        headers=headers | {"Host": _printable(host), "scheme": request.scheme or "http"},
        remote_addr=_printable(request.META.get("REMOTE_ADDR", ""))[:45],
        fingerprint=fingerprint(request, body),
    )


def _body(request: HttpRequest) -> tuple[bytes | None, str]:
    """Return the body to keep and its content type. Of a multipart request the fields are kept; with files, nothing is."""
    content_type: str = request.META.get("CONTENT_TYPE", "")
    if not is_multipart(request) or request.method != "POST":
        _refuse_cut_body(request, len(request.body))
        return request.body, content_type
    if request._read_started and not (hasattr(request, "_post") or hasattr(request, "_body")):  # type: ignore[attr-defined]
        raise RawPostDataException("The body was read before @idempotent could compare it. Read request.body, or request.POST.")
    # Parsing comes first: reading the bytes would put large uploads under the limit for requests without files.
    try:
        fields = urlencode(list(request.POST.lists()), doseq=True).encode()
    except LookupError as error:
        raise BadRequest(f"The charset {request.encoding} is not one of text.") from error
    whole = getattr(request, "_body", None)
    _refuse_cut_body(request, len(whole) if whole is not None else getattr(request._stream, "_pos", None))
    return (None, content_type) if request.FILES else (fields, "application/x-www-form-urlencoded")


def _refuse_cut_body(request: HttpRequest, arrived: int | None) -> None:
    """Raise Problem when the connection broke in the body: its beginning would spend the key on another request."""
    announced = request.META.get("CONTENT_LENGTH") or "0"
    if arrived is not None and announced.isdecimal() and arrived < int(announced):
        raise problems.body_incomplete()


def _printable(text: str) -> str:
    return "".join(character for character in text if character.isprintable())


def not_stored(response: Response) -> Response:
    """Mark a response that must not be stored: the run is rolled back, the key is released, and a retry runs again."""
    response.idempotency_not_stored = True  # type: ignore[attr-defined]
    return response


def is_stored(response: HttpResponseBase) -> bool:
    """Tell whether this response finishes its key: 2xx, 3xx and definitive 4xx do."""
    if getattr(response, "idempotency_not_stored", False):
        return False
    limits = conf.get()
    if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return limits.STORE_5XX
    return response.status_code not in limits.NEVER_STORED_STATUSES


def stored_parts(response: HttpResponseBase) -> tuple[int, dict[str, str], bytes | None]:
    """Return status, headers and body as they are stored; the body is None when it streams or is too large to keep."""
    headers = {
        name: value
        for name, value in response.items()
        if name.lower() not in _FRESH_RESPONSE_HEADERS and not name.lower().startswith(_FRESH_RESPONSE_PREFIXES)
    }
    body = response.content if isinstance(response, HttpResponse) else None
    if body is not None and len(body) > conf.get().MAX_STORED_BODY_BYTES:
        body = None
    return response.status_code, headers, body


def rebuild(key: IdempotencyKey) -> HttpResponse:
    """Return the stored response of a finished key: the same status, bytes and headers."""
    body = key.response_body
    response = HttpResponse(b"" if body is None else bytes(body), status=key.response_code)
    del response["Content-Type"]
    for name, value in (key.response_headers or {}).items():
        response[name] = value
    if body is None:
        response[BODY_OMITTED_HEADER] = "true"
    if "Location" in response:
        response.url = response["Location"]  # type: ignore[attr-defined]  # as Django's own redirects have
    return response


def replay(key: IdempotencyKey) -> HttpResponse:
    """Return the stored response, marked as a replay."""
    response = rebuild(key)
    response[conf.get().REPLAYED_HEADER] = "true"
    return response
