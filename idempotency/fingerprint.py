"""The fingerprint of a request: equal exactly when two requests ask for the same.

JSON is compared by value: the order of an object's keys, white space, and ``1.0`` against ``1`` do not matter; the order of an
array, and null against absent, do. A multipart body is compared by its fields and files, since each sending draws a new
boundary. Everything else is compared by its bytes, and the same bytes as JSON and as text are two requests. What cannot be
compared by value without losing something (a key given twice, a number that no double holds) is compared by its bytes too: two
requests must never look alike when they are not.

A fingerprint begins with the way in which it was made: its version, ``h`` if the host counts, and ``k`` with the name of its
secret if it is keyed. A stored fingerprint is compared with one that is made in the same way, so that a deploy, a setting or a
new secret makes no other request of a retry. An old version stays for at least one retention after the release that ends it.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from io import BytesIO
from operator import itemgetter
from typing import Any, TypeVar
from urllib.parse import quote

from django.conf import settings
from django.core.exceptions import BadRequest, DisallowedHost
from django.core.files.uploadedfile import UploadedFile
from django.core.files.uploadhandler import load_handler
from django.http import HttpRequest, QueryDict
from django.http.multipartparser import MultiPartParser
from django.utils.datastructures import MultiValueDict
from django.utils.encoding import escape_uri_path, force_bytes, force_str

#: The version that is made; another way to compute a fingerprint gets another number.
VERSION = 2
#: Those that can still be compared.
VERSIONS = (1, 2)
#: How a fingerprint was made. Version 1 did not name its secret.
_WAY = re.compile(r"v(?P<version>\d+)(?P<host>h?)(?P<keyed>k?)(?P<secret>[0-9a-f]*)")
#: Integers of so many digits are compared as integers, however they are written; longer ones must be written out.
_SHORT_DIGITS = 22
#: The digits of the largest double.
_DOUBLE_DIGITS = 310
#: The field that Django's forms fill anew with each page.
_CSRF_FIELD = "csrfmiddlewaretoken"
_CSRF_PAIR = re.compile(rb"(?:^|&)csrfmiddlewaretoken=[^&]*")
#: What may stand in a query as it is.
_AS_SENT = "%/?:@!$&'()*+,;=~-._#[]"


Parsed = TypeVar("Parsed")


class _NotByValue(ValueError):
    """This JSON text has no value that says all of it."""


def fingerprint(request: HttpRequest, body: bytes | None, secret: str | bytes | None = None, *, by_host: bool = False) -> str:
    """Return the fingerprint of a request with this body; a multipart request is compared by what was parsed of it.

    With a ``secret`` it is keyed: who reads it cannot try out values without the secret. Raises BadRequest for a multipart
    body in a charset that cannot be read.
    """
    way = f"v{VERSION}{'h' * by_host}{'' if secret is None else f'k{_name(secret)}'}"
    return _made(way, request, body, secret, VERSION, by_host=by_host)


def way_of(stored: str) -> str:
    """Return how a fingerprint was made."""
    return stored.partition(":")[0]


def made_alike(stored: str, request: HttpRequest, body: bytes | None, secrets: Sequence[str | bytes]) -> str | None:
    """Return the fingerprint of a request, made in the way of a stored one.

    ``secrets`` are the one in force and those of before. None if the version or the secret of the stored one is not known here.
    """
    way = way_of(stored)
    found = _WAY.fullmatch(way)
    if found is None or (version := int(found["version"])) not in VERSIONS:
        return None
    by_host = bool(found["host"])
    if not found["keyed"]:
        return _made(way, request, body, None, version, by_host=by_host)
    if found["secret"]:
        secrets = [secret for secret in secrets if _name(secret) == found["secret"]]
    made = [_made(way, request, body, secret, version, by_host=by_host) for secret in secrets]
    return stored if stored in made else next(iter(made), None)


def _made(
    way: str, request: HttpRequest, body: bytes | None, secret: str | bytes | None, version: int, *, by_host: bool
) -> str:
    kind, content = _content(request, body, version)
    parts = [(request.method or "").encode(), target(request).encode(), kind, content]
    if version > 1 and (urlconf := urlconf_of(request)):
        parts.append(b"urlconf " + urlconf.encode())
    if by_host:
        parts += [b"host " + host_of(request).lower().encode(), request.META.get("SCRIPT_NAME", "").encode()]
    digest = hashlib.sha256() if secret is None else hmac.new(_key(secret), digestmod=hashlib.sha256)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return f"{way}:{digest.hexdigest()}"


def _name(secret: str | bytes) -> str:
    """Return what tells one secret from another, and says nothing of it."""
    return hashlib.sha256(b"idempotency.fingerprint.name" + force_bytes(secret)).hexdigest()[:8]


def _key(secret: str | bytes) -> bytes:
    return hashlib.sha256(b"idempotency.fingerprint" + force_bytes(secret)).digest()


def target(request: HttpRequest) -> str:
    """Return path and query in ASCII: what the client sent, byte for byte, percent-encoded where it was not."""
    query = request.META.get("QUERY_STRING", "")
    try:
        sent = query.encode("latin-1")  # WSGI
    except UnicodeEncodeError:
        sent = query.encode()
    return escape_uri_path(request.path_info) + (f"?{quote(sent, safe=_AS_SENT)}" if query else "")


def urlconf_of(request: HttpRequest) -> str:
    """Return the name of the URLconf that a middleware chose for this request; empty when none did."""
    urlconf = getattr(request, "urlconf", None)
    return urlconf if isinstance(urlconf, str) else getattr(urlconf, "__name__", "")


def host_of(request: HttpRequest) -> str:
    """Return the host that the client saw, as Django finds it: behind a proxy it may stand in another header."""
    try:
        return request.get_host()
    except DisallowedHost:
        host: str = request.META.get("HTTP_HOST", "")
        return host


def is_multipart(request: HttpRequest) -> bool:
    """Tell whether the body has fields and files that can be compared. Django parses none that does not say its length."""
    return request.content_type == "multipart/form-data" and request.META.get("CONTENT_LENGTH") not in (None, "", "0")


def _content(request: HttpRequest, body: bytes | None, version: int) -> tuple[bytes, bytes]:
    if is_multipart(request):
        return b"multipart", _multipart(request, body, version)
    body = body or b""
    content_type = request.content_type or ""
    if content_type == "application/json" or content_type.endswith("+json"):
        try:
            return b"json", _canonical_json(body, version)
        except (ValueError, ArithmeticError, RecursionError):
            pass
    if version > 1 and content_type == "application/x-www-form-urlencoded":
        body = _CSRF_PAIR.sub(b"", body)
    return b"bytes", body


def _canonical_json(body: bytes, version: int) -> bytes:
    integer, number = (int, _number_of_version_1) if version == 1 else (_integer, _number)
    value = json.loads(body, parse_int=integer, parse_float=number, parse_constant=_refuse_constant, object_pairs_hook=_object)
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _number_of_version_1(text: str) -> int | float:
    exact = Decimal(text)
    if exact.adjusted() < _DOUBLE_DIGITS and exact == exact.to_integral_value():
        return int(exact)
    return _double(text, exact)


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= _SHORT_DIGITS else _number(text)


def _number(text: str) -> int | float:
    """Return the number, in no more room than its text takes: ``1e309`` must not become 310 digits."""
    exact = Decimal(text)
    digits = exact.adjusted() + 1
    integral = digits <= _DOUBLE_DIGITS and exact == exact.to_integral_value()
    if integral and digits <= _SHORT_DIGITS:
        return int(exact)
    try:
        return _double(text, exact)
    except _NotByValue:
        if not integral or digits > len(text):
            raise
    return int(exact)


def _double(text: str, exact: Decimal) -> float:
    number = float(text)
    if Decimal(repr(number)) != exact:
        raise _NotByValue
    return number


def _refuse_constant(name: str) -> None:
    raise _NotByValue(name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _NotByValue
    return members


def _multipart(request: HttpRequest, body: bytes | None, version: int) -> bytes:
    """Return the fields and files by their names, each file by its hash; the files are left at their beginning."""
    fields, files = _parts(request, body)
    counting = [pair for pair in fields.lists() if version == 1 or pair[0] != _CSRF_FIELD]
    named = sorted(files.lists(), key=itemgetter(0))
    return json.dumps(
        [
            sorted(counting, key=itemgetter(0)),
            [[name, [_file(file) for file in of_name]] for name, of_name in named],
        ]
    ).encode()


def _parts(request: HttpRequest, body: bytes | None) -> tuple[QueryDict, "MultiValueDict[str, UploadedFile[Any]]"]:
    if request.method == "POST":
        return request.POST, request.FILES
    # Django leaves the parsing of other methods to the view, and the view must find them untouched.
    handlers = [load_handler(path, request) for path in settings.FILE_UPLOAD_HANDLERS]
    encoding = request.encoding or settings.DEFAULT_CHARSET
    return readable(MultiPartParser(request.META, BytesIO(body or b""), handlers, encoding).parse)


def readable(read: Callable[[], Parsed]) -> Parsed:
    """Return what ``read`` makes of a multipart body. Raises BadRequest when a charset in it is not one of text."""
    try:
        return read()
    except (LookupError, ValueError) as error:
        raise BadRequest("A charset of the multipart body is not one of text, or does not have what it says.") from error


def _file(file: "UploadedFile[Any]") -> list[str | None]:
    # Django gives the charset as it came: bytes, whatever its annotation says.
    charset = force_str(file.charset, "latin-1", strings_only=True)
    return [file.name, file.content_type, charset, _digest(file)]


def _digest(file: "UploadedFile[Any]") -> str:
    digest = hashlib.sha256()
    for chunk in file.chunks():
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()
