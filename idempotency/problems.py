"""The answers of this app, not of the view, one function each. Source: RFC 9457 and draft-07 of the header's specification."""

import math

from django.http import HttpResponseBase, JsonResponse

from idempotency import conf
from idempotency.models import REFUSED_WHEN_REBUILT, UNKNOWN_RECOVERY_POINT

#: The longest Retry-After of a key in use: most requests end long before their lock expires.
LOOK_AGAIN_SECONDS = 2

_TITLES = {
    "key_missing": "The idempotency key is missing",
    "key_invalid": "The idempotency key is not valid",
    "body_incomplete": "The body of the request is incomplete",
    "scope_missing": "The scope of the idempotency key is missing",
    "key_reused": "The idempotency key was used for another request",
    "key_in_use": "A request with this idempotency key is in progress",
    "key_stuck": "The request with this idempotency key requires manual intervention",
    "conflict": "The request conflicts with concurrent requests",
    "database_unavailable": "The database cannot be reached",
    "unknown_recovery_point": "This version of the service cannot continue the request",
}


class Problem(Exception):
    """An error response of this app, raised where the error is found; the decorator returns it."""

    def __init__(
        self, status: int, code: str, detail: str, *, retryable: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.retryable = status, code, detail, retryable
        self.headers = {"Cache-Control": "no-store"}
        if retry_after is not None:
            # Whole seconds, at least one, and not beyond the end of the lock.
            self.headers["Retry-After"] = str(max(1, math.floor(retry_after)))

    def response(self) -> HttpResponseBase:
        """Return the answer, through the project's ERROR_RENDERER if there is one. No protected view around stores it."""
        response = self._rendered()
        response.idempotency_not_stored = True  # type: ignore[attr-defined]
        return response

    def _rendered(self) -> HttpResponseBase:
        limits = conf.get()
        members = {
            "title": _TITLES[self.code],
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "retryable": self.retryable,
        }
        if limits.ERROR_RENDERER is not None:
            rendered: HttpResponseBase = conf.named(limits.ERROR_RENDERER)(**members, headers=self.headers)
            return rendered
        content = {"type": limits.PROBLEM_TYPE_BASE + self.code, **members}
        return JsonResponse(content, status=self.status, headers=self.headers, content_type="application/problem+json")


def key_missing() -> Problem:
    """The request needs a key and has none."""
    name = conf.get().HEADER_NAMES[0]
    return Problem(400, "key_missing", f"Send a unique key in the header {name}. Send the same key with each retry.")


def key_invalid(detail: str) -> Problem:
    """The header does not carry one valid key."""
    return Problem(400, "key_invalid", detail)


def body_incomplete() -> Problem:
    """The connection closed before the whole body arrived. No key was claimed."""
    return Problem(400, "body_incomplete", "Send the whole request again, with the same key.", retryable=True)


def scope_missing() -> Problem:
    """The request has neither a user nor a session to which the key could belong."""
    return Problem(400, "scope_missing", "Sign in, or send the session cookie: a key is valid for one user or session only.")


def key_reused() -> Problem:
    """The key came with another request before. Nothing of that one is shown."""
    detail = "This key was used for a different request. Use a new key for each new request."
    return Problem(conf.get().MISMATCH_STATUS, "key_reused", detail)


def key_in_use(lock_seconds: float = LOOK_AGAIN_SECONDS) -> Problem:
    """Another run holds the key, for ``lock_seconds`` more at the most."""
    detail = "Retry after the time in Retry-After, with the same key."
    return Problem(409, "key_in_use", detail, retryable=True, retry_after=min(lock_seconds, LOOK_AGAIN_SECONDS))


def key_stuck(stuck_code: str) -> Problem:
    """The key is stuck, or the running code does not know its recovery point."""
    if stuck_code == UNKNOWN_RECOVERY_POINT:
        detail = "Retry later, with the same key."
        return Problem(503, stuck_code, detail, retryable=True, retry_after=LOOK_AGAIN_SECONDS)
    if stuck_code == REFUSED_WHEN_REBUILT:
        return key_in_use()
    return Problem(409, "key_stuck", "Do not retry. This request requires manual intervention.")


def conflict() -> Problem:
    """Each attempt inside the process met a serialization failure."""
    return Problem(
        409,
        "conflict",
        "Retry with the same key. The request continues from its last recovery point.",
        retryable=True,
        retry_after=1,
    )


def database_unavailable() -> Problem:
    """The database went away, before the view or under it. What was committed will be found by the next request."""
    detail = "Send the request again, with the same key."
    return Problem(503, "database_unavailable", detail, retryable=True, retry_after=1)
