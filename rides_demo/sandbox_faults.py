"""What goes wrong in the Stripe sandbox when asked to: faults of the API, and webhooks that come late, twice or again."""

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
from dataclasses import asdict, dataclass
from typing import Any

#: What can be asked for.
KINDS = {
    "slow": "works for `seconds` before it does anything; the same key meanwhile gets 409",
    "500_before": "answers 500 before the execution began: not stored, the key stays new",
    "500_begun": "answers 500 after the execution began, nothing was made: stored, replayed",
    "500_after": "answers 500 after the object was made: stored, replayed",
    "429": "answers 429; not stored",
    "cut_before": "cuts the connection before anything was done",
    "cut_after": "does the work, then cuts the connection instead of answering",
    "down": "cuts every connection, reads included",
}


@dataclass
class Fault:
    """One fault in force: on requests to ``path`` and below, ``count`` times (None: always), each with ``probability``."""

    fault: str
    path: str = "/v1/charges"
    probability: float = 1.0
    count: int | None = None
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.fault not in KINDS:
            raise ValueError(f"fault {self.fault!r}; there are {', '.join(KINDS)}")
        if not 0 <= self.probability <= 1 or not 0 <= self.seconds <= 600:
            raise ValueError("probability is 0 to 1, seconds 0 to 600")


class Faults:
    """The faults in force."""

    def __init__(self, seed: int | None = None) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._faults: list[Fault] = []
        self.fired: Counter[str] = Counter()

    def replace(self, faults: list[dict[str, Any]]) -> None:
        """Put ``faults`` in force instead of those before; raise ValueError, changing nothing, when one is not understood."""
        try:
            new = [Fault(**fault) for fault in faults]
        except TypeError as error:
            raise ValueError(f"a list of faults: {error}") from None
        with self._lock:
            self._faults = new

    def state(self) -> dict[str, Any]:
        with self._lock:
            return {"faults": [asdict(fault) for fault in self._faults], "fired": dict(self.fired)}

    def fires(self, kind: str, path: str) -> Fault | None:
        """Return the fault of this kind that strikes here and now, and count it."""
        with self._lock:
            for fault in self._faults:
                if fault.fault != kind or not path.startswith(fault.path) or fault.count == 0:
                    continue
                if self._random.random() < fault.probability:
                    fault.count = None if fault.count is None else fault.count - 1
                    self.fired[kind] += 1
                    return fault
        return None


class Webhooks:
    """Delivers signed events at least once, one in five of them twice, and again after anything but 2xx."""

    ATTEMPTS = 30
    LONGEST_PAUSE_SECONDS = 3.0
    DELIVERERS = 4

    def __init__(self, url: str, secret: str, seed: int | None = None) -> None:
        self.url, self.secret = url, secret
        self._random = random.Random(seed)
        self._due: queue.PriorityQueue[tuple[float, str, int, bytes]] = queue.PriorityQueue()
        self._stopped = threading.Event()
        self._counts: Counter[str] = Counter()
        # Straight to the loopback port: a proxy from the environment does not lead there.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        if url:
            self._counts.update(dict.fromkeys(("sent_twice", "taken", "refused", "given_up"), 0))
            for _ in range(self.DELIVERERS):
                threading.Thread(target=self._deliver, daemon=True).start()

    def send(self, kind: str, subject: dict[str, Any]) -> None:
        """Deliver an event about ``subject``, from another thread; return at once."""
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
        for _ in range(2 if twice else 1):
            self._due.put((time.monotonic(), secrets.token_hex(4), 1, body))

    def counts(self) -> dict[str, int]:
        """Return how many events were ``sent_twice``, and how many deliveries ``taken``, ``refused`` and ``given_up``.

        Without a URL to deliver to, nothing is counted and nothing returned.
        """
        return dict(self._counts)

    def stop(self) -> None:
        """Deliver nothing more."""
        self._stopped.set()

    def signature(self, body: bytes) -> str:
        """Return the header that proves who sent it. Source: docs.stripe.com/webhooks#verify-manually."""
        now = str(int(time.time()))
        return f"t={now},v1={hmac.new(self.secret.encode(), now.encode() + b'.' + body, hashlib.sha256).hexdigest()}"

    def _deliver(self) -> None:
        while not self._stopped.is_set():
            due, order, attempt, body = self._due.get()
            wait = due - time.monotonic()
            if wait > 0:
                # Not yet; look again soon, something else may be due earlier by then.
                self._due.put((due, order, attempt, body))
                self._stopped.wait(min(wait, 0.1))
            elif self._post(body):
                self._counts["taken"] += 1
            elif attempt >= self.ATTEMPTS:
                self._counts["given_up"] += 1
            else:
                self._counts["refused"] += 1
                pause = min(0.25 * 2 ** (attempt - 1), self.LONGEST_PAUSE_SECONDS)
                self._due.put((time.monotonic() + pause, order, attempt + 1, body))

    def _post(self, body: bytes) -> bool:
        headers = {"Content-Type": "application/json", "Stripe-Signature": self.signature(body)}
        try:
            with self._opener.open(urllib.request.Request(self.url, body, headers), timeout=10) as answer:
                return 200 <= int(answer.status) < 300
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except (OSError, http.client.HTTPException):
            return False
