"""The fingerprint of a request, which distinguishes a retry from a different request.

JSON is compared by value: the order of members and white space do not matter. The order of an
array, null against absent, and the notation of a number (``1.0`` against ``1``) do matter. A
multipart body is compared by its fields and files, because each attempt has a new boundary. All
other bodies are compared by bytes. So is JSON with a duplicate member, which has no single value.
The kind of comparison is part of the fingerprint.

A fingerprint begins with the way in which it was made: its version, ``h`` if it includes the host,
and ``k`` with the id of its secret. A request is compared in the way of the stored fingerprint, so
changed settings or secrets do not reject retries. A release that changes the computation must keep
the old one for at least one retention.
"""

import hashlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import Callable
from functools import lru_cache
from io import BytesIO
from operator import itemgetter
from typing import Any, TypeVar
from urllib.parse import quote

from django.conf import settings
from django.core.exceptions import BadRequest
from django.core.files.uploadedfile import UploadedFile
from django.core.files.uploadhandler import load_handler
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, QueryDict
from django.http.multipartparser import MultiPartParser
from django.utils.datastructures import MultiValueDict
from django.utils.encoding import escape_uri_path, force_bytes, force_str

from idempotency._engine.advisory_locks import version_of
from idempotency._hidden import Hidden

logger = logging.getLogger("idempotency")

#: The version of new fingerprints. A change of the computation needs a new number.
VERSION = 1
_WAY = re.compile(rf"v{VERSION}(?P<host>h?)(?:k(?P<secret>[0-9a-f]+))?")
#: A field of Django's forms that differs on each page.
_CSRF_FIELD = "csrfmiddlewaretoken"
_CSRF_PAIR = re.compile(rb"(?:^|&)csrfmiddlewaretoken=[^&]*")
#: A path without a character to percent-encode, as most are.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._-]*")
#: The characters of a query that are not percent-encoded.
_AS_SENT = "%/?:@!$&'()*+,;=~-._#[]"


Parsed = TypeVar("Parsed")


class _NotByValue(ValueError):
    """This JSON text has no single value."""


def fingerprint(
    request: HttpRequest, body: Hidden[bytes | None], *, keyed: bool = False, by_host: bool = False
) -> str:
    """Return the fingerprint of a request with this body; a multipart request is compared by its
    parsed parts.

    If it is ``keyed``, with the SECRET_KEY, values cannot be guessed from it.
    Raises BadRequest for a multipart body in an unreadable charset.
    """
    name, secret = _keyed(settings.SECRET_KEY) if keyed else _UNKEYED
    way = f"v{VERSION}{'h' * by_host}{f'k{name}' if keyed else ''}"
    return _compute(way, secret, request, body, by_host=by_host)


def fingerprint_as(stored: str, request: HttpRequest, body: Hidden[bytes | None]) -> str | None:
    """Return the fingerprint of a request, made in the way of a stored one. Return None if its
    version is unknown, or if its secret is neither SECRET_KEY nor in SECRET_KEY_FALLBACKS."""
    way = version_of(stored)
    keys = dict((_UNKEYED, *map(_keyed, (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS))))
    found = _WAY.fullmatch(way)
    if found is None or (key := keys.get(found["secret"] or "")) is None:
        logger.warning(
            "a stored fingerprint cannot be compared, and the client gets 409 key_in_use: it was"
            " made by another version, or with a secret that is neither SECRET_KEY nor in"
            " SECRET_KEY_FALLBACKS"
        )
        return None
    return _compute(way, key, request, body, by_host=bool(found["host"]))


def _compute(
    way: str, key: Hidden[bytes], request: HttpRequest, body: Hidden[bytes | None], *, by_host: bool
) -> str:
    place = [b"urlconf " + urlconf.encode()] if (urlconf := chosen_urlconf(request)) else []
    if by_host:
        host = host_of(request).lower().encode()
        place += [b"host " + host, request.META.get("SCRIPT_NAME", "").encode()]
    method, (kind, content) = (request.method or "").encode(), _content(request, body)
    parts = (method, target(request).encode(), kind, content, *place)
    message = b"".join([b"%d:%b" % (len(part), part) for part in parts])
    if not key.value:
        return f"{way}:{hashlib.sha256(message).hexdigest()}"
    return f"{way}:{hmac.digest(key.value, message, 'sha256').hex()}"


#: The name and the key of a fingerprint without a secret.
_UNKEYED = ("", Hidden(b""))


@lru_cache(maxsize=8)
def _keyed(secret: str | bytes) -> tuple[str, Hidden[bytes]]:
    """Return an id of a secret that does not reveal it, and a key that is derived from it."""
    name = hashlib.sha256(b"idempotency.fingerprint.name" + force_bytes(secret)).hexdigest()[:8]
    key = hashlib.sha256(b"idempotency.fingerprint" + force_bytes(secret)).digest()
    return name, Hidden(key)


def target(request: HttpRequest) -> str:
    """Return path and query in ASCII: the bytes of the client, percent-encoded where needed."""
    query = request.META.get("QUERY_STRING", "")
    try:
        sent = query.encode("utf-8" if isinstance(request, ASGIRequest) else "latin-1")
    except UnicodeEncodeError:
        sent = query.encode()
    path = request.path_info
    if not _PLAIN_PATH.fullmatch(path):
        path = escape_uri_path(path)
    return path + (f"?{quote(sent, safe=_AS_SENT)}" if query else "")


def chosen_urlconf(request: HttpRequest) -> str:
    """Return the name of the URLconf that a middleware chose for this request, or an empty
    string."""
    urlconf = getattr(request, "urlconf", None)
    return urlconf if isinstance(urlconf, str) else getattr(urlconf, "__name__", "")


def host_of(request: HttpRequest) -> str:
    """Return the host that the client used, also one that ALLOWED_HOSTS does not permit; behind a
    proxy it may be in another header."""
    host: str = request._get_raw_host()  # type: ignore[attr-defined]
    return host


def content_length(request: HttpRequest) -> int:
    """Return CONTENT_LENGTH as Django reads it. A middleware may have set it to a number, or
    deleted it."""
    try:
        return int(request.META.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return 0


def is_multipart(request: HttpRequest) -> bool:
    """Return whether the body has fields and files to compare. Django does not parse a body without
    a length."""
    return request.content_type == "multipart/form-data" and content_length(request) != 0


def is_parsed(request: HttpRequest) -> bool:
    """Return whether the fields and files of a multipart body are in ``POST`` and ``FILES``: Django
    parses the body of a POST, and a middleware may have parsed that of another method (Django Ninja
    has one)."""
    fields = getattr(request, "_post", None)
    if hasattr(request, "_body"):
        # A parser of Django REST framework may leave data of its own in ``_post``.
        return request.method == "POST" and (fields is None or isinstance(fields, QueryDict))
    # Django leaves empty fields in a request that it does not parse.
    return request.method == "POST" or bool(fields or getattr(request, "_files", None))


def _content(request: HttpRequest, body: Hidden[bytes | None]) -> tuple[bytes, bytes]:
    if is_multipart(request):
        return b"multipart", _multipart(request)
    return _content_of_body(request.content_type or "", body.value or b"")


def _content_of_body(content_type: str, body: bytes) -> tuple[bytes, bytes]:
    if content_type == "application/json" or content_type.endswith("+json"):
        try:
            return b"json", _canonical_json(body)
        except (ValueError, RecursionError):
            pass
    if content_type == "application/x-www-form-urlencoded":
        body = _CSRF_PAIR.sub(b"", body)
    return b"bytes", body


def _canonical_json(body: bytes) -> bytes:
    value = _DECODER.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    # In this text, other strings contain no NUL.
    return _ENCODER.encode(value).replace(f'"{_MARK}', "\0").encode()


def _refuse_constant(name: str) -> None:
    raise _NotByValue(name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if not pairs:
        return {}
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _NotByValue
    return members


# Each float becomes a string: the mark, which no client knows, and its text. An integer has no
# second notation.
_MARK = secrets.token_urlsafe(8)
_DECODER = json.JSONDecoder(
    parse_float=_MARK.__add__, parse_constant=_refuse_constant, object_pairs_hook=_object
)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def _multipart(request: HttpRequest) -> bytes:
    """Return the sorted fields and files, each file by its hash. The files are rewound."""
    # Code of the project runs here: the upload handlers, and the files that they make.
    parts = _parts(request)
    if "_body" in vars(request) and _has_unreadable_text(parts.value[0]):
        # A parser of the view may tell such bytes apart.
        parts = _parsed(request, "latin-1")
    uploads = _sorted(parts.value[1])
    files = Hidden([[name, [_file(file) for file in files]] for name, files in uploads])
    fields = [pair for pair in _sorted(parts.value[0]) if pair[0] != _CSRF_FIELD]
    return json.dumps([fields, files.value]).encode()


_Parts = tuple[QueryDict, "MultiValueDict[str, UploadedFile[Any]]"]


def _parts(request: HttpRequest) -> Hidden[_Parts]:
    if is_parsed(request):
        return Hidden((request.POST, request.FILES))
    # Parse a copy, because the view may parse the body itself.
    return _parsed(request, request.encoding or settings.DEFAULT_CHARSET)


def _parsed(request: HttpRequest, encoding: str) -> Hidden[_Parts]:
    handlers = [load_handler(path, request) for path in settings.FILE_UPLOAD_HANDLERS]
    parser = MultiPartParser(request.META, BytesIO(request.body), handlers, encoding)
    return Hidden(readable(parser.parse))


def _has_unreadable_text(fields: QueryDict) -> bool:
    """Return whether a field is not text in the charset of the request."""
    return any("\ufffd" in text for name, values in fields.lists() for text in (name, *values))


def _sorted(parts: "MultiValueDict[str, Any]") -> list[tuple[str, list[Any]]]:
    return sorted(parts.lists(), key=itemgetter(0))


def readable(read: Callable[[], Parsed]) -> Parsed:
    """Return the result of ``read``, which parses a multipart body. Raises BadRequest for an
    unreadable charset."""
    try:
        return read()
    except (LookupError, ValueError) as error:
        raise BadRequest(
            "A charset of the multipart body is unknown, or a part of the body is not valid in its"
            " charset."
        ) from error


def _file(file: "UploadedFile[Any]") -> list[str | None]:
    # Django returns the charset as bytes, despite its annotation.
    charset = force_str(file.charset, "latin-1", strings_only=True)
    return [file.name, file.content_type, charset, _digest(file)]


def _digest(file: "UploadedFile[Any]") -> str:
    digest = hashlib.sha256()
    for chunk in file.chunks():
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()
