"""A stand-in for Stripe: the few calls that Rocket Rides makes, with Stripe's contract on idempotency keys, and faults.

``python -m rides_demo.sandbox --port 8012`` listens on loopback; its state is its own and ends with it. Speak to it with the
official ``stripe`` client (``base_addresses={"api": url}``). A customer with the source ``tok_chargeCustomerFail`` is created,
its charges are declined (and, unlike Stripe's, not listed). For tests and the simulator there are ``GET /_state`` and
``/_faults``; ``POST`` a JSON list of faults (``rides_demo.sandbox_faults.Fault``) to replace those in force.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

from rides_demo.sandbox_account import Account, Execution, Params, StripeError, nested
from rides_demo.sandbox_faults import Faults, Webhooks

MAX_BODY_BYTES = 1024 * 1024
#: Not Stripe's: a service without idempotency keys, which sends a text as often as it is asked.
SMS_PATH = "/sms/messages"
Answer = tuple[int, bytes, bool]


class Cut(Exception):
    """The connection ends here, without an answer."""


class Handler(BaseHTTPRequestHandler):
    """One connection: reads requests, applies the faults, answers in JSON."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    #: Head and body in one packet: two cost 40 ms each time.
    wbufsize = -1
    server: "Sandbox"
    calls: ClassVar[Mapping[str, Callable[[Account, Params], Params]]] = {
        "/v1/customers": Account.create_customer,
        "/v1/charges": Account.create_charge,
        "/v1/refunds": Account.create_refund,
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
                status, answer, replayed = route(url.path, nested(parse_qsl(url.query) + parse_qsl(body.decode())))
        except StripeError as error:
            status, answer = error.status, dumped(error.body)
        except Cut:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        except ValueError as error:
            status, answer = 400, dumped(StripeError(400, "invalid_request_error", f"Cannot be read: {error}").body)
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
        """Raise StripeError for a page of another site, in a browser of this machine: also for a name that leads to it."""
        host = self.headers.get("Host", "")
        if urlsplit(f"//{host}").hostname not in ("127.0.0.1", "localhost") or self.headers.get("Origin") not in (
            None,
            f"http://{host}",
        ):
            raise StripeError(403, "invalid_request_error", "Other origins may not switch the sandbox.")

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
            if path.startswith("/v1/charges/"):
                return 200, dumped(self.server.account.retrieve_charge(path.removeprefix("/v1/charges/"))), False
        raise unknown_path(self.command, path)

    def _post(self, path: str, params: Params) -> Answer:
        api_key, faults, account = self._api_key(), self.server.faults, self.server.account
        if path not in self.calls and path != SMS_PATH:
            raise unknown_path(self.command, path)
        if faults.fires("down", path) or faults.fires("cut_before", path):
            raise Cut
        if faults.fires("429", path):
            raise StripeError(429, "invalid_request_error", "Too many requests. Please try again later.", code="rate_limit")
        if faults.fires("500_before", path):
            raise StripeError(500, "api_error", "An error on our side, before anything was done.")
        if path == SMS_PATH:
            with account.lock:
                answer = account.send_text(params)
            if faults.fires("cut_after", path):
                raise Cut
            return 200, dumped(answer), False
        # Without a key of the client's, the request has one that nobody can send again.
        key = self.headers.get("Idempotency-Key") or secrets.token_hex(16)
        execution, first = account.claim(api_key, key, path, params)
        if first:
            try:
                self._execute(execution, path, params)
            finally:
                account.release(api_key, execution)
        if faults.fires("cut_after", path):
            raise Cut
        return execution.status, execution.body, not first

    def _execute(self, execution: Execution, path: str, params: Params) -> None:
        """Run the call and store what it answers; an error raised before the execution began is not stored."""
        faults, account = self.server.faults, self.server.account
        if slow := faults.fires("slow", path):
            time.sleep(slow.seconds)
        error = StripeError(500, "api_error", "An error on our side, in the middle of the work.", begun=True)
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
        """Say nothing; the state tells what was asked."""


def dumped(answer: object) -> bytes:
    return json.dumps(answer).encode()


def unknown_path(method: str, path: str) -> StripeError:
    return StripeError(404, "invalid_request_error", f"Unrecognized request URL ({method}: {path}).")


class Sandbox(ThreadingHTTPServer):
    """The sandbox on a loopback port (0: any free one), in this process; a context manager that serves from a thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, *, webhook_url: str = "", webhook_secret: str = "", seed: int | None = None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.faults = Faults(seed)
        self.account = Account(Webhooks(webhook_url, webhook_secret, seed))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away; anything else is a bug of the sandbox."""
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
    parser = argparse.ArgumentParser(prog="python -m rides_demo.sandbox", description="The Stripe sandbox of Rocket Rides.")
    parser.add_argument("--port", type=int, default=0, help="loopback port; 0 takes any free one")
    parser.add_argument("--webhook-url", default="", help="where charge.succeeded is delivered; nowhere without it")
    parser.add_argument(
        "--webhook-secret",
        default=os.environ.get("STRIPE_WEBHOOK_SECRET", ""),
        help="signs them; default: STRIPE_WEBHOOK_SECRET",
    )
    parser.add_argument("--seed", type=int, help="makes the faults that have a probability repeatable")
    options = parser.parse_args()
    try:
        sandbox = Sandbox(
            options.port, webhook_url=options.webhook_url, webhook_secret=options.webhook_secret, seed=options.seed
        )
    except OSError as error:
        sys.exit(f"The Stripe sandbox cannot listen on port {options.port}: {error.strerror}. Choose another one with --port.")
    sys.stdout.write(f"listening on {sandbox.url}\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        sandbox.serve_forever()


if __name__ == "__main__":
    main()
