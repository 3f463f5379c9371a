"""Simulated clients with lost connections, retries and duplicates."""

import json
import socket
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from idempotency.client import Retries, make_client

#: The timeout of one attempt. It is shorter than the lock timeout of the key.
TRY_SECONDS = 8.0
#: The Date header of a server with a wrong clock differs from the local time by more than this.
CLOCK_SECONDS = 1800
#: A booking whose payment hangs is sent until it has no response for this time.
HANG_TRY_SECONDS, HANG_PAUSE_SECONDS, HANG_TRIES = 3.0, 0.5, 30
RETRIES = Retries(deadline_seconds=75, first_pause_seconds=0.4, longest_pause_seconds=3)


class CannotSimulate(Exception):
    """A requirement of the simulation is missing; the message names it."""


@dataclass(frozen=True)
class Booking:
    """The task of one client; ``kind`` is one of ``plan.KINDS``."""

    key: str
    kind: str
    token: str
    body: dict[str, float]
    #: The host of the tenant, or an empty string for the host of the URL.
    host: str = ""


@dataclass
class Outcome:
    """The last response of one client; ``answer`` is None if the client gave up or disappeared."""

    booking: Booking
    answer: httpx.Response | None = None
    tries: int = 0

    @property
    def label(self) -> str:
        """The outcome as a label for the table."""
        if self.answer is None:
            return "went away" if self.booking.kind in ("gone", "hang") else "gave up"
        return str(self.answer.status_code)

    def log_line(self) -> str:
        """Return the booking and its outcome as one line of the client log."""
        answer = None if self.answer is None else self.answer.text
        return json.dumps(
            asdict(self.booking) | {"outcome": self.label, "tries": self.tries, "answer": answer}
        )


@dataclass
class Tally:
    """Counts of events between clients and server, shared by all threads."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, event: str) -> None:
        """Count one ``event``."""
        with self.lock:
            self.counts[event] += 1

    def add_violation(self, booking: Booking, problem: str) -> None:
        """Record a response that violates the contract."""
        with self.lock:
            tenant = f" of {booking.host}" if booking.host else ""
            self.wrong.append(f"wrong: {booking.kind} {booking.key}{tenant}: {problem}")


class BookingClients:
    """Send bookings to one base URL; thread-safe. ``host`` is the host of requests that are no
    bookings.

    If ``limited`` is true, the database role has time limits. A client then gives up if its request
    exceeds one.
    """

    def __init__(
        self, base_url: str, tally: Tally, host: str = "", *, limited: bool = False
    ) -> None:
        self.tally, self.limited = tally, limited
        self.address = urlsplit(base_url)
        # Ignore proxies of the environment, as the server is on this machine.
        self.http = httpx.Client(
            base_url=base_url,
            timeout=TRY_SECONDS,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
            headers={"Host": host} if host else {},
        )

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def check_service(self) -> None:
        """Raise CannotSimulate unless the service accepts requests."""
        try:
            self.http.get("/healthz").raise_for_status()
        except httpx.HTTPError as error:
            url = self.http.base_url
            raise CannotSimulate(
                f"{url} accepts no requests ({error}): start it with `make serve`, or see"
                " --base-url."
            ) from None

    def run(self, booking: Booking) -> Outcome:
        """Run the booking until it has a final response or the client gives up."""
        outcome = getattr(self, f"_{booking.kind.replace('-', '_')}", self._until_settled)(booking)
        if outcome.answer is not None:
            self._check_answer(booking, outcome.answer)
        return outcome

    def resend(self, booking: Booking) -> httpx.Response | None:
        """Send a finished booking again; return the response."""
        return self._until_settled(booking).answer

    def _check_answer(self, booking: Booking, answer: httpx.Response) -> None:
        expected = {402} if booking.token == "demo-joe" else {201}
        if answer.status_code not in expected and not has_code(answer, 409, "key_stuck"):
            self.tally.add_violation(booking, f"{answer.status_code} {answer.text[:200]}")

    def _until_settled(self, booking: Booking) -> Outcome:
        outcome = Outcome(booking)
        with make_client(
            RETRIES,
            transport=_Tries(self, outcome),
            base_url=self.http.base_url,
            timeout=TRY_SECONDS,
        ) as client:
            try:
                answer = client.post(
                    "/rides", content=_encoded(booking.body), headers=_headers(booking)
                )
            except httpx.TransportError:
                return outcome
        # A response with Retry-After is not final: the client gave up at its deadline.
        if self.limited and has_code(answer, 503, "time_limit_exceeded"):
            self.tally.count("fault limits: 503 time_limit_exceeded")
        elif "Retry-After" not in answer.headers:
            outcome.answer = answer
        return outcome

    def _duplicates(self, booking: Booking) -> Outcome:
        """Send the booking three times at once: one request runs, and all three responses have the
        same bytes."""
        outcomes: list[Outcome] = []
        barrier = threading.Barrier(3)

        def send() -> None:
            barrier.wait(10)
            outcome = self._until_settled(booking)
            with self.tally.lock:
                outcomes.append(outcome)

        threads = [threading.Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.tally.count("fault duplicates")
        answers = {
            (o.answer.status_code, o.answer.content) for o in outcomes if o.answer is not None
        }
        if len(answers) > 1:
            self.tally.add_violation(
                booking, f"{len(answers)} different responses to three equal requests"
            )
        return max(outcomes, key=lambda outcome: outcome.answer is not None)

    def _mismatch(self, booking: Booking) -> Outcome:
        """Book, then send another body with the same key, which the service must refuse."""
        outcome = self._until_settled(booking)
        if outcome.answer is not None:
            other = replace(booking, body=booking.body | {"target_lat": 0.0})
            refused = self._until_settled(other).answer
            self.tally.count("fault mismatch")
            if refused is not None and not has_code(refused, 422, "key_reused"):
                self.tally.add_violation(booking, f"another body got {refused.text[:200]}")
        return outcome

    def _cut_request(self, booking: Booking) -> Outcome:
        """Close the connection within the request, then retry."""
        self._cut(booking, "cut-request")
        return self._until_settled(booking)

    def _cut_before(self, booking: Booking) -> Outcome:
        """Close the connection before the response, then retry."""
        self._cut(booking, "cut-before")
        return self._until_settled(booking)

    def _cut_after(self, booking: Booking) -> Outcome:
        """Close the connection within the response, then retry."""
        self._cut(booking, "cut-after")
        return self._until_settled(booking)

    def _gone(self, booking: Booking) -> Outcome:
        """Close the connection before the response, and do not retry."""
        self._cut(booking, "gone")
        return Outcome(booking, tries=1)

    def _hang(self, booking: Booking) -> Outcome:
        """Send the booking until a run waits for Stripe, and do not retry."""
        outcome = Outcome(booking)
        for outcome.tries in range(1, HANG_TRIES + 1):
            try:
                answer = self.http.post(
                    "/rides",
                    content=_encoded(booking.body),
                    headers=_headers(booking),
                    timeout=HANG_TRY_SECONDS,
                )
                if answer.status_code == 409:
                    break
            except httpx.ReadTimeout:
                break
            except httpx.TransportError:
                pass
            time.sleep(HANG_PAUSE_SECONDS)
        self.tally.count("raw")
        return outcome

    def _cut(self, booking: Booking, when: str) -> None:
        """Send the request (without half of its body for ``cut-request``), close the connection,
        and count the fault."""
        body = _encoded(booking.body)
        lines = ["POST /rides HTTP/1.1", f"Content-Length: {len(body)}"]
        headers = {"Host": self.address.netloc} | _headers(booking)
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
        self.tally.count("raw")
        try:
            with socket.create_connection(
                (self.address.hostname, self.address.port), TRY_SECONDS
            ) as connection:
                connection.sendall(request[: -len(body) // 2] if when == "cut-request" else request)
                if when == "cut-after" and not connection.recv(1):
                    return
        except OSError:
            return
        self.tally.count(f"fault {when}")


class _Tries(httpx.BaseTransport):
    """An HTTP transport that sends each attempt over the shared connections, and counts it."""

    def __init__(self, clients: BookingClients, outcome: Outcome) -> None:
        self._clients, self._outcome = clients, outcome

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._outcome.tries += 1
        tally = self._clients.tally
        try:
            answer = self._clients.http.send(request)
        except httpx.TransportError as error:
            tally.count(f"no answer: {type(error).__name__}")
            raise
        tally.count(f"answer {answer.status_code}")
        if "Date" in answer.headers and _is_far_off(answer.headers["Date"]):
            tally.count("fault wrong-clock, answers")
        if answer.status_code == 500:
            # A 500 is a violation even if a later attempt succeeds.
            tally.add_violation(self._outcome.booking, f"500 {answer.text[:200]}")
        return httpx.Response(
            answer.status_code, headers=answer.headers, stream=httpx.ByteStream(answer.content)
        )


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _headers(booking: Booking) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {booking.token}",
        "Content-Type": "application/json",
        "Idempotency-Key": f'"{booking.key}"',
    } | ({"Host": booking.host} if booking.host else {})


def _is_far_off(date: str) -> bool:
    return abs(parsedate_to_datetime(date).timestamp() - time.time()) > CLOCK_SECONDS


def has_code(answer: httpx.Response, status: int, code: str) -> bool:
    """Return whether the answer is a problem of the app with this status and code."""
    return answer.status_code == status and answer.json().get("code") == code
