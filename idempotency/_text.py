"""Make text safe for logs and for both databases."""

import json
from collections.abc import Iterable
from datetime import timedelta
from difflib import get_close_matches
from logging import LogRecord
from traceback import walk_tb
from typing import Any

from django.utils.formats import get_format, number_format

_MAX_ERROR_LENGTH = 2000
_MAX_SUMMARY_LENGTH = 200
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


def error_text(error: BaseException, *, withheld: bool = False) -> str:
    """Return the type and message of an exception, to be stored and logged. If ``withheld``, parts
    of the request must not be stored. The message could quote them, so the line of code replaces
    it."""
    if not withheld:
        try:
            return f"{type(error).__name__}: {error}"
        except Exception as failure:  # The __str__ of a user's exception may fail.
            return f"{type(error).__name__}, whose message raises {type(failure).__name__}"
    place = "nowhere"
    for frame, line in walk_tb(error.__traceback__):
        place = f"{frame.f_globals.get('__name__')}:{line}"
    return f"{type(error).__name__} in {place}"


def storable(text: str) -> str:
    """Return ``text`` without NUL and lone surrogates, which the databases reject, and at most
    2,000 characters long."""
    text = text.replace("\x00", "").encode("utf-8", "replace").decode()
    return cut(text, _MAX_ERROR_LENGTH) if text.strip() else "No reason was given."


def summary(text: str, length: int = _MAX_SUMMARY_LENGTH) -> str:
    """Return the first line of ``text``, at most ``length`` characters, for the history of a key.
    An ellipsis is the sign that there is more."""
    line, _, more = storable(text).strip().partition("\n")
    return cut(f"{line.rstrip()} …" if more else line, length)


def refuse_text(what: str, value: object, column: Any) -> None:
    """Raise ValueError unless ``value`` is a text that fits the column. The message does not quote
    the value, which may be the message of a sender."""
    width = column.max_length
    if not isinstance(value, str) or not 0 < len(value) <= width or "\0" in value:
        shown = f"a {type(value).__name__}"
        if isinstance(value, str):
            shown = f"one of {len(value)} characters"
        raise ValueError(
            f"{what} must be a string of 1 to {width} characters without NUL, not {shown}."
        )


def storable_json(value: Any, encoder: json.JSONEncoder = _ENCODER) -> bytes:
    """Return the JSON of a value. The ``encoder`` must refuse NaN, and leave texts as they are.

    Raises TypeError, ValueError or RecursionError for a value that is not JSON, that JSON would
    change, or that PostgreSQL does not store as jsonb: a failed INSERT would break the transaction
    of the caller.
    """
    text = encoder.encode(value)
    encoded = text.encode()  # refuses lone surrogates
    if "\\u0000" in text and "\\u0000" in text.replace("\\\\", ""):
        raise ValueError("it contains a NUL character")
    if not _has_names_only(value):
        raise ValueError(
            "an object in it has a key that is not a string, and JSON would change that key to a"
            " string"
        )
    return encoded


def _has_names_only(value: Any) -> bool:
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str) or not _has_names_only(inner):
                return False
        return True
    return not isinstance(value, list | tuple) or all(map(_has_names_only, value))


def cut(text: str, length: int) -> str:
    """Return ``text``, or its beginning with an ellipsis: ``length`` characters at most."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


def escaped(text: str) -> str:
    """Return ``text`` with an escape sequence for each character that is not printable, so that it
    stays one line of a log and a terminal does not act on it."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


def escape_arguments(record: LogRecord) -> bool:
    """Escape the arguments of a log line, because a client may have sent a part of them. The filter
    of the app's logger."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            escaped(value) if isinstance(value, str) else value for value in record.args
        )
    return True


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a question with the known name that is closest to ``name``, or an empty text."""
    close = get_close_matches(str(name), known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def duration(time: float | timedelta) -> str:
    """Return a duration (seconds, if it is a number) with its unit: ``20 ms``, ``1.4 s`` (``1,4 s``
    in German), ``45 s``, ``3 min``, ``2 h``, ``5 d``. A negative one counts as 0."""
    seconds = max(0.0, time.total_seconds() if isinstance(time, timedelta) else time)
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return with_decimal_sign(f"{seconds:.1f} s")
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class Grouped(int):
    """A number that pages show with the separators of the language, as in ``20,000``."""

    def __str__(self) -> str:
        return number_format(int(self), force_grouping=True)

    __html__ = __str__


def with_decimal_sign(number: str) -> str:
    """Return a number, written with a point, with the decimal sign of the language of the
    person."""
    return number.replace(".", str(get_format("DECIMAL_SEPARATOR")))
