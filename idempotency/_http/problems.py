"""The error responses of this app, one function each. Source: RFC 9457 and draft-07 of the header's
specification.

A browser gets a page instead of a problem document. A project replaces the template
``idempotency/problem.html``.
"""

import math
from pathlib import Path
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.template import Context, Engine, TemplateDoesNotExist, loader

from idempotency import conf
from idempotency.exceptions import (
    InProgress,
    InterventionRequired,
    KeyReused,
    StuckCode,
    Unavailable,
)
from idempotency.http import not_stored

#: The exceptions of a run that have an error response.
REFUSALS = (InProgress, KeyReused, InterventionRequired, Unavailable)

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
    "time_limit_exceeded": "The request exceeded a time limit of the database",
    "not_replicated": "The response is not confirmed by a standby yet",
    "unknown_recovery_point": "This version of the service cannot continue the request",
}

_TEMPLATE = "idempotency/problem.html"
_FOLDER = Path(__file__).parents[1] / "templates"
#: The types of an error response, in the order of preference for a client that accepts them alike.
_TYPES = ("application/problem+json", "application/json", "text/html")

#: The arguments of ERROR_RENDERER, by name.
RENDERED_FROM = ("request", "status", "code", "title", "detail", "retryable", "headers")


class Problem(Exception):
    """An error response of this app; ``entry.answer_request`` catches it and returns its
    response."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        retryable: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.retryable = status, code, detail, retryable
        self.headers = {"Cache-Control": "no-store"}
        if retry_after is not None:
            # Whole seconds, at least one, rounded down so as not to exceed the time of the lock.
            self.headers["Retry-After"] = str(max(1, math.floor(retry_after)))

    def response(self, request: HttpRequest) -> HttpResponseBase:
        """Return the response to a request: that of ERROR_RENDERER if it is set, a page for a
        client that prefers HTML, else a problem document. An outer protected view does not store
        it."""
        return not_stored(self._rendered(request))

    def _rendered(self, request: HttpRequest) -> HttpResponseBase:
        limits = conf.get()
        members = {
            "title": _TITLES[self.code],
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "retryable": self.retryable,
        }
        if limits.ERROR_RENDERER is not None:
            rendered: HttpResponseBase = conf.named(limits.ERROR_RENDERER)(
                request=request, **members, headers=self.headers
            )
            return rendered
        if _prefers_html(request):
            content = _page(request, members | {"retry_after": self.headers.get("Retry-After", "")})
            return HttpResponse(content, status=self.status, headers=self.headers)
        document = {"type": limits.PROBLEM_TYPE_BASE + self.code, **members}
        return JsonResponse(
            document,
            status=self.status,
            headers=self.headers,
            content_type="application/problem+json",
        )


def _prefers_html(request: HttpRequest) -> bool:
    """Return whether the client prefers HTML to JSON. A client that accepts everything does not."""
    # Django compares types slowly, and most clients of an API name none of these.
    if "text/" not in request.META.get("HTTP_ACCEPT", "").lower():
        return False
    try:
        return request.get_preferred_type(_TYPES) == "text/html"
    except (LookupError, ValueError):  # a parameter in an unknown charset
        return False


def _page(request: HttpRequest, context: dict[str, Any]) -> str:
    """Return the page. Without the database no context processor is called, because a context
    processor may read the database."""
    try:
        template = loader.get_template(_TEMPLATE)
    except TemplateDoesNotExist:  # The project has no engine that looks into apps.
        return Engine(dirs=[str(_FOLDER)]).get_template(_TEMPLATE).render(Context(context))
    rendered: str = template.render(
        context, None if context["code"] == "database_unavailable" else request
    )
    return rendered


def key_missing() -> Problem:
    name = conf.get().HEADER_NAMES[0]
    return Problem(
        400,
        "key_missing",
        f"Send a unique key in the header {name}. Send the same key with each retry.",
    )


def key_invalid(detail: str) -> Problem:
    return Problem(400, "key_invalid", detail)


def body_incomplete() -> Problem:
    """The connection closed before the whole body arrived. No key was claimed."""
    return Problem(
        400, "body_incomplete", "Send the whole request again, with the same key.", retryable=True
    )


def scope_missing() -> Problem:
    """The request has no scope: no user, no session, or the function ``scope=`` returned
    nothing."""
    detail = (
        "The request does not identify its sender. Sign in, or send the session cookie or the"
        " credentials that this service requires."
    )
    return Problem(400, "scope_missing", detail)


def problem_of(refusal: InProgress | KeyReused | InterventionRequired | Unavailable) -> Problem:
    """Return the error response to a request whose run was refused, or did not end."""
    match refusal:
        case InProgress():
            return _key_in_use(refusal.retry_after)
        case KeyReused():
            return _key_reused()
        case InterventionRequired():
            return _key_stuck()
    return _UNAVAILABLE.get(refusal.code, _database_unavailable)()


def _key_reused() -> Problem:
    """The key was used for a different request, of which the response reveals nothing."""
    detail = "This key was used for a different request. Use a new key for each new request."
    return Problem(conf.get().MISMATCH_STATUS, "key_reused", detail)


def _key_in_use(retry_after: float) -> Problem:
    detail = "Retry after the time in Retry-After, with the same key."
    return Problem(409, "key_in_use", detail, retryable=True, retry_after=retry_after)


def _key_stuck() -> Problem:
    detail = (
        "This request requires manual intervention. Keep the key: after the intervention, a retry"
        " with it gets the answer."
    )
    return Problem(409, "key_stuck", detail)


def _unknown_recovery_point() -> Problem:
    """The running code does not know the recovery point of the key."""
    code = StuckCode.UNKNOWN_RECOVERY_POINT
    return Problem(503, code, "Retry later, with the same key.", retryable=True, retry_after=2)


def _conflict() -> Problem:
    """Each attempt in the process had a serialization failure."""
    return Problem(
        409,
        "conflict",
        "Retry with the same key. Work that was committed is not repeated.",
        retryable=True,
        retry_after=1,
    )


def _database_unavailable() -> Problem:
    """The database was lost before or during the view. A retry finds the work that was
    committed."""
    detail = "Send the request again, with the same key."
    return Problem(503, "database_unavailable", detail, retryable=True, retry_after=1)


def _time_limit_exceeded() -> Problem:
    """PostgreSQL has ended the transaction of the view at a time limit. A retry would probably
    exceed it too."""
    detail = (
        "The work of this request took too long and was rolled back. A retry with the same key runs"
        " it again, and may fail in the same way. Contact the operator of this service."
    )
    return Problem(503, "time_limit_exceeded", detail)


def _not_replicated() -> Problem:
    """A synchronous standby has not confirmed what the response reports. A retry waits for the
    confirmation again."""
    detail = "Retry after the time in Retry-After, with the same key."
    return Problem(503, "not_replicated", detail, retryable=True, retry_after=2)


_UNAVAILABLE = {
    "conflict": _conflict,
    "database_unavailable": _database_unavailable,
    "time_limit_exceeded": _time_limit_exceeded,
    "not_replicated": _not_replicated,
    "unknown_recovery_point": _unknown_recovery_point,
}
