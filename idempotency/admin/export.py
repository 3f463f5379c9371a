"""The keys of the list as a CSV file, without bodies and headers."""

import csv
import re
from typing import Any

from django.db.models import QuerySet
from django.db.models.functions import Left
from django.http import HttpResponse
from django.utils.translation import gettext

from idempotency._text import cut

#: The maximum number of keys in a file. If there are more, the last line says so.
MAX_ROWS = 20_000
#: A longer text is cut, so that the memory for a file is bounded: a path may have several
#: kilobytes.
MAX_CHARACTERS = 500
_COLUMNS = (
    "id", "created_at", "state", "request_method", "request_path", "response_code",
    "recovery_point", "attempts", "stuck_code", "stuck_reason", "last_error", "user_id", "scope",
    "idempotency_key",
)  # fmt: skip
_LONG_COLUMNS = ("request_path", "stuck_reason", "last_error")
#: A spreadsheet interprets a text that begins with one of these signs as a formula, also in full
#: width. It may split a cell at another separator than the comma, such as the semicolon in Germany.
_FORMULA = re.compile(r"""(^|[;,|\t\r\n])([\s"']*[=+\-@\uff1d\uff0b\uff0d\uff20])""")


def csv_of(keys: QuerySet[Any]) -> HttpResponse:
    """Return the keys as an attachment, in the order of the query."""
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = 'attachment; filename="idempotency-keys.csv"'
    response["Cache-Control"] = "no-store"
    lines = csv.writer(response)
    lines.writerow(_COLUMNS)
    columns = [
        Left(name, MAX_CHARACTERS + 1) if name in _LONG_COLUMNS else name for name in _COLUMNS
    ]
    for number, row in enumerate(keys.values_list(*columns)[: MAX_ROWS + 1].iterator()):
        if number == MAX_ROWS:
            text = gettext("There are more than %(count)s keys. The others are not in this file.")
            lines.writerow([text % {"count": MAX_ROWS}])
        else:
            lines.writerow([_cell(value) for value in row])
    return response


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = value.isoformat() if hasattr(value, "isoformat") else str(value)
    text = cut(text.encode("utf-8", "replace").decode(), MAX_CHARACTERS)
    return _FORMULA.sub(r"\1'\2", text)
