"""Delivery of the signed events of the Stripe sandbox to a webhook."""

import hashlib
import hmac
import http.client
import json
import queue
import random
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from typing import Any


class WebhookSender:
    """Deliver each signed event, and one event in five twice. Repeat a delivery until a 2xx, at
    most ``ATTEMPTS`` times.

    With ``hosts``, each of these hosts at ``url`` is an endpoint, and each endpoint receives each
    event.
    """

    ATTEMPTS = 30
    LONGEST_PAUSE_SECONDS = 3.0
    DELIVERERS = 4

    def __init__(
        self, url: str, secret: str, seed: int | None = None, hosts: Sequence[str] = ()
    ) -> None:
        self.url, self.secret, self.hosts = url, secret, hosts or [""]
        self._random = random.Random(seed)
        self._due: queue.PriorityQueue[tuple[float, str, int, bytes, str]] = queue.PriorityQueue()
        self._stopped = threading.Event()
        self._counts: Counter[str] = Counter()
        # A proxy of the environment cannot reach the loopback port.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        if url:
            self._counts.update(dict.fromkeys(("sent_twice", "taken", "refused", "given_up"), 0))
            for _ in range(self.DELIVERERS):
                threading.Thread(target=self._deliver, daemon=True).start()

    def send(self, kind: str, subject: dict[str, Any]) -> None:
        """Queue an event about ``subject``; another thread delivers it."""
        if not self.url:
            return
        event = {
            "id": f"evt_{secrets.token_hex(12)}",
            "object": "event",
            "type": kind,
            "created": int(time.time()),
            "livemode": False,
            "data": {"object": subject},
        }
        body = json.dumps(event).encode()
        twice = self._random.random() < 0.2
        self._counts["sent_twice"] += twice
        for host in [*self.hosts] * (2 if twice else 1):
            self._due.put((time.monotonic(), secrets.token_hex(4), 1, body, host))

    def counts(self) -> dict[str, int]:
        """Return the number of events ``sent_twice``, and of deliveries ``taken``, ``refused``,
        ``given_up``.

        The result is empty without a URL.
        """
        return dict(self._counts)

    def stop(self) -> None:
        """Stop all deliveries."""
        self._stopped.set()

    def signature(self, body: bytes) -> str:
        """Return the Stripe-Signature header. Source: docs.stripe.com/webhooks#verify-manually."""
        now = str(int(time.time()))
        signed = now.encode() + b"." + body
        digest = hmac.new(self.secret.encode(), signed, hashlib.sha256).hexdigest()
        return f"t={now},v1={digest}"

    def _deliver(self) -> None:
        while not self._stopped.is_set():
            due, order, attempt, body, host = self._due.get()
            wait = due - time.monotonic()
            if wait > 0:
                # This event is not due yet. Wait only briefly, because a new event may be due
                # earlier.
                self._due.put((due, order, attempt, body, host))
                self._stopped.wait(min(wait, 0.1))
            elif self._post(body, host):
                self._counts["taken"] += 1
            elif attempt >= self.ATTEMPTS:
                self._counts["given_up"] += 1
            else:
                self._counts["refused"] += 1
                pause = min(0.25 * 2 ** (attempt - 1), self.LONGEST_PAUSE_SECONDS)
                self._due.put((time.monotonic() + pause, order, attempt + 1, body, host))

    def _post(self, body: bytes, host: str) -> bool:
        headers = {"Content-Type": "application/json", "Stripe-Signature": self.signature(body)}
        headers |= {"Host": host} if host else {}
        try:
            with self._opener.open(
                urllib.request.Request(self.url, body, headers), timeout=10
            ) as answer:
                return 200 <= int(answer.status) < 300
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except (OSError, http.client.HTTPException):
            return False
