"""What a caller gets: the response to a request, or the result or exception of an operation."""

import json
from dataclasses import dataclass
from typing import Any, Self

from idempotency import conf
from idempotency._http.responses import stored_headers
from idempotency.exceptions import (
    InProgress,
    InterventionRequired,
    KeyReused,
    Rejected,
    Unfinished,
)

#: The statuses of exceptions of operations that are answers, as of the responses of views.
_STATUSES = {Rejected: 422, KeyReused: 422, InProgress: 409, InterventionRequired: 409}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a client: a response or a result. If Django's test client or an operation
    raises an exception, the answer is a 500 with this exception."""

    status: int
    content: bytes = b""
    content_type: str = ""
    location: str = ""
    #: The lower-case names of the headers that a replay has too.
    headers: frozenset[str] = frozenset()
    error: BaseException | None = None

    @classmethod
    def of_response(cls, response: Any, error: BaseException | None) -> Self:
        """Return the answer for a response. ``error`` is the exception of the view, if any."""
        headers = response.headers
        content = (
            b"".join(response.streaming_content)
            if getattr(response, "streaming", False)
            else bytes(response.content)
        )
        return cls(
            response.status_code,
            content,
            headers.get("Content-Type", ""),
            headers.get("Location", ""),
            # Middleware adds Vary: Cookie when the view reads the session or the CSRF token.
            frozenset(map(str.lower, stored_headers(response)))
            - {conf.get().REPLAYED_HEADER.lower(), "vary"},
            error if response.status_code >= 500 else None,
        )

    @classmethod
    def of_result(cls, result: Any) -> Self:
        """Return the answer for the result of an operation."""
        return cls(200, json.dumps(result, default=str).encode(), "application/json")

    @classmethod
    def of_exception(cls, error: Exception) -> Self:
        """Return the answer for an exception of an operation. An exception that does not
        report the end of the operation is the error of a 500."""
        if (status := _STATUSES.get(type(error))) is None:
            cause = error.__cause__ if isinstance(error, Unfinished) else None
            return cls(500, error=cause or error)
        told = json.dumps([type(error).__name__, *error.args], default=str)
        return cls(status, told.encode(), "application/json")

    def body(self) -> Any:
        """Return the body as data if it is JSON, else as text."""
        if "json" in self.content_type:
            try:
                return json.loads(self.content)
            except ValueError:
                pass
        return self.content.decode("utf-8", "replace")
