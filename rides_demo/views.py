"""The API of Rocket Rides. A client can repeat each request safely."""

import logging
from http import HTTPStatus
from uuid import UUID

from django.db import Error, IntegrityError, connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.cache import get_conditional_response
from django.utils.http import parse_etags
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from idempotency.decorators import idempotent
from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from rides_demo import payments, texts
from rides_demo.auth import token_required
from rides_demo.models import AuditRecord, Ride
from rides_demo.parameters import (
    TARGET_PARAMETERS,
    BadParameters,
    coordinates,
    ride_parameters_problem,
    target_parameters_problem,
)
from rides_demo.responses import error_response, not_found, ride_etag, ride_response

logger = logging.getLogger("rides_demo.views")

ACCEPTED = "Payment accepted. Your pilot is on their way!"


def refund_abandoned_ride(key: IdempotencyKey) -> HttpResponse:
    """Refund the charge of a ride that was not finished within the retention, and return 410."""
    ride = Ride.objects.select_related("user").filter(idempotency_key=key).first()
    charge_id = (ride.stripe_charge_id or payments.find_charge(ride)) if ride else None
    if charge_id:
        with key.call("refund") as call:
            payments.refund_charge(charge_id, call.key)
    message = (
        "The ride could not be booked in time. Nothing was charged, or the charge was refunded."
    )
    return error_response(HTTPStatus.GONE, "ride_abandoned", message)


@require_POST
@token_required
@idempotent(
    recovery_points=["ride_created", "charge_created"],
    validate=ride_parameters_problem,
    on_abandon=refund_abandoned_ride,
)
def create_ride(request: HttpRequest) -> HttpResponse:
    """Book a ride and charge it: local transactions before and after a call to Stripe."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        match recovery_point:
            case "started":
                with atomic_phase(key) as phase:
                    ride = Ride.objects.create(
                        user=request.user, idempotency_key=key, **coordinates(request)
                    )
                    _audit(request, "ride.created", ride)
                    phase.set_recovery_point("ride_created")
            case "ride_created":
                ride = Ride.objects.select_related("user").get(idempotency_key=key)
                try:
                    with key.call("charge", valid_seconds=payments.CHARGE_KEY_SECONDS) as call:
                        charge_id = payments.charge_ride(ride, call.key)
                except payments.PaymentDeclined as declined:
                    with atomic_phase(key) as phase:
                        phase.set_response(
                            error_response(
                                HTTPStatus.PAYMENT_REQUIRED, "payment_declined", str(declined)
                            )
                        )
                except payments.PaymentUnavailable as unavailable:
                    logger.warning("ride %s: the payment is unavailable: %s", ride.pk, unavailable)
                    return _try_again(
                        "payment_unavailable",
                        "The payment provider cannot be reached at the moment.",
                    )
                else:
                    with atomic_phase(key) as phase:
                        Ride.objects.filter(pk=ride.pk).update(stripe_charge_id=charge_id)
                        phase.set_recovery_point("charge_created")
            case "charge_created":
                # This read is outside the phase. In a serializable transaction, the read would
                # conflict with concurrent bookings.
                ride = Ride.objects.get(idempotency_key=key)
                with atomic_phase(key) as phase:
                    stage_job(
                        "rides_demo.jobs.send_ride_receipt",
                        {"ride_id": ride.pk, "shard": ride._state.db},
                    )
                    phase.set_response(
                        ride_response(ride, status=HTTPStatus.CREATED, message=ACCEPTED)
                    )
    return key.response()


@require_http_methods(["GET", "HEAD", "PATCH"])
@token_required
@idempotent(validate=target_parameters_problem)
def ride_detail(request: HttpRequest, ride_id: int) -> HttpResponse:
    """Return a ride of the caller, or change its target with PATCH. Only a PATCH needs a key."""
    rides = Ride.objects.filter(user=request.user)
    if request.method == "PATCH":
        found = rides.select_for_update().filter(pk=ride_id).first()
        return _change_target(request, found) if found else not_found()
    found = rides.filter(pk=ride_id).first()
    if found is None:
        return not_found()
    return get_conditional_response(request, etag=ride_etag(found), response=ride_response(found))


def _change_target(request: HttpRequest, ride: Ride) -> HttpResponse:
    """Set the target if If-Match names the current ETag.

    A completed PATCH is replayed before this check.
    """
    if "If-Match" not in request.headers:
        message = "Please send the ETag of the ride in the If-Match header."
        return error_response(HTTPStatus.PRECONDITION_REQUIRED, "precondition_required", message)
    seen = parse_etags(request.headers["If-Match"])
    if "*" not in seen and ride_etag(ride) not in seen:
        message = (
            "The ride has changed. Please fetch the ride and repeat the change with its new ETag."
        )
        return error_response(HTTPStatus.PRECONDITION_FAILED, "precondition_failed", message)
    if ride.picked_up_at is not None:
        return error_response(
            HTTPStatus.CONFLICT, "ride_picked_up", "The target cannot change after the pick-up."
        )
    for name, value in coordinates(request, TARGET_PARAMETERS).items():
        setattr(ride, name, value)
    ride.save(update_fields=TARGET_PARAMETERS)
    _audit(request, "ride.target_changed", ride)
    return ride_response(ride)


@require_POST
@token_required
@idempotent(recovery_points=[])
def text_pilot(request: HttpRequest, ride_id: int) -> HttpResponse:
    """Text the pilot that the rider is waiting.

    The text service has no idempotency keys, so the call is made at most once: no retry repeats it
    while its result is unknown.
    """
    key = request.idempotency_key
    if not Ride.objects.filter(user=request.user, pk=ride_id).exists():
        return not_found()
    for _ in key.phases():
        with key.call("text", at_most_once=True) as call:
            if call.due:
                try:
                    call.record(texts.send_text(ride_id, "Your rider is waiting."))
                except texts.NotSent:
                    call.retryable()
                    return _try_again(
                        "text_unavailable", "The text service cannot be reached at the moment."
                    )
        with atomic_phase(key) as phase:
            phase.set_response(JsonResponse({"message": call.result}, status=HTTPStatus.CREATED))
    return key.response()


@require_http_methods(["PUT"])
@token_required
def ride_by_ref(request: HttpRequest, client_ref: UUID) -> HttpResponse:
    """Create a ride with an id that the client chose. The id makes the request idempotent, so it
    needs no key."""
    try:
        wanted = coordinates(request)
    except BadParameters as problem:
        return problem.response()
    try:
        with transaction.atomic():
            ride = Ride.objects.create(user=request.user, client_ref=client_ref, **wanted)
            _audit(request, "ride.created", ride)
    except IntegrityError:
        ride = Ride.objects.get(user=request.user, client_ref=client_ref)
        if any(getattr(ride, name) != value for name, value in wanted.items()):
            return error_response(
                HTTPStatus.CONFLICT, "ride_differs", "Another ride has this reference."
            )
        return ride_response(ride)
    return ride_response(ride, status=HTTPStatus.CREATED)


@csrf_exempt
@require_GET
def healthz(request: HttpRequest) -> HttpResponse:
    """Return 200 if the database is available, 503 otherwise."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except Error:
        return JsonResponse({"database": "unavailable"}, status=HTTPStatus.SERVICE_UNAVAILABLE)
    return JsonResponse({"database": "ok"})


def _try_again(code: str, message: str) -> HttpResponse:
    """Return a 503, which is not stored. A retry continues from the last recovery point."""
    message = f"{message} Please send the same request again."
    return error_response(
        HTTPStatus.SERVICE_UNAVAILABLE,
        code,
        message,
        retry_after_seconds=payments.RETRY_AFTER_SECONDS,
    )


def _audit(request: HttpRequest, action: str, ride: Ride) -> None:
    """Add an audit record in the transaction of the change."""
    AuditRecord.objects.create(
        action=action,
        data={"origin": ride.origin, "target": ride.target},
        # Only a request over a unix socket has no address.
        origin_ip=request.META.get("REMOTE_ADDR") or "127.0.0.1",
        resource_type="ride",
        resource_id=ride.pk,
        user=request.user,
    )
