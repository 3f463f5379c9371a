"""Payments through the official Stripe client: one charge per ride, and what each failure means.

Source: https://docs.stripe.com/api/idempotent_requests; a stored 500 is replayed for 24 hours like any other result.
"""

import functools
import logging

import requests
import stripe
from django.conf import settings

from idempotency.exceptions import KeyStuck
from rides_demo.models import RIDE_AMOUNT, RIDE_CURRENCY, Ride

logger = logging.getLogger("rides_demo.payments")

#: Stripe forgets a key after 24 hours; a charge that was not confirmed by then is not made again.
CHARGE_KEY_SECONDS = 23 * 3600
#: What a client is told to wait while Stripe cannot be reached.
RETRY_AFTER_SECONDS = 1


class PaymentDeclined(Exception):
    """The provider refused the card for good; the message is the provider's own, for the customer."""


class PaymentUnavailable(Exception):
    """The provider gave no answer that settles the payment: the same call with the same key is due again."""


def stripe_client() -> stripe.StripeClient:
    """Return the client of the settings: a short timeout and no retries of its own, for the request is retried as a whole.

    The calls of one request stay well below the lock timeout of its key, or a retry would take over while they still run.
    """
    lock_seconds = settings.IDEMPOTENCY.get("LOCK_TIMEOUT_SECONDS", 90)
    return _stripe_client(settings.STRIPE_API_KEY, settings.STRIPE_API_BASE, min(10, lock_seconds / 5))


@functools.lru_cache(maxsize=1)
def _stripe_client(api_key: str, base: str | None, timeout_seconds: float) -> stripe.StripeClient:
    session = requests.Session()
    session.trust_env = not base  # a proxy from the environment does not lead to a stand-in on this machine
    return stripe.StripeClient(
        api_key,
        base_addresses={"api": base} if base else {},
        http_client=stripe.RequestsClient(timeout=timeout_seconds, session=session),
        max_network_retries=0,
    )


def create_customer(email: str, source: str, downstream_key: str) -> str:
    """Create a customer who pays with ``source`` and return its id: the same one for the same key."""
    customer = stripe_client().v1.customers.create({"email": email, "source": source}, {"idempotency_key": downstream_key})
    return customer.id


def charge_ride(ride: Ride, downstream_key: str) -> str:
    """Charge $20.00 for ``ride`` and return the id of the charge: the same one however often it is called.

    Makes a foreign call of at most a few timeouts; no transaction may be open.

    Raises PaymentDeclined, PaymentUnavailable, and KeyStuck when Stripe recorded a failure of its own and no charge.
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
        raise  # the request itself is wrong: a bug, which no retry cures
    except stripe.StripeError as error:
        if _is_stored_failure(error):
            return _charge_of_stored_failure(ride, error)
        raise PaymentUnavailable(f"{type(error).__name__} {error.http_status or 'without an answer'}") from error
    return charge.id


def find_charge(ride: Ride) -> str | None:
    """Return the id of the successful charge that carries ``ride`` in its metadata, or None.

    Raises stripe.StripeError when Stripe cannot be asked.
    """
    charges = stripe_client().v1.charges.list({"customer": ride.user.stripe_customer_id, "limit": 100})
    for charge in charges.auto_paging_iter():
        if charge.status == "succeeded" and ride_id_of(charge) == str(ride.pk):
            return charge.id
    return None


def refund_charge(charge_id: str, downstream_key: str) -> None:
    """Give the whole charge back, once for the same key. Raises stripe.StripeError when Stripe does not take it."""
    stripe_client().v1.refunds.create({"charge": charge_id}, {"idempotency_key": downstream_key})


def ride_id_of(charge: stripe.Charge) -> str:
    """Return the id of the ride that the charge names in its metadata, or nothing."""
    return str((charge.metadata or {})["ride_id"]) if "ride_id" in (charge.metadata or {}) else ""


def _is_stored_failure(error: stripe.StripeError) -> bool:
    replayed = (error.headers or {}).get("Idempotent-Replayed", "")
    return (error.http_status or 0) >= 500 and replayed.lower() == "true"


def _charge_of_stored_failure(ride: Ride, failure: stripe.StripeError) -> str:
    try:
        charge_id = find_charge(ride)
    except stripe.StripeError as error:
        raise PaymentUnavailable("Stripe replays a failure and cannot be asked for the charge") from error
    if charge_id is None:
        raise KeyStuck(
            f"Stripe answers this charge with a failure of its own that it has stored, and lists no charge for ride {ride.pk}. "
            f"Repeating the call cannot succeed within 24 hours. Make sure of it in Stripe's dashboard, then answer the key."
        ) from failure
    logger.warning("ride %s: found charge %s behind a stored failure of Stripe", ride.pk, charge_id)
    return charge_id
