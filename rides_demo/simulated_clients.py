"""Clients that behave like phones: they retry with the same key, lose connections, press twice and go away."""

import json
import socket
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from idempotency.client import Retries, make_client

#: One try ends before the lock of its key does.
TRY_SECONDS = 8.0
#: What Date may differ from the time here, before the server's clock is wrong.
CLOCK_SECONDS = 1800
RETRIES = Retries(deadline_seconds=75, first_pause_seconds=0.4, longest_pause_seconds=3)


class CannotSimulate(Exception):
    """Something that the simulation needs is not there; the message says what."""


@dataclass(frozen=True)
class Booking:
    """What one client will do: ``kind`` is one of ``simulator.KINDS`` or "plain"."""

    key: str
    kind: str
    token: str
    body: dict[str, float]


@dataclass
class Outcome:
    """What one client saw at last: ``answer`` is None when it gave up or went away."""

    booking: Booking
    answer: httpx.Response | None = None
    tries: int = 0

    @property
    def label(self) -> str:
        """The outcome in a word or two, for the table."""
        if self.answer is None:
            return "went away" if self.booking.kind == "gone" else "gave up"
        return str(self.answer.status_code)

    def log_line(self) -> str:
        """Return all that the client knows, for the log of the clients."""
        answer = None if self.answer is None else self.answer.text
        return json.dumps(asdict(self.booking) | {"outcome": self.label, "tries": self.tries, "answer": answer})


@dataclass
class Tally:
    """What went on between clients and server, counted by all threads."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, event: str) -> None:
        """Count one more of ``event``."""
        with self.lock:
            self.counts[event] += 1

    def complain(self, booking: Booking, problem: str) -> None:
        """Note an answer that the contract does not allow."""
        with self.lock:
            self.wrong.append(f"wrong: {booking.kind} {booking.key}: {problem}")


class Phones:
    """Sends bookings to one base URL; safe to use from many threads."""

    def __init__(self, base_url: str, tally: Tally) -> None:
        self.tally = tally
        self.address = urlsplit(base_url)
        # No proxy of the environment: the server is on this machine. A broken connection is this client's own to retry.
        self.http = httpx.Client(
            base_url=base_url, timeout=TRY_SECONDS, trust_env=False, limits=httpx.Limits(max_connections=None)
        )

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def check_service(self) -> None:
        """Raise CannotSimulate unless the service takes requests."""
        try:
            self.http.get("/healthz").raise_for_status()
        except httpx.HTTPError as error:
            url = self.http.base_url
            raise CannotSimulate(
                f"{url} does not take requests ({error}): start it with `make serve`, or see --base-url."
            ) from None

    def play(self, booking: Booking) -> Outcome:
        """Do what the booking says, until it has an answer that stands or the client gives up."""
        outcome = getattr(self, f"_{booking.kind.replace('-', '_')}", self._until_settled)(booking)
        if outcome.answer is not None:
            self._judge(booking, outcome.answer)
        return outcome

    def again(self, booking: Booking) -> httpx.Response | None:
        """Send a settled booking once more, and return what is answered."""
        return self._until_settled(booking).answer

    def _judge(self, booking: Booking, answer: httpx.Response) -> None:
        expected = {402} if booking.token == "demo-joe" else {201}
        if answer.status_code not in expected and not _is_stuck(answer):
            self.tally.complain(booking, f"{answer.status_code} {answer.text[:200]}")

    def _until_settled(self, booking: Booking) -> Outcome:
        outcome = Outcome(booking)
        with make_client(RETRIES, transport=_Tries(self, outcome), base_url=self.http.base_url, timeout=TRY_SECONDS) as client:
            try:
                answer = client.post("/rides", content=_encoded(booking.body), headers=_headers(booking))
            except httpx.TransportError:
                return outcome
        # Told to come back, and no time left for it: this client gave up.
        outcome.answer = answer if "Retry-After" not in answer.headers else None
        return outcome

    def _duplicates(self, booking: Booking) -> Outcome:
        """Send the booking three times at once: one runs, all end with the same bytes."""
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
        answers = {(o.answer.status_code, o.answer.content) for o in outcomes if o.answer is not None}
        if len(answers) > 1:
            self.tally.complain(booking, f"{len(answers)} different answers to three equal requests")
        return max(outcomes, key=lambda outcome: outcome.answer is not None)

    def _mismatch(self, booking: Booking) -> Outcome:
        """Book, then send another body under the same key: refused, and the first answer stays what it was."""
        outcome = self._until_settled(booking)
        if outcome.answer is not None:
            other = Booking(booking.key, booking.kind, booking.token, booking.body | {"target_lat": 0.0})
            refused = self._until_settled(other).answer
            self.tally.count("fault mismatch")
            if refused is None or refused.status_code != 422 or refused.json().get("code") != "key_reused":
                self.tally.complain(booking, f"another body got {refused and refused.text[:200]}")
        return outcome

    def _cut_request(self, booking: Booking) -> Outcome:
        """Lose the connection before all of the request was sent; then retry."""
        self._cut(booking, "cut-request")
        return self._until_settled(booking)

    def _cut_before(self, booking: Booking) -> Outcome:
        """Lose the connection before the server answered; then retry."""
        self._cut(booking, "cut-before")
        return self._until_settled(booking)

    def _cut_after(self, booking: Booking) -> Outcome:
        """Lose the connection after the server answered; then retry."""
        self._cut(booking, "cut-after")
        return self._until_settled(booking)

    def _gone(self, booking: Booking) -> Outcome:
        """Lose the connection before the server answered, and never come back."""
        self._cut(booking, "gone")
        return Outcome(booking, tries=1)

    def _cut(self, booking: Booking, when: str) -> None:
        """Send the booking, all of it or half, and break the connection; count it only if it was really sent."""
        body = _encoded(booking.body)
        lines = ["POST /rides HTTP/1.1", f"Host: {self.address.netloc}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in _headers(booking).items()]
        request = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
        self.tally.count("raw")
        try:
            with socket.create_connection((self.address.hostname, self.address.port), TRY_SECONDS) as connection:
                connection.sendall(request[: -len(body) // 2] if when == "cut-request" else request)
                if when == "cut-after" and not connection.recv(1):
                    return
        except OSError:
            return
        self.tally.count(f"fault {when}")


class _Tries(httpx.BaseTransport):
    """Sends what is tried through the connections of the phones, and counts it."""

    def __init__(self, phones: Phones, outcome: Outcome) -> None:
        self._phones, self._outcome = phones, outcome

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._outcome.tries += 1
        tally = self._phones.tally
        try:
            answer = self._phones.http.send(request)
        except httpx.TransportError as error:
            tally.count(f"no answer: {type(error).__name__}")
            raise
        tally.count(f"answer {answer.status_code}")
        if "Date" in answer.headers and _is_far_off(answer.headers["Date"]):
            tally.count("fault wrong-clock, answers")
        if answer.status_code == 500:
            # Another try may end well; that it was needed is a mistake of the service.
            tally.complain(self._outcome.booking, f"500 {answer.text[:200]}")
        return httpx.Response(answer.status_code, headers=answer.headers, stream=httpx.ByteStream(answer.content))


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _headers(booking: Booking) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {booking.token}",
        "Content-Type": "application/json",
        "Idempotency-Key": f'"{booking.key}"',
    }


def _is_far_off(date: str) -> bool:
    return abs(parsedate_to_datetime(date).timestamp() - time.time()) > CLOCK_SECONDS


def _is_stuck(answer: httpx.Response) -> bool:
    return answer.status_code == 409 and answer.json().get("code") == "key_stuck"
