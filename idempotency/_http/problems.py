"""The error responses of this app, one function each. Source: RFC 9457 and draft-07 of the header's
specification.

A browser gets a page instead of a problem document. A project replaces the template
``idempotency/problem.html``.
"""

import math
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.template import Context, Engine, TemplateDoesNotExist, loader

from idempotency import conf
from idempotency._http.not_stored import not_stored
from idempotency.exceptions import (
    CONFLICTS,
    InProgress,
    InterventionRequired,
    KeyReused,
    Rejected,
    Unavailable,
    Unfinished,
)

#: The codes of Unavailable that are codes of problems.
_UNAVAILABLE = (
    "conflict", "database_unavailable", "time_limit_exceeded", "not_replicated",
    "unknown_recovery_point",
)  # fmt: skip
#: The exceptions of the run of a view that have an error response.
REFUSALS = (*CONFLICTS, Unavailable)


class _Kind(NamedTuple):
    title: str
    status: int
    detail: str = ""
    retryable: bool = False
    retry_after: float | None = None


_LATER = "Retry after the time in Retry-After, with the same key."
#: The problems by their codes.
KINDS = {
    "key_missing": _Kind("The idempotency key is missing", 400),
    "key_invalid": _Kind("The idempotency key is not valid", 400),
    # The connection closed before the whole body arrived. No key was claimed.
    "body_incomplete": _Kind(
        "The body of the request is incomplete",
        400,
        "Send the whole request again, with the same key.",
        retryable=True,
    ),
    # The request has no user, no session, or the function scope= returned nothing.
    "scope_missing": _Kind(
        "The scope of the idempotency key is missing",
        400,
        "The request does not identify its sender. Sign in, or send the session cookie or the"
        " credentials that this service requires.",
    ),
    # The response reveals nothing of the request for which the key was used. Its status is
    # MISMATCH_STATUS.
    "key_reused": _Kind(
        "The idempotency key was used for another request",
        0,
        "This key was used for a different request. Use a new key for each new request.",
    ),
    "key_in_use": _Kind(
        "A request with this idempotency key is in progress", 409, _LATER, retryable=True
    ),
    "key_stuck": _Kind(
        "The request with this idempotency key requires manual intervention",
        409,
        "This request requires manual intervention. Keep the key: after the intervention, a retry"
        " with it gets the answer.",
    ),
    # Each attempt in the process had a serialization failure.
    "conflict": _Kind(
        "The request conflicts with concurrent requests",
        409,
        "Retry with the same key. Work that was committed is not repeated.",
        retryable=True,
        retry_after=1,
    ),
    # The database was lost before or during the view. A retry finds the work that was committed.
    "database_unavailable": _Kind(
        "The database cannot be reached",
        503,
        "Send the request again, with the same key.",
        retryable=True,
        retry_after=1,
    ),
    # PostgreSQL has ended the transaction of the view. A retry would probably exceed the time
    # limit too.
    "time_limit_exceeded": _Kind(
        "The request exceeded a time limit of the database",
        503,
        "The work of this request took too long and was rolled back. A retry with the same key runs"
        " it again, and may fail in the same way. Contact the operator of this service.",
    ),
    # A synchronous standby has not confirmed what the response reports. A retry waits again.
    "not_replicated": _Kind(
        "The response is not confirmed by a standby yet",
        503,
        _LATER,
        retryable=True,
        retry_after=2,
    ),
    # The running code does not know the recovery point of the key.
    "unknown_recovery_point": _Kind(
        "This version of the service cannot continue the request",
        503,
        "Retry later, with the same key.",
        retryable=True,
        retry_after=2,
    ),
    # An operation failed after it had begun something. The completer continues it.
    "unfinished": _Kind(
        "The operation is not finished",
        503,
        "The operation failed after a commit or a call, and will be continued. " + _LATER,
        retryable=True,
        retry_after=2,
    ),
}
_REJECTED = _Kind("The operation was rejected", 422)

_TEMPLATE = "idempotency/problem.html"
_FOLDER = Path(__file__).parents[1] / "templates"
#: The media types of an error response, in order of preference if a client accepts them alike.
_TYPES = ("application/problem+json", "application/json", "text/html")

#: The arguments of ERROR_RENDERER, by name.
RENDERED_FROM = ("request", "status", "code", "title", "detail", "retryable", "headers")


class Problem(Exception):
    """An error response of this app; ``entry.respond`` catches it and returns its response."""

    def __init__(
        self, code: str, kind: _Kind | None = None, *, data: Any = None, **given: Any
    ) -> None:
        """Make a problem of a kind; ``given`` replaces fields of it."""
        kind = (kind or KINDS[code])._replace(**given)
        super().__init__(kind.detail)
        self.code, self.title, self.status, self.data = code, kind.title, kind.status, data
        self.detail, self.retryable = kind.detail, kind.retryable
        #: Libraries of GraphQL add these to the error that a resolver raises.
        self.extensions = {"code": code}
        self.is_rejection = kind.title == _REJECTED.title
        self.headers = {"Cache-Control": "no-store"}
        if kind.retry_after is not None:
            # Whole seconds, at least one, rounded down so as not to exceed the time of the lock.
            self.headers["Retry-After"] = str(max(1, math.floor(kind.retry_after)))

    def response(self, request: HttpRequest) -> HttpResponseBase:
        """Return the response to a request: that of ERROR_RENDERER if it is set, a page for a
        client that prefers HTML, else a problem document. An outer protected view stores only a
        refusal of an operation."""
        response = self._rendered(request)
        return response if self.is_rejection else not_stored(response)

    def _rendered(self, request: HttpRequest) -> HttpResponseBase:
        limits = conf.get()
        names = ("title", "status", "detail", "code", "retryable")
        members: dict[str, Any] = {name: getattr(self, name) for name in names}
        if limits.ERROR_RENDERER is not None:
            render: Callable[..., HttpResponseBase] = conf.named(limits.ERROR_RENDERER)
            if self.data is not None and _takes_data(render):
                members["data"] = self.data
            return render(request=request, **members, headers=self.headers)
        if _prefers_html(request):
            members["is_rejection"] = self.is_rejection
            members["retry_after"] = self.headers.get("Retry-After", "")
            return HttpResponse(_page(request, members), status=self.status, headers=self.headers)
        document = {"type": limits.PROBLEM_TYPE_BASE + self.code, **members}
        if self.data is not None:
            document["data"] = self.data
        kind = "application/problem+json"
        return JsonResponse(document, status=self.status, headers=self.headers, content_type=kind)


def _takes_data(render: Callable[..., Any]) -> bool:
    """Return whether a renderer takes the data of a refusal, which most problems do not have."""
    parameters = signature(render).parameters.values()
    return any(each.name == "data" or each.kind is Parameter.VAR_KEYWORD for each in parameters)


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
    detail = f"Send a unique key in the header {name}. Send the same key with each retry."
    return Problem("key_missing", detail=detail)


def key_invalid(detail: str) -> Problem:
    return Problem("key_invalid", detail=detail)


def problem_of(refusal: Exception) -> Problem:
    """Return the error response to a request whose run was refused, or did not end."""
    match refusal:
        case Rejected(code=code, data=data):
            return Problem(code, _REJECTED, data=data, detail=str(refusal))
        case Unfinished():
            return Problem("unfinished")
        case InProgress():
            return Problem("key_in_use", retry_after=refusal.retry_after)
        case KeyReused():
            return Problem("key_reused", status=conf.get().MISMATCH_STATUS)
        case InterventionRequired():
            return Problem("key_stuck")
    code = getattr(refusal, "code", "")
    return Problem(code if code in _UNAVAILABLE else "database_unavailable")
