"""Redaction: parameters that ``redact=`` names are stored as ``[redacted]``.

The fingerprint still covers them. It is keyed with the SECRET_KEY, so that values with few possibilities cannot be guessed
from it.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode

from django.utils.http import parse_header_parameters

REDACTED = "[redacted]"
#: Signs that a body is no form: a character that forms percent-encode, a name with encoded JSON, or a name without a value.
#: Some clients send JSON, XML or text with the content type of a form.
_NO_FORM = re.compile(rb'[{}"<>\s]|(?:^|&)[^=&]*(?:%7b|%22)|(?:^|&)[^=&]+(?:&|$)', re.IGNORECASE)
#: In another charset, such as UTF-7, a view may read other names than this module.
_CHARSETS = ("utf-8", "ascii", "iso8859-1")


def redacted_body(body: bytes, content_type: str, paths: Sequence[str]) -> tuple[bytes | None, bool]:
    """Return the body to store, or None if its content is unknown, and whether anything was removed."""
    if not body:
        return body, False
    kind, parameters = parse_header_parameters(content_type)
    if not _is_read_alike(parameters.get("charset", "utf-8")):
        return None, True
    if kind == "application/x-www-form-urlencoded" and not _NO_FORM.search(body):
        text, taken = _redacted_fields(body.decode("utf-8", "surrogateescape"), paths)
        return (text.encode() if taken else body), taken
    if kind != "application/json" and not kind.endswith("+json"):
        return None, True
    try:
        value, found = json.loads(body, object_pairs_hook=_without_duplicates), False
        for path in paths:
            value, taken = _without(value, path)
            found = found or taken
    except (ValueError, RecursionError):
        return None, True
    return (json.dumps(value).encode() if found else body), found


def _is_read_alike(charset: str) -> bool:
    try:
        return codecs.lookup(charset).name in _CHARSETS
    except LookupError:  # Django and the frameworks ignore it.
        return True


def redacted_target(target: str, paths: Sequence[str]) -> tuple[str, bool]:
    """Return path and query to store, and whether anything was removed."""
    path, mark, query = target.partition("?")
    text, taken = _redacted_fields(query, paths)
    return (f"{path}{mark}{text}", True) if taken else (target, False)


def _redacted_fields(text: str, paths: Sequence[str]) -> tuple[str, bool]:
    # Keep bytes that are not UTF-8 unchanged.
    fields = parse_qsl(text, keep_blank_values=True, encoding="utf-8", errors="surrogateescape")
    if not any(_as_read(name) in paths for name, _ in fields):
        return text, False
    kept = [(name, REDACTED if _as_read(name) in paths else value) for name, value in fields]
    return urlencode(kept, encoding="utf-8", errors="surrogateescape"), True


def _as_read(name: str) -> str:
    """Return the name of a field as a view reads it; if it is not UTF-8, the request is in Latin-1."""
    sent = name.encode("utf-8", "surrogateescape")
    try:
        return sent.decode()
    except UnicodeDecodeError:
        return sent.decode("latin-1")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError  # Only the last value would be redacted.
    return members


def _without(value: Any, path: str) -> tuple[Any, bool]:
    """Return the value without the part that ``path`` names, also in each element of a list, and whether there was one. If
    the path expects an object but finds another value, that whole value is redacted: it may be the parameter itself."""
    if isinstance(value, list):
        items = [_without(item, path) for item in value]
        return [item for item, _ in items], any(taken for _, taken in items)
    if not isinstance(value, dict):
        return (value, False) if value is None else (REDACTED, True)
    taken = path in value
    if taken:
        value[path] = REDACTED
    for name in [name for name in value if path.startswith(f"{name}.")]:
        value[name], found = _without(value[name], path.removeprefix(f"{name}."))
        taken = taken or found
    return value, taken
