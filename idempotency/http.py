"""Mark responses that are sent once and never replayed."""

from typing import TypeVar

from django.http import HttpResponseBase

Response = TypeVar("Response", bound=HttpResponseBase)


def not_stored(response: Response) -> Response:
    """Mark a response that must not be stored.

    A plain view is rolled back; a phased view stays at its last recovery point. A retry runs the view again. The completer
    does too, unless the response is a 4xx and nothing was begun.
    """
    response.idempotency_not_stored = True  # type: ignore[attr-defined]
    return response


def is_not_stored(response: HttpResponseBase) -> bool:
    """Return whether ``not_stored()`` has marked the response."""
    return getattr(response, "idempotency_not_stored", False)
