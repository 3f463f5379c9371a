"""Payments with the official Stripe client: one charge per ride, one transfer per payout.

Source: https://docs.stripe.com/api/idempotent_requests. Stripe stores a 500 that occurred during
execution, and replays it for 24 hours like any other result.
"""

import functools
import logging
from collections.abc import Callable

import requests
import stripe
from django.conf import settings

from idempotency import conf
from idempotency.exceptions import KeyStuck
from rides_demo.models import RIDE_AMOUNT, RIDE_CURRENCY, Payout, Ride

logger = logging.getLogger("rides_demo.payments")

#: An unconfirmed call is not repeated after 23 hours, because Stripe deletes a key after 24 hours.
KEY_HOURS = 23
CHARGE_KEY_SECONDS = KEY_HOURS * 3600
#: The Retry-After header of a response while Stripe cannot be reached.
RETRY_AFTER_SECONDS = 1


class PaymentDeclined(Exception):
    """The provider declined the card; the message is the provider's text for the customer."""


class TransferRefused(Exception):
    """Stripe made no transfer, for example to an account that is closed. ``code`` is Stripe's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class PaymentUnavailable(Exception):
    """The result of the payment is unknown: repeat the call with the same key."""


def stripe_client() -> stripe.StripeClient:
    """Return the Stripe client that the settings describe.

    The client does not retry: the client of the service retries the whole request.
    """
    return _stripe_client(settings.STRIPE_API_KEY, settings.STRIPE_API_BASE, timeout_seconds())


def timeout_seconds() -> float:
    """Return the timeout of a call to Stripe: two calls take less than the lock timeout of the
    key."""
    return min(10, 0.4 * conf.get().LOCK_TIMEOUT_SECONDS)


@functools.lru_cache(maxsize=1)
def _stripe_client(api_key: str, base: str | None, timeout_seconds: float) -> stripe.StripeClient:
    session = requests.Session()
    session.trust_env = not base  # a proxy of the environment cannot reach the sandbox
    return stripe.StripeClient(
        api_key,
        base_addresses={"api": base} if base else {},
        http_client=stripe.RequestsClient(timeout=timeout_seconds, session=session),
        max_network_retries=0,
    )


def create_customer(email: str, source: str, downstream_key: str) -> str:
    """Create a customer who pays with ``source``; return its id, the same id for the same key."""
    customer = stripe_client().v1.customers.create(
        {"email": email, "source": source}, {"idempotency_key": downstream_key}
    )
    return customer.id


def charge_ride(ride: Ride, downstream_key: str) -> str:
    """Charge $20.00 for ``ride``; return the id of the charge, the same id for the same key.

    The function calls Stripe, so no transaction may be open.

    Raises PaymentDeclined.
    Raises PaymentUnavailable.
    Raises KeyStuck if Stripe stored a failure for the key and lists no charge for the ride.
    """
    try:
        charge = stripe_client().v1.charges.create(
            {
                "amount": RIDE_AMOUNT,
                "currency": RIDE_CURRENCY,
                "customer": ride.user.stripe_customer_id,
                "description": f"Charge for ride {ride.pk}",
                "metadata": {"ride_id": str(ride.pk)},
            },
            {"idempotency_key": downstream_key},
        )
    except stripe.CardError as error:
        raise PaymentDeclined(error.user_message or "Your card was declined.") from error
    except (stripe.InvalidRequestError, stripe.IdempotencyError):
        raise  # the request is invalid: a bug that no retry resolves
    except stripe.StripeError as error:
        if _is_stored_failure(error):
            return _made_in_spite_of(error, f"charge for ride {ride.pk}", lambda: find_charge(ride))
        raise _unavailable(error) from error
    return charge.id


def find_charge(ride: Ride) -> str | None:
    """Return the id of the successful charge that names ``ride`` in its metadata, or None.

    Raises stripe.StripeError if the request to Stripe fails.
    """
    charges = stripe_client().v1.charges.list(
        {"customer": ride.user.stripe_customer_id, "limit": 100}
    )
    for charge in charges.auto_paging_iter():
        if charge.status == "succeeded" and ride_id_of(charge) == str(ride.pk):
            return charge.id
    return None


def refund_charge(charge_id: str, downstream_key: str) -> None:
    """Refund the whole charge, once for the same key.

    Raises stripe.StripeError if the request to Stripe fails.
    """
    stripe_client().v1.refunds.create({"charge": charge_id}, {"idempotency_key": downstream_key})


def pay_out(payout: Payout, downstream_key: str) -> str:
    """Transfer a payout to its pilot; return the id of the transfer, the same id for the same key.

    The function calls Stripe, so no transaction may be open.

    Raises TransferRefused.
    Raises PaymentUnavailable.
    Raises KeyStuck if Stripe stored a failure for the key and lists no transfer for the payout.
    """
    try:
        transfer = stripe_client().v1.transfers.create(
            {
                "amount": payout.cents,
                "currency": RIDE_CURRENCY,
                "destination": payout.pilot.stripe_account_id,
                "description": f"Rides of {payout.day}",
                "transfer_group": _group_of(payout),
            },
            {"idempotency_key": downstream_key},
        )
    except stripe.IdempotencyError:
        raise  # the request is invalid: a bug that no retry resolves
    except stripe.InvalidRequestError as error:
        raise TransferRefused(
            error.code or "invalid_request", error.user_message or "Stripe refused the transfer."
        ) from error
    except stripe.StripeError as error:
        if _is_stored_failure(error):
            return _made_in_spite_of(error, f"transfer for {payout}", lambda: find_transfer(payout))
        raise _unavailable(error) from error
    return transfer.id


def find_transfer(payout: Payout) -> str | None:
    """Return the id of the transfer of ``payout``, or None.

    Raises stripe.StripeError if the request to Stripe fails.
    """
    found = stripe_client().v1.transfers.list(
        {
            "destination": payout.pilot.stripe_account_id,
            "transfer_group": _group_of(payout),
            "limit": 1,
        }
    )
    return found.data[0].id if found.data else None


def _group_of(payout: Payout) -> str:
    return f"payout-{payout.day}"


def ride_id_of(charge: stripe.Charge) -> str:
    """Return the id of the ride that the charge names in its metadata, or an empty string."""
    return str((charge.metadata or {})["ride_id"]) if "ride_id" in (charge.metadata or {}) else ""


def _is_stored_failure(error: stripe.StripeError) -> bool:
    replayed = (error.headers or {}).get("Idempotent-Replayed", "")
    return (error.http_status or 0) >= 500 and replayed.lower() == "true"


def _unavailable(error: stripe.StripeError) -> PaymentUnavailable:
    return PaymentUnavailable(f"{type(error).__name__} {error.http_status or 'without a response'}")


def _made_in_spite_of(
    failure: stripe.StripeError, what: str, find: Callable[[], str | None]
) -> str:
    """Return the id of the object that Stripe has created in spite of the failure that it stored.

    Raises PaymentUnavailable if the object cannot be looked up.
    Raises KeyStuck if Stripe lists no such object.
    """
    try:
        found = find()
    except stripe.StripeError as error:
        raise PaymentUnavailable(
            f"Stripe replays a failure and the {what} cannot be looked up"
        ) from error
    if found is None:
        raise KeyStuck(
            f"Stripe stored a failure, and lists no {what}. Stripe replays the failure for 24"
            " hours. Check Stripe's dashboard, then store a response for this key.",
            best="answer",
        ) from failure
    logger.warning("%s: Stripe stored a failure, but %s exists", what, found)
    return found
