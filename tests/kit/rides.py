"""Fixtures of Rocket Rides: a Stripe sandbox over HTTP, riders with cards in it, and a client of
the API."""

import json
import threading
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.http import HttpResponse
from django.test import Client

from rides_demo import payments
from rides_demo.models import User
from rides_demo.sandbox.server import Sandbox
from tests.factories import UserFactory

#: From the Ferry Building to the Golden Gate.
RIDE = {
    "origin_lat": 37.7955,
    "origin_lon": -122.3937,
    "target_lat": 37.8199,
    "target_lon": -122.4783,
}


class Phone:
    """A client of the API for one rider."""

    def __init__(self, token: str) -> None:
        self.client = Client(raise_request_exception=False)
        self.token = token

    @property
    def user(self) -> User:
        return User.objects.with_token(self.token)

    def send(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str
    ) -> HttpResponse:
        """Send ``body`` (bytes unchanged, other values as JSON) and return the response."""
        given = {"Authorization": f"Bearer {self.token}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        if key is not None:
            given["Idempotency-Key"] = key
        content_type = given.pop("Content-Type", "application/json")
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        return self.client.generic(method, path, data, content_type=content_type, headers=given)

    def book(self, body: Any = RIDE, *, key: str | None = None, **headers: str) -> HttpResponse:
        """Book a ride with ``key``, or with a new key."""
        return self.send("POST", "/rides", body, key=key or str(uuid.uuid4()), **headers)


@pytest.fixture
def sandbox(settings: Any) -> Iterator[Sandbox]:
    """Run a Stripe sandbox, and set its URL in the settings."""
    with Sandbox() as server:
        settings.STRIPE_API_BASE = server.url
        yield server


@pytest.fixture
def slowness(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let each slow response of a sandbox in this process wait until the event is set."""
    over = threading.Event()
    monkeypatch.setattr(
        "rides_demo.sandbox.server.time", SimpleNamespace(sleep=lambda seconds: over.wait(60))
    )
    yield over
    over.set()


def _phone(name: str, source: str) -> Phone:
    token = f"demo-{name}"
    customer_id = payments.create_customer(f"{name}@example.com", source, f"customer of {name}")
    UserFactory(username=name, token=token, stripe_customer_id=customer_id)
    return Phone(token)


@pytest.fixture
def jane(sandbox: Sandbox, db: None) -> Phone:
    """A rider with a good card."""
    return _phone("jane", "tok_visa")


@pytest.fixture
def joe(sandbox: Sandbox, db: None) -> Phone:
    """A rider whose card is declined."""
    return _phone("joe", "tok_chargeCustomerFail")


@pytest.fixture
def max_(sandbox: Sandbox, db: None) -> Phone:
    """Another rider with a good card."""
    return _phone("max", "tok_visa")
