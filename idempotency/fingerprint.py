"""The fingerprint of a request: equal exactly when two requests ask for the same.

JSON is compared by value: the order of an object's keys, white space, and ``1.0`` against ``1`` do not matter; the order of an
array, and null against absent, do. A multipart body is compared by its fields and files, since each sending draws a new
boundary. Everything else is compared by its bytes, and the same bytes as JSON and as text are two requests. What cannot be
compared by value without losing something (a key given twice, a number that no double holds) is compared by its bytes too: two
requests must never look alike when they are not.
"""

import hashlib
import hmac
import json
from decimal import Decimal
from io import BytesIO
from operator import itemgetter
from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.core.files.uploadhandler import load_handler
from django.http import HttpRequest, QueryDict
from django.http.multipartparser import MultiPartParser
from django.utils.datastructures import MultiValueDict
from django.utils.encoding import escape_uri_path, force_bytes

#: Stands before each fingerprint; another way to compute it gets another number.
VERSION = "v1"
#: The digits of the largest double: integers up to there are compared as integers, however they are written.
_DOUBLE_DIGITS = 310


#: What may stand in a query as it is.
_AS_SENT = "%/?:@!$&'()*+,;=~-._#[]"


class _NotByValue(ValueError):
    """This JSON text has no value that says all of it."""


def fingerprint(request: HttpRequest, body: bytes | None, secret: str | bytes | None = None) -> str:
    """Return the fingerprint of a request with this body; a multipart request is compared by what was parsed of it.

    With a ``secret`` it is keyed: who reads it cannot try out values without the secret.
    """
    kind, content = _content(request, body)
    digest = hashlib.sha256() if secret is None else hmac.new(_key(secret), digestmod=hashlib.sha256)
    for part in ((request.method or "").encode(), target(request).encode(), kind, content):
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return f"{VERSION}{'' if secret is None else 'k'}:{digest.hexdigest()}"


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


def is_multipart(request: HttpRequest) -> bool:
    """Tell whether the body has fields and files that can be compared. Django parses none that does not say its length."""
    return request.content_type == "multipart/form-data" and request.META.get("CONTENT_LENGTH") not in (None, "", "0")


def _content(request: HttpRequest, body: bytes | None) -> tuple[bytes, bytes]:
    if is_multipart(request):
        return b"multipart", _multipart(request, body)
    body = body or b""
    content_type = request.content_type or ""
    if content_type == "application/json" or content_type.endswith("+json"):
        try:
            return b"json", _canonical_json(body)
        except (ValueError, ArithmeticError, RecursionError):
            pass
    return b"bytes", body


def _canonical_json(body: bytes) -> bytes:
    value = json.loads(body, parse_float=_number, parse_constant=_refuse_constant, object_pairs_hook=_object)
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _number(text: str) -> int | float:
    exact = Decimal(text)
    if exact.adjusted() < _DOUBLE_DIGITS and exact == exact.to_integral_value():
        return int(exact)
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


def _multipart(request: HttpRequest, body: bytes | None) -> bytes:
    """Return the fields and files by their names, each file by its hash; the files are left at their beginning."""
    fields, files = _parts(request, body)
    named = sorted(files.lists(), key=itemgetter(0))
    return json.dumps(
        [
            sorted(fields.lists(), key=itemgetter(0)),
            [[name, [_file(file) for file in of_name]] for name, of_name in named],
        ]
    ).encode()


def _parts(request: HttpRequest, body: bytes | None) -> tuple[QueryDict, "MultiValueDict[str, UploadedFile[Any]]"]:
    if request.method == "POST":
        return request.POST, request.FILES
    # Django leaves the parsing of other methods to the view, and the view must find them untouched.
    handlers = [load_handler(path, request) for path in settings.FILE_UPLOAD_HANDLERS]
    return MultiPartParser(request.META, BytesIO(body or b""), handlers, request.encoding or settings.DEFAULT_CHARSET).parse()


def _file(file: "UploadedFile[Any]") -> list[str | None]:
    return [file.name, file.content_type, file.charset, _digest(file)]


def _digest(file: "UploadedFile[Any]") -> str:
    digest = hashlib.sha256()
    for chunk in file.chunks():
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()
