"""Groups of errors: the text of an error without the parts that differ from request to request.

The dashboard counts by group, and the lists filter by it. SQL cannot do this, so the caller reads a
bounded number of rows and groups them in Python.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.db.models import F
from django.db.models.functions import Left, Now

from idempotency._operations.definition import work_line
from idempotency._text import cut
from idempotency.monitoring.measures import COUNT_LIMIT, seconds_of, stuck_kinds

#: The number of characters of an error or a path that are read to determine its group.
GROUPED_CHARACTERS = 1000

#: The sign that replaces a number, an id or a quoted value.
_SIGN = "#"
_MAX_LENGTH = 200
#: An id mixes letters and digits. In a shorter word, such as HTTP2 or evt_1, only the numbers are
#: replaced.
_MIN_ID_LENGTH = 8

# A status, and the place of an error whose message is withheld.
_KEPT = r"(?P<kept>\bstatus \d{3}\b| in [\w.]+:\d+$)"
_QUOTED = r"(?<!\w)'[^']*'(?!\w)|\"[^\"]*\""
_UUID = r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
_VARIABLE = re.compile(rf"{_KEPT}|{_QUOTED}|{_UUID}|(?P<word>\w*\d\w*)")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Stuck keys or failed jobs with the same cause: a code or a job name, the error, and the
    place.

    ``oldest`` and ``newest`` are the seconds since the first and the last of them became stuck or
    failed.
    """

    cause: str
    error: str
    place: str
    count: int
    oldest: float
    newest: float


def group_of(text: str) -> str:
    """Return the first line of ``text`` with ``#`` for numbers, ids and quoted values, at most 200
    characters.

    Callers pass the ``stuck_reason`` of a stuck key, or the ``last_error`` of another key or of a
    job.
    """
    line = " ".join(text.strip().partition("\n")[0][:1000].split())
    return cut(_VARIABLE.sub(_replaced, line), _MAX_LENGTH)


def _replaced(found: re.Match[str]) -> str:
    if found["kept"]:
        return found["kept"]
    word = found["word"]
    return _SIGN if word is None or len(word) >= _MIN_ID_LENGTH else _NUMBER.sub(_SIGN, word)


def groups_of_stuck_keys(every: Any, limit: int = COUNT_LIMIT) -> list[ErrorGroup]:
    """Return the groups of stuck keys among ``every``, a queryset: keys with equal stuck code,
    error and request, the largest group first. If there are ``limit`` or more stuck keys, read the
    ``limit`` oldest keys that need manual review, and the ``limit`` oldest other keys."""
    keys: Any = every.stuck().order_by("created_at")
    since, text = Now() - F("stuck_at"), Left("stuck_reason", GROUPED_CHARACTERS)
    keys = keys.values_list(
        "stuck_code", text, "request_method", Left("request_path", GROUPED_CHARACTERS), since
    )
    rows = list(keys[:limit])
    if len(rows) == limit:
        rows = [row for kind in stuck_kinds(keys) for row in kind[:limit]]
    return _groups(
        (code, reason, request_group(method, path), seconds_of(age))
        for code, reason, method, path, age in rows
    )


def request_group(method: str, path: str) -> str:
    """Return method and path without the parts that differ from request to request, or the
    operation."""
    return group_of(work_line(method, path.partition("?")[0]))


def groups_of_failed_jobs(jobs: Any, limit: int = COUNT_LIMIT) -> list[ErrorGroup]:
    """Return the groups of failed jobs among ``jobs``, a queryset: jobs with equal name, error and
    queue, the largest group first. Only the ``limit`` jobs that failed first are read."""
    failed = jobs.filter(failed_at__isnull=False).order_by("failed_at")
    since, text = Now() - F("failed_at"), Left("last_error", GROUPED_CHARACTERS)
    rows = failed.values_list("job_name", text, "queue", since)[:limit]
    return _groups((name, error, queue, seconds_of(age)) for name, error, queue, age in rows)


def _groups(rows: Iterable[tuple[str, str, str, float]]) -> list[ErrorGroup]:
    ages: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for cause, error, place, age in rows:
        ages[cause, group_of(error), place].append(age)
    groups = [ErrorGroup(*key, len(found), max(found), min(found)) for key, found in ages.items()]
    return sorted(groups, key=lambda group: (-group.count, -group.oldest))
