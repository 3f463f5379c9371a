"""The results of a request, in a form in which two runs can be compared: ids, times and random
values are replaced.

Ids become names (``<shop.Order 1>``), in rows, jobs and answers alike. Times become ``<time>``. Any
other value that differs between two undisturbed runs is random. Equal random values get the same
name. If two places have the same random value in one run, they must have equal values in each run.
"""

import re
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any
from uuid import UUID

from django.db.models import Model

from idempotency.models import IdempotencyKey
from idempotency.testing.answers import Answer
from idempotency.testing.snapshots import Snapshot

Path = tuple[str, ...]
#: Each value of the results, and each empty container, by its path.
Leaves = dict[Path, Any]
#: The changed rows of each table, by primary key.
ChangedRows = dict[str, dict[Any, Any]]

#: Models whose rows do not depend on the request, or whose effect is compared in the answer.
LEFT_OUT = frozenset(
    {
        "sessions.Session",
        "admin.LogEntry",
        "contenttypes.ContentType",
        "auth.Permission",
        "migrations.Migration",
    }
)
#: The columns of this app's tables that are compared. The other columns describe the course of the
#: request.
COUNTED_COLUMNS = {
    IdempotencyKey._meta.label: {"stuck_code", "response_code"},
    "idempotency.StagedJob": {
        "id",
        "job_name",
        "job_args",
        "queue",
        "failed_at",
        "idempotency_key_id",
    },
    "idempotency.DownstreamCall": {"key_id", "name", "result"},
    "idempotency.ProcessedMessage": {"source", "message_id"},
}
GONE = "nothing"
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?"
    r"|(Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d \w{3} \d{4} [\d:]+ GMT"
)
_NUMBER = re.compile(r"\d{10}")
#: The name of a new row: its model, and its number.
_ROW = re.compile(r"<([\w.]+) \d+>")
_KEYS = f"rows of {IdempotencyKey._meta.label}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that differs from that of an undisturbed run."""

    path: Path
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"{' / '.join(self.path)}: {self.expected!r} undisturbed, {self.found!r} here"


def leaves(
    snapshot: Snapshot,
    rows: ChangedRows,
    answer: Answer,
    effects: Any,
    *,
    ignored: Iterable[str],
    state: Callable[[], Any] | None,
) -> Leaves:
    """Return the results of a run: the changed rows (or the result of ``state()``), the effects in
    downstream services, and the answer."""
    names = _names(snapshot, rows)
    if state is None:
        seen: Any = {
            label: _described(label, of_table, names, ignored) for label, of_table in rows.items()
        }
        seen = {f"rows of {label}": of_table for label, of_table in seen.items() if of_table}
    else:
        seen = {"state": state()}
    shown = {"status": answer.status, "body": answer.body(), "location": answer.location}
    found: Leaves = {}
    _flatten((), seen | {"effects": effects, "answer": shown}, found)
    return {path: _plain(value, names) for path, value in found.items()}


def random_paths(one: Leaves, other: Leaves) -> set[Path]:
    """Return the paths at which two undisturbed runs differ."""
    return {
        path for path in one.keys() | other.keys() if one.get(path, GONE) != other.get(path, GONE)
    }


def compare(expected: Leaves, found: Leaves, random: set[Path]) -> list[Difference]:
    """Return the differences between the results of a run and of an undisturbed run."""
    expected, found = _lettered(expected, random), _lettered(found, random)
    paths = [*expected, *(path for path in found if path not in expected)]
    return [
        Difference(path, expected.get(path, GONE), found.get(path, GONE))
        for path in paths
        if expected.get(path, GONE) != found.get(path, GONE)
        and not (_filled(path, expected) or _filled(path, found))
    ]


def unordered(found: Leaves, random: Set[Path]) -> Leaves:
    """Return the results of several requests in a form that does not depend on their order.

    Names of new rows and places in lists have no number, and the values of a path are sorted. Each
    value whose path without numbers is in ``random`` is replaced. The results do not contain the
    answers and keys: two concurrent requests may get other answers than two consecutive ones.
    """
    values: dict[Path, list[Any]] = {}
    for path, value in found.items():
        if path[0] not in ("answer", _KEYS):
            plain = unnumbered(path)
            text = _ROW.sub(r"<\1>", value) if isinstance(value, str) else value
            values.setdefault(plain, []).append("<random value>" if plain in random else text)
    return {
        (*path, f"value {number}") if number > 1 else path: value
        for path, of_path in values.items()
        for number, value in enumerate(sorted(of_path, key=repr), 1)
    }


def unnumbered(path: Path) -> Path:
    """Return a path without the numbers of new rows and of items of lists."""
    return tuple("each" if name.isdigit() else _ROW.sub(r"<\1>", name) for name in path)


def _filled(path: Path, there: Leaves) -> bool:
    """Return whether the container at ``path``, which is empty in another result, has contents in
    ``there``. The report then names the contents, and not the container."""
    return path not in there and any(other[: len(path)] == path for other in there)


def changed_rows(snapshot: Snapshot) -> ChangedRows:
    """Return the rows that have changed; a deleted row is GONE."""
    changed = {}
    for table in snapshot.changed():
        if table.label in LEFT_OUT:
            continue
        before, now = snapshot.read[table.label], table.read()
        rows: dict[Any, Any] = {pk: row for pk, row in now.items() if before.get(pk) != row}
        changed[table.label] = rows | {pk: GONE for pk in before if pk not in now}
    return changed


def _names(snapshot: Snapshot, rows: ChangedRows) -> dict[str, str]:
    """Return a name for the id of each new row: its table, and its number by id, or by contents if
    ids are random."""
    names: dict[str, str] = {}
    for table in snapshot.tables:
        new = [pk for pk in rows.get(table.label, {}) if pk not in snapshot.read[table.label]]
        if not table.numbered:
            new.sort(key=lambda pk: _sortable(rows[table.label][pk], pk))
        for number, pk in enumerate(new, 1):
            if table.numbered or isinstance(pk, UUID):
                names[str(pk)] = f"<{table.label} {number}>"
    return names


def _sortable(row: Any, pk: Any) -> str:
    return repr(
        [
            (name, value)
            for name, value in row.items()
            if value != pk and not isinstance(value, UUID | date | time)
        ]
    )


def _described(
    label: str, rows: dict[Any, Any], names: dict[str, str], ignored: Iterable[str]
) -> dict[str, Any]:
    counted = COUNTED_COLUMNS.get(label)
    described: dict[str, Any] = {}
    for pk, row in rows.items():
        name = names.get(str(pk), f"{label} {pk!r}")
        if row is GONE:
            described[name] = "deleted"
        elif label not in ignored:
            described[name] = {
                column: value
                for column, value in row.items()
                if (counted is None or column in counted) and f"{label}.{column}" not in ignored
            }
    return {} if label in ignored else described


def _flatten(path: Path, value: Any, into: Leaves) -> None:
    if isinstance(value, dict) and value:
        for name in value:
            _flatten((*path, str(name)), value[name], into)
    elif isinstance(value, list | tuple) and value:
        for number, item in enumerate(value, 1):
            _flatten((*path, str(number)), item, into)
    else:
        into[path] = value  # Keep empty containers: a call without arguments is an effect.


def _plain(value: Any, names: dict[str, str]) -> Any:
    """Return a value without ids and times."""
    if isinstance(value, datetime | date | time):
        return "<time>"
    if isinstance(value, Model):
        return names.get(str(value.pk), f"<{value._meta.label} {value.pk}>")
    if isinstance(value, UUID):
        return names.get(str(value), str(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return names.get(str(value), value)
    if isinstance(value, bytes | memoryview):
        value = bytes(value).decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        if value in names:
            return names[value]
        value = _NUMBER.sub(lambda found: names.get(found[0], found[0]), value)
        return _TIME.sub("<time>", value)
    return value


def _lettered(found: Leaves, random: set[Path]) -> Leaves:
    """Return the results with a name for each random value. Equal random values have the same
    name."""
    letters: dict[str, str] = {}
    lettered = dict(found)
    for path in found:
        if path in random:
            lettered[path] = letters.setdefault(
                repr(found[path]), f"<random value {len(letters) + 1}>"
            )
    return lettered
