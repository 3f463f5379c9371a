"""A bank: an HTTP server that makes one charge for each idempotency key. It can delay answers and
decline cards."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Bank:
    """The charges of a bank by key. A request without a key always makes a new charge."""

    def __init__(self) -> None:
        self.charges: dict[str, str] = {}
        #: Whether the bank declines each card.
        self.declines = False
        #: While this event is cleared, the bank makes a charge but does not answer.
        self.answers = threading.Event()
        self.answers.set()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()

    def charge(self, amount: str, key: str | None) -> tuple[int, dict[str, str]]:
        """Return the status and the body of the answer to a charge."""
        if self.declines:
            return 402, {}
        with self._lock:
            key = key or f"charge {len(self.charges)} without a key"
            amount = self.charges.setdefault(key, amount)
        self.answers.wait()
        return 201, {"id": f"ch_{list(self.charges).index(key)}", "amount": amount}

    def _handler(bank) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = bank.charge(asked["amount"], self.headers.get("Idempotency-Key"))
                body = json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:
                    return  # The shop was killed.

            def log_message(self, *arguments: Any) -> None:
                """Print nothing."""

        return Handler
