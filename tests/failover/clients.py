"""Clients that retry each key until it is acknowledged, and record the responses."""

import http.client
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

PATHS = ("/plain/", "/phased/")
CLIENTS = 8
#: The timeout of an attempt, and the pause before the next attempt. The pause is shorter than
#: Retry-After.
TIMEOUT_SECONDS, PAUSE_SECONDS = 3.0, 0.1
#: The longest time to the response for a key after the service is back. It is shorter than the lock
#: timeout, 90 s.
PATIENCE_SECONDS = 20.0
#: The longest time to the response to a retry of an acknowledged request, after all clients have
#: ended.
AGAIN_SECONDS = 5.0
#: The results after which a client retries: the key is in use, or the database is unavailable.
AGAIN = (409, 503, None)


@dataclass(frozen=True)
class Answer:
    """The response to one attempt; the status is None without a response."""

    status: int | None
    body: bytes = b""
    retry_after: str = ""


@dataclass(frozen=True)
class Acknowledged:
    """A request with a 201."""

    path: str
    body: bytes


def post(port: int, path: str, key: str) -> Answer:
    """Send one attempt and return its response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(
            "POST", path, b"{}", {"Idempotency-Key": key, "Content-Type": "application/json"}
        )
        response = connection.getresponse()
        return Answer(response.status, response.read(), response.headers.get("Retry-After", ""))
    except (OSError, http.client.HTTPException):
        return Answer(None)
    finally:
        connection.close()


class Clients:
    """Threads that send requests, each with a new key, until they are stopped; a context
    manager."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop, self._deadline = threading.Event(), float("inf")
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(CLIENTS)
        ]
        self.acknowledged: dict[str, Acknowledged] = {}
        self.statuses: Counter[int | None] = Counter()
        #: Keys that are not acknowledged, with the last status.
        self.unanswered: dict[str, int | None] = {}
        self.without_retry_after = 0
        self._times: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def begin_nothing_new(self) -> None:
        """Let each client end after its current key."""
        self._stop.set()

    def stop(self) -> None:
        """Wait until each client has ended; a client gives up its key after PATIENCE_SECONDS."""
        self._stop.set()
        self._deadline = min(self._deadline, time.monotonic() + PATIENCE_SECONDS)
        for thread in self._threads:
            thread.join()

    @property
    def server_errors(self) -> int:
        """The number of 5xx responses other than 503."""
        return sum(
            count
            for status, count in self.statuses.items()
            if status and status >= 500 and status != 503
        )

    def first_answer(self, since: float) -> float | None:
        """Return the time of the first 201 whose attempt began at ``since`` or later, or None."""
        return min((ended for began, ended in self._times if began >= since), default=None)

    def answers_again(self) -> dict[str, Answer]:
        """Retry each acknowledged request; return the final responses by key."""

        def send(key: str) -> Answer:
            deadline = time.monotonic() + AGAIN_SECONDS
            return self._until_answered(self.acknowledged[key].path, key, lambda: deadline)

        with ThreadPoolExecutor(CLIENTS) as pool:
            return dict(zip(self.acknowledged, pool.map(send, self.acknowledged), strict=True))

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            number += 1
            path, key = PATHS[number % len(PATHS)], uuid.uuid4().hex
            answer = self._until_answered(path, key, lambda: self._deadline)
            with self._lock:
                if answer.status == 201:
                    self.acknowledged[key] = Acknowledged(path, answer.body)
                else:
                    self.unanswered[key] = answer.status

    def _until_answered(self, path: str, key: str, deadline: Callable[[], float]) -> Answer:
        while True:
            began = time.monotonic()
            answer = post(self._port, path, key)
            self._note(answer, began)
            if answer.status not in AGAIN or time.monotonic() > deadline():
                return answer
            time.sleep(PAUSE_SECONDS)

    def _note(self, answer: Answer, began: float) -> None:
        with self._lock:
            self.statuses[answer.status] += 1
            if answer.status == 503 and not answer.retry_after.isdigit():
                self.without_retry_after += 1
            if answer.status == 201:
                self._times.append((began, time.monotonic()))
