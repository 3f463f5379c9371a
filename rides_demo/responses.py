"""The response bodies of Rocket Rides."""

import hashlib
import logging
from http import HTTPStatus

from django.http import JsonResponse

from rides_demo.models import RIDE_AMOUNT, RIDE_CURRENCY, Ride

logger = logging.getLogger("rides_demo")


def error_response(
    status: int, code: str, message: str, *, retry_after_seconds: int | None = None
) -> JsonResponse:
    """Return an error response of the service. Errors about keys come from the library."""
    headers = {} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)}
    return JsonResponse(
        {"error": {"code": code, "message": message}}, status=status, headers=headers
    )


def not_found() -> JsonResponse:
    """Return 404, both for a ride that does not exist and for the ride of another rider."""
    return error_response(HTTPStatus.NOT_FOUND, "ride_not_found", "There is no such ride.")


def database_unavailable() -> JsonResponse:
    """Return 503 for a database error, and log the exception that is being handled."""
    logger.exception("a database error ended the request")
    message = "The service cannot be reached at the moment. Please send the same request again."
    return error_response(
        HTTPStatus.SERVICE_UNAVAILABLE, "database_unavailable", message, retry_after_seconds=1
    )


def ride_response(ride: Ride, *, status: int = 200, message: str | None = None) -> JsonResponse:
    """Return ``ride`` as JSON with its ETag; a 201 also has a Location header."""
    body = (
        {"ride": _ride_json(ride)}
        if message is None
        else {"ride": _ride_json(ride), "message": message}
    )
    response = JsonResponse(body, status=status, headers={"ETag": ride_etag(ride)})
    if status == HTTPStatus.CREATED:
        response.headers["Location"] = f"/rides/{ride.pk}"
    return response


def ride_etag(ride: Ride) -> str:
    """Return the strong ETag of the response to ``GET /rides/<id>``."""
    return f'"{hashlib.sha256(JsonResponse(_ride_json(ride)).content).hexdigest()[:32]}"'


def _ride_json(ride: Ride) -> dict[str, object]:
    return {
        "id": ride.pk,
        "origin": ride.origin,
        "target": ride.target,
        "amount": RIDE_AMOUNT,
        "currency": RIDE_CURRENCY,
        "charge": ride.stripe_charge_id,
    }
