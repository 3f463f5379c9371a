"""The HTTP side of a row: what is written down of a request, and a response on its way in and out again."""

import logging
from functools import partial
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import urlencode

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, RawPostDataException

from idempotency import conf, problems
from idempotency.claims import ClaimedRequest
from idempotency.fingerprint import fingerprint, host_of, is_multipart, made_alike, readable, target, urlconf_of
from idempotency.header import header
from idempotency.models import IdempotencyKey
from idempotency.options import URLCONF, Options
from idempotency.redaction import redacted_body, redacted_target
from idempotency.scopes import is_no_user, user_of

logger = logging.getLogger("idempotency")

Response = TypeVar("Response", bound=HttpResponseBase)

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
BODY_OMITTED_HEADER = "Idempotent-Body-Omitted"
#: Stands among the kept headers of a request that was not kept as it came: it cannot be run again without its client.
REDACTED_MARK = "redacted"
#: Under this name the path that the site is mounted at is kept among the headers, if it is not the root.
SCRIPT_NAME = "script_name"
#: Stands among the kept headers of a multipart request, whose fields are kept as those of a form.
MULTIPART = "multipart"
#: Stands among the kept headers of a request whose sender was authenticated, and is no user of Django's.
NO_USER = "no_user"

#: Kept for the completer's request, beside the host, the scheme and where the site is mounted.
_KEPT_REQUEST_HEADERS = ("Accept", "Accept-Language", "X-Api-Version", "Api-Version", "Stripe-Version")
#: Never kept of a response: made fresh by each answer, or nobody else's business.
_FRESH_RESPONSE_HEADERS = frozenset(
    {"authorization", "connection", "content-length", "date", "proxy-authenticate", "retry-after", "server", "set-cookie"}
    | {"transfer-encoding", "www-authenticate", "x-request-id", "x-correlation-id", "request-id", "traceparent"}
)
_FRESH_RESPONSE_PREFIXES = ("ratelimit", "x-ratelimit", "x-rate-limit")


def describe(request: HttpRequest, scope: str, key: str, options: Options) -> ClaimedRequest:
    """Return what a claim writes down of the request.

    The body is read. What Django refuses to read (too large, broken multipart) is raised, as it would be in the view.
    """
    body, content_type = _body(request)
    marks = _marks(request)
    user = user_of(request)
    headers = {name: value for name in _KEPT_REQUEST_HEADERS if (value := header(request, name)) and value.isprintable()}
    headers |= {"Host": _printable(host_of(request)), "scheme": request.scheme or "http"}
    if script_name := request.META.get("SCRIPT_NAME"):
        headers[SCRIPT_NAME] = _printable(script_name)
    if urlconf := urlconf_of(request):
        headers[URLCONF] = urlconf
    # An empty body hides nothing, and the completer can run it.
    kept, path, taken = (body if options.store_body or not body else None), target(request), False
    if options.redact:
        path, from_query = redacted_target(path, options.redact)
        kept, from_body = redacted_body(kept, content_type, options.redact) if kept is not None else (None, False)
        taken = from_query or from_body
    # What is not kept shall not be guessed from its fingerprint.
    secret = settings.SECRET_KEY if options.withholds else None
    return ClaimedRequest(
        scope=scope,
        idempotency_key=key,
        user_id=user.pk if user is not None else None,
        method=(request.method or "")[:20],
        path=path,
        body=kept,
        content_type=_printable(content_type),
        headers=headers | marks | ({REDACTED_MARK: "true"} if taken else {}),
        remote_addr=_printable(request.META.get("REMOTE_ADDR", ""))[:45],
        fingerprint=fingerprint(request, body, secret, by_host=conf.get().FINGERPRINT_HOST),
        # Asked when a key was made in another way: by another version, or under a former secret.
        made_alike=partial(
            made_alike, request=request, body=body, secrets=[settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
        ),
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
    fields = readable(lambda: urlencode(list(request.POST.lists()), doseq=True).encode())
    whole = getattr(request, "_body", None)
    _refuse_cut_body(request, len(whole) if whole is not None else getattr(request._stream, "_pos", None))
    return (None, content_type) if request.FILES else (fields, "application/x-www-form-urlencoded")


def _refuse_cut_body(request: HttpRequest, arrived: int | None) -> None:
    """Raise Problem when the connection broke in the body: its beginning would spend the key on another request."""
    announced = request.META.get("CONTENT_LENGTH") or "0"
    if arrived is not None and announced.isdecimal() and arrived < int(announced):
        raise problems.body_incomplete()


def _marks(request: HttpRequest) -> dict[str, str]:
    """Return what is kept among the headers for the completer, and is none of the client's."""
    marks = {NO_USER: is_no_user(request), MULTIPART: is_multipart(request) and request.method == "POST"}
    return {name: "true" for name, holds in marks.items() if holds}


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(character for character in text if character.isprintable())


def not_stored(response: Response) -> Response:
    """Mark a response that must not be stored: the run is rolled back, the key is released, and a retry runs again."""
    response.idempotency_not_stored = True  # type: ignore[attr-defined]
    return response


def is_stored(response: HttpResponseBase) -> bool:
    """Tell whether this response finishes its key: 2xx, 3xx and definitive 4xx do, and 5xx with STORE_5XX."""
    limits = conf.get()
    if getattr(response, "idempotency_not_stored", False) or response.status_code in limits.NEVER_STORED_STATUSES:
        return False
    return response.status_code < HTTPStatus.INTERNAL_SERVER_ERROR or limits.STORE_5XX


def is_refusal(response: HttpResponseBase) -> bool:
    """Tell whether this response is a 4xx that nobody has marked with ``not_stored``."""
    return 400 <= response.status_code < 500 and not getattr(response, "idempotency_not_stored", False)


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
    """Return the stored response, marked as a replay. Raises Problem when there is none."""
    if key.response_code is None:
        logger.error(
            "key %s was committed without a response: its view ended the transaction by itself, with COMMIT. What it had "
            "written by then is done; its client is answered 409, not what would look like a success.",
            key.key_hash,
        )
        raise problems.key_stuck("")
    response = rebuild(key)
    response[conf.get().REPLAYED_HEADER] = "true"
    return response
