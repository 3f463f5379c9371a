"""The fingerprint of a request: equal exactly when two requests ask for the same.

JSON is compared by value: the order of an object's keys, white space, and ``1.0`` against ``1`` do not matter; the order of an
array, and null against absent, do. A multipart body is compared by its fields and files, since each sending draws a new
boundary. Everything else is compared by its bytes. What cannot be compared by value without losing something (a key given
twice, a number that no double holds) is compared by its bytes too: two requests must never look alike when they are not.
"""

import hashlib
import json
from decimal import Decimal
from typing import Any

from django.http import HttpRequest

#: Stands before each fingerprint; another way to compute it gets another number.
VERSION = "v1"
#: The digits of the largest double: integers up to there are compared as integers, however they are written.
_DOUBLE_DIGITS = 310


class _NotByValue(ValueError):
    """This JSON text has no value that says all of it."""


def fingerprint(request: HttpRequest, body: bytes | None) -> str:
    """Return the fingerprint of a request with this body; a multipart request is compared by what was parsed of it."""
    kind, content = _content(request, body)
    digest = hashlib.sha256()
    for part in ((request.method or "").encode(), request.get_full_path_info().encode(), kind, content):
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return f"{VERSION}:{digest.hexdigest()}"


def _content(request: HttpRequest, body: bytes | None) -> tuple[bytes, bytes]:
    if request.content_type == "multipart/form-data":
        return b"multipart", _multipart(request)
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


def _multipart(request: HttpRequest) -> bytes:
    """Return the fields and files in a fixed order, each file by its hash; the files are left at their beginning."""
    fields = [[name, values] for name, values in request.POST.lists()]
    files = []
    for name, uploads in request.FILES.lists():
        for upload in uploads:
            content = hashlib.sha256()
            for chunk in upload.chunks():
                content.update(chunk)
            upload.seek(0)
            files.append([name, upload.name, upload.content_type, content.hexdigest()])
    return json.dumps([sorted(fields), sorted(files, key=repr)]).encode()
