"""Error responses in the format of the Agentic Commerce Protocol, for ``ERROR_RENDERER``."""

from collections.abc import Mapping

from django.http import HttpResponse, JsonResponse

_CODES = {
    "key_missing": "idempotency_key_required",
    "key_reused": "idempotency_conflict",
    "key_in_use": "idempotency_in_flight",
}
#: Errors below 500 whose cause is not in the request.
_OF_THE_SERVER = ("key_stuck", "conflict")


def render(
    *,
    status: int,
    code: str,
    title: str,
    detail: str,
    retryable: bool,
    headers: Mapping[str, str],
    **members: object,
) -> HttpResponse:
    """Return the flat object ``{"type", "code", "message"}``.

    Set ``IDEMPOTENCY["ERROR_RENDERER"]`` to "idempotency.contrib.acp_errors.render". The statuses
    of the protocol are the defaults of this app.
    Source: Agentic Commerce Protocol, RFC "Agentic Checkout", section 6.4, and the schema ``Error``
    of version 2026-04-17.
    """
    kind = "invalid_request"
    if status >= 500 or code in _OF_THE_SERVER:
        kind = "service_unavailable" if status >= 500 and retryable else "processing_error"
    error = {"type": kind, "code": _CODES.get(code, code), "message": f"{title}. {detail}"}
    return JsonResponse(error, status=status, headers=dict(headers))
