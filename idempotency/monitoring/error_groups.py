"""Groups of errors: the text of an error without the parts that differ from request to request.

The dashboard counts by group, and the lists filter by it. SQL cannot do this, so the caller reads a bounded number of rows and
groups them in Python.
"""

import re

from idempotency._text import cut

#: The sign that replaces a number, an id or a quoted value.
_SIGN = "#"
_MAX_LENGTH = 200
#: An id mixes letters and digits. In a shorter word, such as HTTP2 or evt_1, only the numbers are replaced.
_MIN_ID_LENGTH = 8

_KEPT = r"(?P<kept>\bstatus \d{3}\b| in [\w.]+:\d+$)"  # A status, and the place of an error whose message is withheld.
_QUOTED = r"(?<!\w)'[^']*'(?!\w)|\"[^\"]*\""
_UUID = r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
_VARIABLE = re.compile(rf"{_KEPT}|{_QUOTED}|{_UUID}|(?P<word>\w*\d\w*)")
_NUMBER = re.compile(r"\d+")


def group_of(text: str) -> str:
    """Return the first line of ``text`` with ``#`` for numbers, ids and quoted values, at most 200 characters.

    Callers pass the ``stuck_reason`` of a stuck key, or the ``last_error`` of another key or of a job.
    """
    line = " ".join(text.strip().partition("\n")[0][:1000].split())
    return cut(_VARIABLE.sub(_replaced, line), _MAX_LENGTH)


def _replaced(found: re.Match[str]) -> str:
    if found["kept"]:
        return found["kept"]
    word = found["word"]
    return _SIGN if word is None or len(word) >= _MIN_ID_LENGTH else _NUMBER.sub(_SIGN, word)
