"""Error responses in the format of Stripe's API, for ``ERROR_RENDERER``."""

from collections.abc import Mapping

from django.http import HttpResponse, JsonResponse

_CODES = {"key_in_use": "idempotency_key_in_use"}


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
    """Return ``{"error": {"type", "code", "message"}}`` with the header ``Stripe-Should-Retry``.

    Set ``IDEMPOTENCY["ERROR_RENDERER"]`` to "idempotency.contrib.stripe_errors.render" and
    ``MISMATCH_STATUS`` to 400, the status by which Stripe's clients recognise an idempotency error.
    Source: the errors of Stripe's API, and the header ``Stripe-Should-Retry`` that its official
    clients follow.
    """
    kind = "idempotency_error" if code.startswith("key_") else "invalid_request_error"
    if status >= 500:
        kind = "api_error"
    error = {"type": kind, "code": _CODES.get(code, code), "message": f"{title}. {detail}"}
    return JsonResponse(
        {"error": error},
        status=status,
        headers={**headers, "Stripe-Should-Retry": "true" if retryable else "false"},
    )
