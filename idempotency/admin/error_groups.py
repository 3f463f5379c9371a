"""Groups of errors: the text of an error without the parts that differ from request to request.

The dashboard counts by group, and the lists filter by it. PostgreSQL reduces the texts to patterns
and counts the rows of each pattern, so Python sees one text of each pattern. All rows are counted.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from django.db.models import Case, F, Func, Max, Min, Q, TextField, Value, When
from django.db.models.functions import Coalesce, Now, NullIf

from idempotency._operations.definition import METHOD, work_line
from idempotency._states import KeyState
from idempotency._text import cut
from idempotency.monitoring import measures
from idempotency.monitoring.measures import UnfinishedKeys, counted, seconds_of

#: The sign that replaces a quoted value, and a word with a digit: a number or an id.
_SIGN = "#"
_MAX_LENGTH = 200
#: A filter compares at most this many parts of a group before it compares patterns.
_MAX_PARTS = 4

# A status, and the place of an error whose message is withheld.
_KEPT = r"(?P<kept>\bstatus \d{3}\b| in [\w.]+:\d+$)"
#: PostgreSQL and Python read these expressions alike.
_WORD = r"[\w-]*\d[\w-]*"
_VARIABLE = rf"""(?<!\w)'[^']*'(?!\w)|"[^"]*"|{_WORD}"""
_KEPT_OR_VARIABLE = re.compile(f"{_KEPT}|{_VARIABLE}")


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


class ErrorPattern(Func):
    """An error in the database without its variable parts. Errors with the same pattern are in the
    same group; a group may have several patterns."""

    output_field = TextField()
    arity = 1
    #: The first line, which costs much more than the text, and what ``group_of`` keeps of it.
    line = (
        r"CASE WHEN strpos({0}, E'\n') > 0 THEN split_part(ltrim({0}, E' \t\r\n'), E'\n', 1)"
        " ELSE {0} END"
    )
    kept: ClassVar[tuple[tuple[str, str], ...]] = (
        ("%status %", r"status\s+\d{3}\y"),
        ("% in %:%", r" in [\w.]+:\d+\s*$"),
    )
    function_of_sqlite = "idempotency_group_of"

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        sql, params = compiler.compile(self.source_expressions[0])
        line, of_line = self.line.format(sql), list(params) * self.line.count("{0}")
        # Most texts have no quotes, and _WORD costs half as much as _VARIABLE.
        variable = f"CASE WHEN {sql} LIKE %s OR {sql} LIKE %s THEN %s ELSE %s END"
        parts = [f"regexp_replace({line}, {variable}, '{_SIGN}', 'g')"]
        values = [*of_line, *params, "%'%", *params, '%"%', _VARIABLE, _WORD]
        for like, found in self.kept:
            # LIKE costs much less than a regular expression, and few errors have these parts.
            part = f"coalesce(substring({line}, %s), '')"
            parts.append(f"CASE WHEN {sql} LIKE %s THEN {part} ELSE '' END")
            values += [*params, like, *of_line, found]
        return f"({' || '.join(parts)})", values

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        connection.ensure_connection()
        name = self.function_of_sqlite
        connection.connection.create_function(name, 1, self.group_of, deterministic=True)
        return self.as_sql(compiler, connection, function=name, **context)

    @staticmethod
    def group_of(text: str) -> str:
        return group_of(text)


class PathPattern(ErrorPattern):
    """The path of a request without its query and its variable parts."""

    line = "split_part({0}, '?', 1)"
    kept = ()
    function_of_sqlite = "idempotency_path_group"

    @staticmethod
    def group_of(text: str) -> str:
        return group_of(text.partition("?")[0])


#: The error of a key.
ERROR = Coalesce(NullIf("stuck_reason", Value("")), "last_error", output_field=TextField())


def group_of(text: str) -> str:
    """Return the first line of ``text`` with ``#`` for quoted values and for words with a digit, at
    most 200 characters.

    Callers pass the ``stuck_reason`` of a stuck key, or the ``last_error`` of another key or of a
    job.
    """
    line = " ".join(text.strip().partition("\n")[0][:1000].split())
    return cut(_KEPT_OR_VARIABLE.sub(lambda found: found["kept"] or _SIGN, line), _MAX_LENGTH)


def request_group(method: str, path: str) -> str:
    """Return method and path without the parts that differ from request to request, or the
    operation."""
    is_call = method == METHOD
    return work_line(method, path if is_call else PathPattern.group_of(path))


def in_error_group(rows: Any, error: Any, group: str) -> Any:
    """Return those of ``rows`` whose ``error``, an expression, is in the group."""
    return _in_groups(rows.alias(error_text=error), ("error_text", ErrorPattern(error), group))


def in_key_groups(keys: Any, error: str, request: str) -> Any:
    """Return those of ``keys`` whose error is in the group ``error``, and whose request is in the
    group ``request`` (``request_group``). An empty text stands for all groups."""
    groups: list[tuple[str, ErrorPattern, str]] = []
    operation = work_line(METHOD, "")
    if request.startswith(operation):
        name = request.removeprefix(operation)
        keys = keys.filter(request_method=METHOD, request_path=name)
    elif request:
        method, _, path = request.partition(" ")
        keys = keys.filter(request_method=method)
        groups.append(("request_path", PathPattern("request_path"), path))
    if error:
        keys = keys.alias(error_text=ERROR)
        groups.append(("error_text", ErrorPattern(ERROR), error))
    return _in_groups(keys, *groups) if groups else keys


def _in_groups(rows: Any, *groups: tuple[str, ErrorPattern, str]) -> Any:
    """Return those of ``rows`` whose texts are in these groups: the name of each text, its pattern
    and its group. One query finds the patterns of all groups."""
    columns, texts = {}, {}
    for name, pattern, group in groups:
        # Each text of the group contains these parts. To find them costs less than a pattern.
        parts = sorted(re.split(rf"[{_SIGN}\s…]+", group), key=len)[-_MAX_PARTS:]
        rows = rows.filter(*[Q((f"{name}__contains", part)) for part in parts if part])
        columns[f"{name}_pattern"], texts[f"{name}_min"] = pattern, Min(name)
    found = [
        row
        for row in counted(rows.annotate(**columns), *columns, **texts)
        if all(
            pattern.group_of(text) == group
            for (_, pattern, group), text in zip(groups, row[-len(groups) :], strict=True)
        )
    ]
    patterns = {f"{name}__in": {getattr(row, name) for row in found} for name in columns}
    return rows.alias(**columns).filter(**patterns)


def unfinished_keys(every: Any) -> tuple[UnfinishedKeys, list[ErrorGroup]]:
    """Return the measurements of the unfinished keys among ``every``, a queryset, and the groups of
    its stuck keys: keys with equal stuck code, error and request, the largest group first. Both
    come from one query."""
    stuck = Q(stuck_at__isnull=False)
    # The name of an operation has no variable parts.
    name = When(stuck, request_method=METHOD, then=F("request_path"))
    keys = every.annotate(
        pattern=Case(When(stuck, then=ErrorPattern("stuck_reason"))),
        request=Case(name, When(stuck, then=PathPattern("request_path"))),
    )
    texts = {"error": Min("stuck_reason"), "path": Min("request_path")}
    columns = ("request_method", "pattern", "request")
    measured = measures.unfinished_keys(keys, *columns, **texts, **_ages("stuck_at"))
    groups = _groups(
        (row.stuck_code, row.error, request_group(row.request_method, row.path), row)
        for row in measured.rows
        if row.state == KeyState.STUCK
    )
    return measured, groups


def groups_of_failed_jobs(jobs: Any) -> list[ErrorGroup]:
    """Return the groups of failed jobs among ``jobs``, a queryset: jobs with equal name, error and
    queue, the largest group first."""
    failed = jobs.filter(failed_at__isnull=False).annotate(pattern=ErrorPattern("last_error"))
    rows = counted(
        failed, "job_name", "queue", "pattern", error=Min("last_error"), **_ages("failed_at")
    )
    return _groups((row.job_name, row.error, row.queue, row) for row in rows)


def _ages(since: str) -> dict[str, Any]:
    return {"oldest": Now() - Min(since), "newest": Now() - Max(since)}


def _groups(rows: Iterable[tuple[str, str, str, Any]]) -> list[ErrorGroup]:
    """Return the groups of the rows of patterns, each with its cause, its error and its place."""
    found: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
    for cause, error, place, row in rows:
        found[cause, group_of(error), place].append(row)
    groups = [
        ErrorGroup(
            *key,
            sum(row.number for row in rows),
            seconds_of(max(row.oldest for row in rows)),
            seconds_of(min(row.newest for row in rows)),
        )
        for key, rows in found.items()
    ]
    return sorted(groups, key=lambda group: (-group.count, -group.oldest))
