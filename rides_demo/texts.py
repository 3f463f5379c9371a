"""Text messages to the pilot.

The text service has no idempotency keys, so a repeated call sends the text twice.
"""

import httpx
from django.conf import settings

#: The Stripe sandbox also implements the text service.
PATH = "/sms/messages"


class NotSent(Exception):
    """The text was not sent: the call can be repeated."""


def send_text(ride_id: int, text: str) -> str:
    """Send ``text`` to the pilot of a ride; return the id of the message.

    The function calls a downstream service, so no transaction may be open.

    Raises NotSent if the text was certainly not sent.
    Raises httpx.HTTPError if the result is unknown.
    """
    if not settings.STRIPE_API_BASE:
        raise NotSent("The real Stripe has no text service.")
    try:
        answer = httpx.post(
            settings.STRIPE_API_BASE + PATH,
            data={"to": f"pilot of ride {ride_id}", "text": text},
            headers={"Authorization": f"Bearer {settings.STRIPE_API_KEY}"},
            timeout=5,
            trust_env=False,
        )
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise NotSent(str(error)) from error
    if answer.is_client_error:
        raise NotSent(f"status {answer.status_code}")
    answer.raise_for_status()
    return str(answer.json()["id"])
