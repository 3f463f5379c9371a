"""A rider with a phone that sends one booking again and again, always with the same key."""

import json
import uuid
from dataclasses import replace
from typing import TypeVar

import httpx

from rides_demo.simulator.booking_clients import Booking, BookingClients, Tally
from tests.kit.rides import RIDE

Result = TypeVar("Result")


class Rider:
    """A client of one web server with one booking; ``heard`` are all the answers that came, in
    their order."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self.booking = Booking(key or str(uuid.uuid4()), "plain", "demo-jane", RIDE)
        self.heard: list[httpx.Response] = []
        self.tally = Tally()
        self._clients = BookingClients(url, self.tally)
        self._clients.http.event_hooks = {"response": [self.heard.append]}

    @property
    def key(self) -> str:
        return self.booking.key

    def headers(self) -> dict[str, str]:
        """Return the headers of the booking."""
        return {
            "Authorization": f"Bearer {self.booking.token}",
            "Content-Type": "application/json",
            "Idempotency-Key": self.key,
        }

    def post(self) -> httpx.Response:
        """Send the booking once and wait for the answer as long as it takes."""
        content = json.dumps(self.booking.body)
        return self._clients.http.post(
            "/rides", content=content, headers=self.headers(), timeout=60
        )

    def settle(self) -> httpx.Response:
        """Send the booking until an answer stands: over lost connections, 503, and 409 with
        ``Retry-After``."""
        outcome = self._clients.run(self.booking)
        assert outcome.answer is not None, (
            f"gave up after {outcome.tries} tries: {self.tally.counts}"
        )
        assert self.tally.wrong == []
        return outcome.answer

    def send_and_leave(self) -> None:
        """Send the booking and go away before the answer."""
        self._clients.run(replace(self.booking, kind="gone"))
        assert self.tally.counts["fault gone"] == 1

    def close(self) -> None:
        self._clients.close()


def code(answer: httpx.Response) -> str:
    """Return the code of a refusal: a problem of the library, or an error of the service."""
    body = answer.json()
    return str(body["code"] if "code" in body else body["error"]["code"])
