"""Clients over a unix socket, each with a thread and a persistent connection.

The clients implement only the necessary part of HTTP, because they share the cores with the server,
and their processor time is part of each measurement.
"""

import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

#: The body of ``benchmarks.views``, a module that cannot be imported without Django.
BODY = '{"amount": 2000, "currency": "usd"}'

_REQUEST = (
    "POST /{path}/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length:"
    " {length}\r\nIdempotency-Key: {key}\r\n\r\n{body}"
)


@dataclass
class Load:
    """The results of clients: responses by status, the seconds of each request, and the seconds of
    the whole run."""

    statuses: Counter[int] = field(default_factory=Counter)
    taken: list[float] = field(default_factory=list)
    seconds: float = 0

    @property
    def answers(self) -> float:
        """Return the number of 2xx responses per second."""
        return (
            sum(count for status, count in self.statuses.items() if 200 <= status < 300)
            / self.seconds
        )


class Client:
    """One connection."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(30)
        self._socket.connect(str(path))

    def post(self, path: str, key: str) -> int:
        """Send a request and read its answer; return the status."""
        self._socket.sendall(
            _REQUEST.format(path=path, length=len(BODY), key=key, body=BODY).encode()
        )
        received = b""
        while not _complete(received):
            if not (more := self._socket.recv(65536)):
                raise ConnectionError(f"The server closed the connection after {received[:200]!r}.")
            received += more
        return int(received.split(b" ", 2)[1])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _complete(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        return False
    head = head.lower()
    if b"\r\ntransfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
    return len(body) >= int(length or 0)


def run(path: Path, view: str, count: int, seconds: float, *, repeat: str = "") -> Load:
    """Let ``count`` clients send requests for ``seconds``: each with a new key, or all with the key
    ``repeat``.

    With ``repeat="each"`` each client repeats its own key.
    """
    loads = [Load() for _ in range(count)]
    start = threading.Barrier(count + 1)
    failures: list[BaseException] = []

    def work(load: Load) -> None:
        key = str(uuid4()) if repeat == "each" else repeat
        try:
            client = Client(path)
            try:
                if key:
                    client.post(view, key)
                start.wait(30)
                deadline = time.perf_counter() + seconds
                while (begin := time.perf_counter()) < deadline:
                    load.statuses[client.post(view, key or str(uuid4()))] += 1
                    load.taken.append(time.perf_counter() - begin)
            finally:
                client.close()
        except BaseException as error:
            failures.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(load,)) for load in loads]
    for thread in threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):  # ``failures`` has the reason.
        start.wait(30)
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    if failures:
        raise next(
            (error for error in failures if not isinstance(error, threading.BrokenBarrierError)),
            failures[0],
        )
    whole = Load(seconds=time.perf_counter() - begin)
    for load in loads:
        whole.statuses.update(load.statuses)
        whole.taken += load.taken
    return whole
