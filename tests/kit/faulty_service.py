"""A server on real sockets that simulates failures of networks and servers, and does its work once
per key."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROBLEM = {"Content-Type": "application/problem+json"}

#: The failures of a connection that replace a complete response.
CUT_BEFORE, CUT_AFTER, CUT_IN_BODY, SILENCE = (
    "cut before",
    "cut after",
    "cut in the body",
    "silence",
)

Step = str | tuple[int, dict[str, str], bytes]


def problem(status: int, retryable: bool, **headers: str) -> Step:
    """Return a problem+json response, like those of this library."""
    return (
        status,
        PROBLEM | headers,
        json.dumps({"code": "a_code", "retryable": retryable}).encode(),
    )


class FaultyService(ThreadingHTTPServer):
    """Executes one step of its script per request, then does the work once per key; each retry gets
    the same response."""

    daemon_threads = True

    def __init__(self) -> None:
        # The port is bound now. The server accepts connections only after ``server_activate``.
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=False)
        self.server_bind()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        self.script: list[Step] = []
        #: Method, headers and body of each received request.
        self.heard: list[tuple[str, Any, bytes]] = []
        self.done: dict[str, bytes] = {}
        self.over = threading.Event()

    def work(self, key: str, body: bytes) -> bytes:
        return self.done.setdefault(key, b"done %d: " % len(self.done) + body)

    def keys(self) -> list[str]:
        return [headers["Idempotency-Key"] for _, headers, _ in self.heard]

    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.heard]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyService

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        service = self.server
        service.heard.append((self.command, self.headers, body))
        step = service.script.pop(0) if service.script else "work"
        if isinstance(step, tuple):
            return self.answer(*step)
        if step == SILENCE:
            service.over.wait(60)
        if step in (CUT_BEFORE, SILENCE):
            self.close_connection = True
            return None
        done = service.work(self.headers["Idempotency-Key"], body)
        if step == CUT_AFTER:
            self.close_connection = True
            return None
        return self.answer(201, {}, done, cut=step == CUT_IN_BODY)

    do_GET = do_PUT = do_PATCH = do_DELETE = do_POST

    def answer(
        self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def serving(service: FaultyService | None = None) -> Iterator[FaultyService]:
    """Serve requests during the block."""
    with service or FaultyService() as server:
        server.server_activate()
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.over.set()
        server.shutdown()
