"""The keys of the list as a CSV file, without bodies and headers."""

import csv
from collections.abc import Iterable
from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponse
from django.utils.translation import gettext

#: The maximum number of keys in a file. If there are more, the last line says so.
MAX_ROWS = 20_000
_COLUMNS = (
    *("id", "created_at", "state", "request_method", "request_path", "response_code", "recovery_point", "attempts"),
    *("stuck_code", "stuck_reason", "last_error", "user_id", "scope", "idempotency_key"),
)
#: A spreadsheet interprets a text that begins with one of these characters as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_of(keys: QuerySet[Any]) -> HttpResponse:
    """Return the keys as an attachment, in the order of the query."""
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = 'attachment; filename="idempotency-keys.csv"'
    response["Cache-Control"] = "no-store"
    lines = csv.writer(response)
    lines.writerow(_COLUMNS)
    rows = list(keys.values_list(*_COLUMNS)[: MAX_ROWS + 1])
    lines.writerows(map(_cells, rows[:MAX_ROWS]))
    if len(rows) > MAX_ROWS:
        text = gettext("There are more than %(count)s keys. The others are not in this file.")
        lines.writerow([text % {"count": MAX_ROWS}])
    return response


def _cells(row: Iterable[Any]) -> list[str]:
    return [_cell(value) for value in row]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = value.isoformat() if hasattr(value, "isoformat") else str(value)
    text = text.encode("utf-8", "replace").decode()
    return f"'{text}" if text.startswith(_FORMULA) else text
