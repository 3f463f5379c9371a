"""Stripe's events: signed, delivered at least once, in no order; each takes effect once."""

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
from rides_demo import payments
from rides_demo.models import Ride
from rides_demo.responses import database_unavailable, error_response

#: How old a signature may be: an older one may have been recorded and sent again by somebody else.
TOLERANCE_SECONDS = 300


class ChargeNotRecorded(Exception):
    """The event is ahead of the request that made the charge."""


@csrf_exempt
@require_POST
def stripe_webhook(request: HttpRequest) -> HttpResponse:
    """Mark the ride of a successful charge as paid, once; 503 asks Stripe to deliver the event again."""
    signature = request.headers.get("Stripe-Signature", "")
    try:
        if not signature.isascii():  # the comparison of signatures takes nothing else
            raise ValueError
        event = stripe.Webhook.construct_event(
            request.body, signature, settings.STRIPE_WEBHOOK_SECRET, tolerance=TOLERANCE_SECONDS
        )
        event_id, kind, subject = event.id, event.type, event.data.object
    except (ValueError, RecursionError, AttributeError, TypeError, stripe.SignatureVerificationError):
        return error_response(HTTPStatus.BAD_REQUEST, "signature_invalid", "This is not an event that Stripe has signed.")
    try:
        with process_once("stripe", event_id) as first:
            if first and kind == "charge.succeeded":
                _mark_paid(subject)
    except (MessageInProgress, ChargeNotRecorded):
        message = "This event cannot be taken yet. Please deliver it again."
        return error_response(HTTPStatus.SERVICE_UNAVAILABLE, "event_too_early", message, retry_after_seconds=1)
    except (OperationalError, InterfaceError):
        return database_unavailable()
    return HttpResponse(status=HTTPStatus.OK)


def _mark_paid(charge: stripe.Charge) -> None:
    """Mark the ride that the charge names; one that is not a ride of this database is nobody's business here."""
    ride_id = payments.ride_id_of(charge)
    ride = Ride.objects.filter(pk=ride_id).first() if ride_id.isdecimal() and len(ride_id) < 19 else None
    if ride is None:
        return
    if ride.stripe_charge_id is None:
        raise ChargeNotRecorded
    Ride.objects.filter(pk=ride.pk, stripe_charge_id=charge.id, paid_at__isnull=True).update(paid_at=Now())
