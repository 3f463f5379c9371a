"""The bodies that Rocket Rides answers with."""

import hashlib
import logging
from http import HTTPStatus

from django.http import JsonResponse

from rides_demo.models import RIDE_AMOUNT, RIDE_CURRENCY, Ride

logger = logging.getLogger("rides_demo")


def error_response(status: int, code: str, message: str, *, retry_after_seconds: int | None = None) -> JsonResponse:
    """Return an error of the service; those about the key itself come from the library, as problem+json."""
    headers = {} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)}
    return JsonResponse({"error": {"code": code, "message": message}}, status=status, headers=headers)


def not_found() -> JsonResponse:
    """Return the 404 for a ride that is not there, or not the caller's: it looks the same."""
    return error_response(HTTPStatus.NOT_FOUND, "ride_not_found", "There is no such ride.")


def database_unavailable() -> JsonResponse:
    """Return the 503 for a database that does not answer, and log the error that is being handled."""
    logger.exception("the database cannot be reached")
    message = "The service cannot be reached at the moment. Please send the same request again."
    return error_response(HTTPStatus.SERVICE_UNAVAILABLE, "database_unavailable", message, retry_after_seconds=1)


def ride_response(ride: Ride, *, status: int = 200, message: str | None = None) -> JsonResponse:
    """Return ``ride`` as JSON, with its ETag, and with its Location when it is new."""
    body = {"ride": _ride_json(ride)} if message is None else {"ride": _ride_json(ride), "message": message}
    response = JsonResponse(body, status=status, headers={"ETag": ride_etag(ride)})
    if status == HTTPStatus.CREATED:
        response.headers["Location"] = f"/rides/{ride.pk}"
    return response


def ride_etag(ride: Ride) -> str:
    """Return the strong ETag of what ``GET /rides/<id>`` answers."""
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
