"""The HTTP server of the Stripe sandbox.

``python -m rides_demo.sandbox --port 8012`` listens on loopback and keeps its state in memory. Use
the official ``stripe`` client with ``base_addresses={"api": url}``. The source
``tok_chargeCustomerFail`` creates a customer whose charges are declined; unlike Stripe, the sandbox
does not list these charges. A transfer may go to any account whose id begins with ``acct_``; there
are no balances. The source ``tok_stall``, which Stripe does not have, creates a
customer whose charges take longer than any client waits. Tests and the simulator use two more
paths. ``GET /_state`` returns the state. ``POST /_faults`` replaces the active faults with a JSON
list (``rides_demo.sandbox.faults.Fault``).
"""

import argparse
import base64
import binascii
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

from rides_demo.sandbox.account import (
    STALLING_SOURCE,
    Account,
    Execution,
    Params,
    StripeError,
    nested,
)
from rides_demo.sandbox.faults import Faults
from rides_demo.sandbox.webhook_sender import WebhookSender

MAX_BODY_BYTES = 1024 * 1024
#: Not part of Stripe: a text service without idempotency keys, which sends a text for each request.
SMS_PATH = "/sms/messages"
Answer = tuple[int, bytes, bool]


class Cut(Exception):
    """The connection is closed without a response."""


class Handler(BaseHTTPRequestHandler):
    """The handler of one connection: read requests, apply faults, send JSON responses."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    #: Send head and body in one packet: with two packets, each response takes 40 ms longer.
    wbufsize = -1
    server: "Sandbox"
    calls: ClassVar[Mapping[str, Callable[[Account, Params], Params]]] = {
        "/v1/customers": Account.create_customer,
        "/v1/charges": Account.create_charge,
        "/v1/refunds": Account.create_refund,
        "/v1/transfers": Account.create_transfer,
    }

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, route: Callable[[str, Params], Answer]) -> None:
        url, replayed = urlsplit(self.path), False
        try:
            body = self._body()
            if url.path.startswith("/_"):
                self._refuse_other_origins()
                status, answer = 200, dumped(self._control(url.path, body))
            else:
                status, answer, replayed = route(
                    url.path, nested(parse_qsl(url.query) + parse_qsl(body.decode()))
                )
        except StripeError as error:
            status, answer = error.status, dumped(error.body)
        except Cut:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        except ValueError as error:
            status, answer = (
                400,
                dumped(StripeError(400, "invalid_request_error", f"Invalid request: {error}").body),
            )
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("Request-Id", f"req_{secrets.token_hex(7)}")
        if replayed:
            self.send_header("Idempotent-Replayed", "true")
        self.end_headers()
        self.wfile.write(answer)

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise ValueError("the Content-Length")
        return self.rfile.read(int(length))

    def _refuse_other_origins(self) -> None:
        """Refuse requests from web pages of other sites, and requests with another host name (DNS
        rebinding)."""
        host = self.headers.get("Host", "")
        if urlsplit(f"//{host}").hostname not in ("127.0.0.1", "localhost") or self.headers.get(
            "Origin"
        ) not in (
            None,
            f"http://{host}",
        ):
            raise StripeError(
                403, "invalid_request_error", "Other origins may not control the sandbox."
            )

    def _control(self, path: str, body: bytes) -> Any:
        server = self.server
        if path == "/_state":
            with server.account.lock:
                return server.account.state()
        if path == "/_faults":
            if self.command == "POST":
                server.faults.replace(json.loads(body))
            return server.faults.state()
        raise ValueError("the path; there are /_state and /_faults")

    def _get(self, path: str, params: Params) -> Answer:
        self._api_key()
        if self.server.faults.fires("down", path):
            raise Cut
        with self.server.account.lock:
            if path == "/v1/charges":
                return 200, dumped(self.server.account.list_charges(params)), False
            if path == "/v1/transfers":
                return 200, dumped(self.server.account.list_transfers(params)), False
            if path.startswith("/v1/charges/"):
                return (
                    200,
                    dumped(self.server.account.retrieve_charge(path.removeprefix("/v1/charges/"))),
                    False,
                )
        raise unknown_path(self.command, path)

    def _post(self, path: str, params: Params) -> Answer:
        api_key, faults, account = self._api_key(), self.server.faults, self.server.account
        if path not in self.calls and path != SMS_PATH:
            raise unknown_path(self.command, path)
        if faults.fires("down", path) or faults.fires("cut_before", path):
            raise Cut
        if faults.fires("429", path):
            raise StripeError(
                429,
                "invalid_request_error",
                "Too many requests. Please try again later.",
                code="rate_limit",
            )
        if faults.fires("500_before", path):
            raise StripeError(500, "api_error", "An internal error before the execution began.")
        if path == SMS_PATH:
            with account.lock:
                answer = account.send_text(params)
            if faults.fires("cut_after", path):
                raise Cut
            return 200, dumped(answer), False
        # A request without a key gets a random key, which no other request can use.
        key = self.headers.get("Idempotency-Key") or secrets.token_hex(16)
        if account.has_source(params.get("customer"), STALLING_SOURCE):
            self._stall(account.stalls_until(key))
        execution, first = account.claim(api_key, key, path, params)
        if first:
            try:
                self._execute(execution, path, params)
            finally:
                account.release(api_key, execution)
            if slow := faults.fires("slow_after", path):
                time.sleep(slow.seconds)
            if faults.fires("cut_first", path):
                raise Cut
        if faults.fires("cut_after", path):
            raise Cut
        return execution.status, execution.body, not first

    def _stall(self, until: float) -> None:
        """Send an interim response each second. A client that limits the wait for each read waits
        for as long."""
        while time.monotonic() < until:
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.wfile.flush()
            time.sleep(1)

    def _execute(self, execution: Execution, path: str, params: Params) -> None:
        """Run the call and store its response. Raise an error from before the execution began; it
        is not stored."""
        faults, account = self.server.faults, self.server.account
        if slow := faults.fires("slow", path):
            time.sleep(slow.seconds)
        error = StripeError(500, "api_error", "An internal error during the execution.", begun=True)
        with account.lock:
            try:
                if faults.fires("500_begun", path):
                    raise error
                answer = self.calls[path](account, params)
                if faults.fires("500_after", path):
                    raise error
            except StripeError as failed:
                if not failed.begun:
                    raise
                execution.status, execution.body = failed.status, dumped(failed.body)
            else:
                execution.status, execution.body = 200, dumped(answer)

    def _api_key(self) -> str:
        kind, _, value = self.headers.get("Authorization", "").partition(" ")
        if kind == "Basic":
            with suppress(binascii.Error, ValueError):
                value = base64.b64decode(value).decode().partition(":")[0]
        if not value.startswith(("sk_", "rk_")):
            raise StripeError(401, "invalid_request_error", "Invalid API Key provided.")
        return value

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing; ``/_state`` lists the keys of the requests."""


def dumped(answer: object) -> bytes:
    return json.dumps(answer).encode()


def unknown_path(method: str, path: str) -> StripeError:
    return StripeError(
        404, "invalid_request_error", f"Unrecognized request URL ({method}: {path})."
    )


class Sandbox(ThreadingHTTPServer):
    """The server on a loopback port (0: any free port); a context manager that serves in a
    thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        port: int = 0,
        *,
        webhook_url: str = "",
        webhook_secret: str = "",
        webhook_hosts: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.faults = Faults(seed)
        self.account = Account(WebhookSender(webhook_url, webhook_secret, seed, webhook_hosts))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore closed connections; print any other error, which is a bug in the sandbox."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join()
        self.account.webhooks.stop()
        self.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rides_demo.sandbox", description="The Stripe sandbox of Rocket Rides."
    )
    parser.add_argument("--port", type=int, default=0, help="loopback port; 0 means any free port")
    parser.add_argument(
        "--webhook-url",
        default="",
        help="URL that receives charge.succeeded events; default: none are sent",
    )
    parser.add_argument(
        "--webhook-host",
        action="append",
        default=[],
        metavar="HOST",
        help="host of an endpoint at this URL; may be repeated",
    )
    parser.add_argument(
        "--webhook-secret",
        default=os.environ.get("STRIPE_WEBHOOK_SECRET", ""),
        help="secret that signs the events; default: STRIPE_WEBHOOK_SECRET",
    )
    parser.add_argument(
        "--seed", type=int, help="seed of the faults with a probability, to make a run repeatable"
    )
    options = parser.parse_args()
    try:
        sandbox = Sandbox(
            options.port,
            webhook_url=options.webhook_url,
            webhook_secret=options.webhook_secret,
            webhook_hosts=options.webhook_host,
            seed=options.seed,
        )
    except OSError as error:
        sys.exit(
            f"The Stripe sandbox cannot listen on port {options.port}: {error.strerror}. Choose"
            " another port with --port."
        )
    sys.stdout.write(f"listening on {sandbox.url}\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        sandbox.serve_forever()
