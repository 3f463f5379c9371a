"""Arguments and results of operations: JSON, as it is stored in the row of a key."""

import json
from typing import Any

from idempotency import conf
from idempotency._engine.fence import StoredResponse
from idempotency._text import storable_json, summary
from idempotency.exceptions import Rejected

#: The codes under which results and refusals are stored.
RETURNED, REJECTED = 200, 422
_CANONICAL = json.JSONEncoder(
    separators=(",", ":"), sort_keys=True, allow_nan=False, ensure_ascii=False
)


class StoredResult(StoredResponse):
    """The JSON of a result, or of a refusal."""

    @property
    def event_detail(self) -> str:
        if self.code == RETURNED:
            return "result"
        return f"rejected: {summary(str(json.loads(self.body or b'{}')['code']))}"


def stored(value: Any, name: str) -> StoredResponse:
    """Return the result of the operation ``name`` as it is stored. Raises TypeError if the result
    is not JSON."""
    if isinstance(value, Rejected):
        parts = {"code": value.code, "message": value.message, "data": value.data}
        return StoredResult(REJECTED, {}, encoded(parts, f"The refusal of {name}"))
    return StoredResult(RETURNED, {}, encoded(value, f"The result of {name}"))


def restored(code: int, body: bytes | None) -> Any:
    """Return the result of a finished key. Raises Rejected for a refusal."""
    value = json.loads((body or b"null").decode())
    if code == REJECTED:
        raise Rejected(value["code"], value["message"], value["data"])
    return value


def encoded(value: Any, what: str) -> bytes:
    """Return a value as JSON. The JSON of equal values has equal bytes. Raises TypeError if the
    value is not JSON, or is too large."""
    try:
        found = storable_json(value, _CANONICAL)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{what} cannot be stored as JSON: {error}. Use ids and texts.") from None
    if (size := len(found)) > (most := conf.get().MAX_STORED_BODY_BYTES):
        raise TypeError(
            f"{what} has {size:,} bytes as JSON; at most {most:,} are stored"
            " (MAX_STORED_BODY_BYTES). Store a row, and use its id."
        )
    return found
