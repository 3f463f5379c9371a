"""The mark of responses that are sent once and never replayed."""

from typing import TypeVar

from django.http import HttpResponseBase

Response = TypeVar("Response", bound=HttpResponseBase)


def not_stored(response: Response, *, keep_writes: bool = False) -> Response:
    """Mark a response that must not be stored.

    A plain view is rolled back; a phased view stays at its last recovery point. A retry runs the
    view again, and so does the completer, unless the response is a 4xx and the key is untouched.

    With ``keep_writes``, the writes of a plain view are committed, and the key is free: each retry
    runs the view again and writes again. The plain view must return the response, because an
    exception rolls its writes back. In a phased view ``keep_writes`` changes nothing: its phases,
    and its writes outside a phase, are already committed.
    """
    response.idempotency_not_stored = True  # type: ignore[attr-defined]
    response.idempotency_keeps_writes = keep_writes  # type: ignore[attr-defined]
    return response


def is_not_stored(response: HttpResponseBase) -> bool:
    """Return whether ``not_stored()`` has marked the response."""
    return getattr(response, "idempotency_not_stored", False)


def keeps_writes(response: HttpResponseBase) -> bool:
    """Return whether ``not_stored()`` has marked the response with ``keep_writes``."""
    return getattr(response, "idempotency_keeps_writes", False)
