"""The rules of the retries, without I/O: the key of a call, the outcomes that are retried, the
pauses and the deadline."""

import json
import os
import random
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any
from uuid import UUID

#: Requests with other methods get no key and no retries; their responses may stream.
UNSAFE_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})

RETRIED_STATUSES = frozenset({408, 425, 429})


@dataclass(frozen=True, kw_only=True)
class Retries:
    """The limits of the retries.

    - ``deadline_seconds``: no retry begins later than this after the first attempt. Keep it above
      LOCK_TIMEOUT_SECONDS of the server (90 by default): if a process of the server is killed,
      retries get 409 until its lock has expired. Keep it below the retention of the server (72
      hours by default): after the retention, a retry is a new request.
    - ``max_attempts``: the maximum number of attempts, the first included. With ``None`` only the
      deadline limits them.
    - ``first_pause_seconds``: the upper bound of the first pause; it doubles with each attempt.
    - ``longest_pause_seconds``: the maximum of that bound. Each pause is random below its bound,
      and is added to ``Retry-After``.
    """

    deadline_seconds: float = 120
    max_attempts: int | None = None
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 10
    key_header: str = "Idempotency-Key"


def new_key() -> str:
    """Return a new key for the header: a quoted UUIDv7. It is ordered by time, which suits a
    database index."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return f'"{UUID(int=value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62)}"'


class ClientCall:
    """The attempts of one call. It sets the key in ``headers`` if they have none."""

    def __init__(self, retries: Retries, headers: MutableMapping[str, Any]) -> None:
        self._retries, self._attempts = retries, 0
        self._deadline = time.monotonic() + retries.deadline_seconds
        if retries.key_header not in headers:
            headers[retries.key_header] = new_key()

    def begin_attempt(self) -> float:
        """Count an attempt, and return the seconds that are left for it."""
        self._attempts += 1
        return max(self._deadline - time.monotonic(), 0.001)

    def pause_after_error(self) -> float | None:
        """Return the seconds to wait after an incomplete exchange, or None if there is no further
        attempt."""
        return self._pause(0)

    def pause_after_answer(
        self, status: int, headers: Mapping[str, Any], content: Callable[[], bytes]
    ) -> float | None:
        """Return the seconds to wait before the next attempt, or None if the answer is final or
        there is no further attempt.

        The function ``content`` returns the decoded body. It is called only for a problem+json.
        """
        asked = _retry_after_seconds(headers)
        if (retryable := _member_retryable(status, headers, content)) is None:
            retryable = (
                status in RETRIED_STATUSES
                or status >= 500
                or (status in (409, 423) and asked is not None)
            )
        return self._pause(asked or 0) if retryable else None

    def _pause(self, asked: float) -> float | None:
        if self._attempts == self._retries.max_attempts:
            return None
        doubled = self._retries.first_pause_seconds * 2 ** min(self._attempts - 1, 30)
        pause = asked + random.uniform(0, min(doubled, self._retries.longest_pause_seconds))  # nosec B311  # spreads retries; no secret
        return pause if time.monotonic() + pause < self._deadline else None


def _member_retryable(
    status: int, headers: Mapping[str, Any], content: Callable[[], bytes]
) -> bool | None:
    if status < 400 or not headers.get("Content-Type", "").lower().startswith(
        "application/problem+json"
    ):
        return None
    try:
        problem = json.loads(content())
    except (ValueError, RecursionError):
        return None
    member = problem.get("retryable") if isinstance(problem, dict) else None
    return member if isinstance(member, bool) else None


def _retry_after_seconds(headers: Mapping[str, Any]) -> float | None:
    """Return Retry-After in seconds, also if it is a date; None if it is absent or invalid."""
    value = headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        until, now = _timestamp(value), _timestamp(headers.get("Date", ""))
        # Compare with the Date of the response if it has one, because the clock of the server may
        # differ.
        return max(until - (now or time.time()), 0) if until is not None else None
    return seconds if seconds >= 0 else None


def _timestamp(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).replace(tzinfo=UTC).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
