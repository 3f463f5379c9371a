"""The webhook for Stripe events.

Stripe delivers an event at least once, in any order; it is processed once.
"""

import re
from http import HTTPStatus

import stripe
from django.conf import settings
from django.db import InterfaceError, OperationalError
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from idempotency.exceptions import MessageInProgress
from idempotency.inbox import process_once
from rides_demo import payments, traces
from rides_demo.models import Ride
from rides_demo.responses import database_unavailable, error_response

#: The maximum age of a signature. The limit prevents replay attacks.
TOLERANCE_SECONDS = 300


class ChargeNotRecorded(Exception):
    """The event arrived before the charge was recorded."""


@csrf_exempt
@require_POST
def stripe_webhook(request: HttpRequest) -> HttpResponse:
    """Mark the ride of a charge as paid, once. After a 503 Stripe repeats the delivery."""
    signature = request.headers.get("Stripe-Signature", "")
    try:
        if not signature.isascii():  # the comparison of signatures accepts ASCII only
            raise ValueError
        event = stripe.Webhook.construct_event(
            request.body, signature, settings.STRIPE_WEBHOOK_SECRET, tolerance=TOLERANCE_SECONDS
        )
        event_id = _id(event.id)
        charge = _charge(event.data.object) if event.type == "charge.succeeded" else None
    except (
        ValueError,
        RecursionError,
        AttributeError,
        TypeError,
        stripe.SignatureVerificationError,
    ):
        return error_response(
            HTTPStatus.BAD_REQUEST,
            "signature_invalid",
            "The event has no valid signature of Stripe.",
        )
    try:
        with process_once("stripe", event_id) as first:
            if first and charge is not None:
                _mark_paid(*charge)
    except (MessageInProgress, ChargeNotRecorded):
        message = "This event cannot be processed yet. Please deliver it again."
        return error_response(
            HTTPStatus.SERVICE_UNAVAILABLE, "event_too_early", message, retry_after_seconds=1
        )
    except (OperationalError, InterfaceError):
        return database_unavailable()
    return HttpResponse(status=HTTPStatus.OK)


def _id(value: object) -> str:
    """Return ``value`` if it is a valid Stripe id; raise ValueError otherwise."""
    if not isinstance(value, str) or not re.fullmatch(r"\w{1,255}", value, re.ASCII):
        raise ValueError(value)
    return value


def _charge(charge: stripe.Charge) -> tuple[str, str | None, str]:
    """Return the ids of a charge, of its customer, if it has one, and of the ride that it names."""
    customer = getattr(charge, "customer", None)
    return _id(charge.id), None if customer is None else _id(customer), payments.ride_id_of(charge)


def _mark_paid(charge_id: str, customer_id: str | None, ride_id: str) -> None:
    """Mark the ride that the charge names; ignore a charge without a ride in this database.

    The ride of another tenant may have the same id, but it has another customer.
    """
    rides = Ride.objects.select_related("user", "idempotency_key")
    ride = rides.filter(pk=ride_id).first() if ride_id.isdecimal() and len(ride_id) < 19 else None
    if ride is None or customer_id not in (None, ride.user.stripe_customer_id):
        return
    traces.link_to(ride.idempotency_key)
    if ride.stripe_charge_id is None:
        raise ChargeNotRecorded
    Ride.objects.filter(pk=ride.pk, stripe_charge_id=charge_id, paid_at__isnull=True).update(
        paid_at=Now()
    )
