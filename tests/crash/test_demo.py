"""The views of Rocket Rides, against its Stripe sandbox over HTTP."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import stripe
from django.conf import settings
from django.test import Client

from idempotency.testing import assert_survives
from rides_demo.models import Ride
from rides_demo.sandbox.server import Sandbox
from tests.kit.rides import RIDE, Phone, jane, joe, sandbox  # noqa: F401

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes]

Line = Callable[[str, str], None]


class Effects:
    """What took effect in the sandbox since it was made; ``reset()`` forgets that again."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.account = sandbox.account
        self.before = {
            name: dict(value)
            for name, value in vars(self.account).items()
            if isinstance(value, dict)
        }

    def __call__(self) -> dict[str, Any]:
        charges = [
            (charge["amount"], charge["metadata"]) for charge in self.account.charges.values()
        ]
        return {
            "charges": charges,
            "texts": [text["to"] for text in self.account.messages.values()],
        }

    def reset(self) -> None:
        for name, value in self.before.items():
            held = getattr(self.account, name)
            held.clear()
            held.update(value)


def test_a_booked_ride_survives(sandbox: Sandbox, jane: Phone, line: Line) -> None:
    effects = Effects(sandbox)
    report = assert_survives(lambda key: jane.book(key=key), effects=effects, reset=effects.reset)
    line("demo: create_ride", f"passes: {report}")
    assert [place.detail for place in report.places if place.what == "downstream call"][
        1
    ] == "POST /v1/charges HTTP/1.1"
    assert not report.handed_over


def test_a_declined_ride_survives(sandbox: Sandbox, joe: Phone, line: Line) -> None:
    effects = Effects(sandbox)
    report = assert_survives(
        lambda key: joe.book(key=key), effects=effects, reset=effects.reset, races=False
    )
    line("demo: create_ride, card declined", f"passes: {report}")


def test_a_changed_target_survives(sandbox: Sandbox, jane: Phone, line: Line) -> None:
    ride = jane.book().json()["ride"]["id"]
    seen = jane.send("GET", f"/rides/{ride}")["ETag"]
    change = {name: RIDE[name] + 0.01 for name in ("target_lat", "target_lon")}
    report = assert_survives(
        lambda key: jane.send("PATCH", f"/rides/{ride}", change, key=key, If_Match=seen)
    )
    line("demo: ride_detail, PATCH", f"passes: {report}")


def test_a_text_survives_or_is_left_to_a_person(sandbox: Sandbox, jane: Phone, line: Line) -> None:
    ride = jane.book().json()["ride"]["id"]
    effects = Effects(sandbox)
    send = lambda key: jane.send("POST", f"/rides/{ride}/texts", key=key)  # noqa: E731
    report = assert_survives(send, effects=effects, reset=effects.reset)
    line("demo: text_pilot", f"passes: {report}")
    assert report.handed_over


def test_a_webhook_survives(sandbox: Sandbox, jane: Phone, line: Line) -> None:
    ride = Ride.objects.get(pk=jane.book().json()["ride"]["id"])
    charge = {
        "id": ride.stripe_charge_id,
        "object": "charge",
        "metadata": {"ride_id": str(ride.pk)},
    }
    event = {
        "id": "evt_1",
        "object": "event",
        "type": "charge.succeeded",
        "data": {"object": charge},
    }

    def deliver(key: str) -> Any:
        body, now = json.dumps(event), int(time.time())
        signed = stripe.WebhookSignature._compute_signature(
            f"{now}.{body}", settings.STRIPE_WEBHOOK_SECRET
        )
        return Client().post(
            "/webhooks/stripe",
            body,
            "application/json",
            headers={"Stripe-Signature": f"t={now},v1={signed}"},
        )

    report = assert_survives(deliver)
    line("demo: stripe_webhook", f"passes: {report}")
