"""The client of the bank."""

import httpx
from django.conf import settings
from oscar.apps.payment.exceptions import UnableToTakePayment


def charge(amount, currency, idempotency_key=None):
    """Charge the card of the customer, and return the bank's reference. The bank makes one charge
    for each key.

    Raises UnableToTakePayment if the bank declines the card.
    """
    answer = httpx.post(
        f"{settings.BANK_URL}/charges",
        json={"amount": str(amount), "currency": currency},
        headers={"Idempotency-Key": idempotency_key} if idempotency_key else {},
        timeout=30,
    )
    if answer.status_code == httpx.codes.PAYMENT_REQUIRED:
        raise UnableToTakePayment("The bank has declined the card.")
    return answer.raise_for_status().json()["id"]
