"""The account of the Stripe sandbox: customers, charges, refunds, transfers and idempotency keys.

Source: docs.stripe.com/api/idempotent_requests.
"""

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rides_demo.sandbox.webhook_sender import WebhookSender

Params = dict[str, Any]
#: The source of a customer whose charges begin ``STALL_SECONDS`` after the first request with their
#: key. A run of the soak's completer that waits for so long is hung.
STALLING_SOURCE, STALL_SECONDS = "tok_stall", 75.0
SOURCES = ("tok_visa", "tok_chargeCustomerFail", STALLING_SOURCE)


class StripeError(Exception):
    """An error response of Stripe; the sandbox stores it if the execution had ``begun``."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        code: str = "",
        param: str = "",
        begun: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.begun = status, begun
        error = {"type": kind, "message": message, "code": code, "param": param}
        self.body = {"error": {name: value for name, value in error.items() if value}}


@dataclass
class Execution:
    """The execution under one idempotency key; ``status`` is 0 while the first request runs."""

    key: str
    path: str
    fingerprint: str
    status: int = 0
    body: bytes = b""
    replays: int = 0


class Account:
    """Customers, charges, refunds, transfers and keys. Callers hold ``lock``; ``claim`` and
    ``release`` acquire it themselves."""

    def __init__(self, webhooks: WebhookSender) -> None:
        self.lock = threading.RLock()
        self.customers: dict[str, Params] = {}
        self.charges: dict[str, Params] = {}
        self.refunds: dict[str, Params] = {}
        self.transfers: dict[str, Params] = {}
        self.messages: dict[str, Params] = {}
        self.executions: dict[tuple[str, str], Execution] = {}
        self._stalls: dict[str, float] = {}
        self.webhooks = webhooks

    def create_customer(self, params: Params) -> Params:
        source = params.get("source", "tok_visa")
        if source not in SOURCES:
            raise missing("token", source, "source")
        fields = {
            "email": params.get("email"),
            "metadata": params.get("metadata", {}),
            "default_source": source,
        }
        return self._add(self.customers, "cus", "customer", fields)

    def create_charge(self, params: Params) -> Params:
        amount, currency = whole_number(params, "amount", least=50), required(params, "currency")
        customer = self.customers.get(required(params, "customer"))
        if customer is None:
            raise missing("customer", params["customer"], "customer")
        if customer["default_source"] == "tok_chargeCustomerFail":
            raise StripeError(
                402, "card_error", "Your card was declined.", code="card_declined", begun=True
            )
        fields = {
            "amount": amount, "amount_refunded": 0, "currency": currency,
            "customer": customer["id"], "description": params.get("description"),
            "metadata": params.get("metadata", {}), "paid": True, "captured": True,
            "refunded": False, "status": "succeeded",
        }  # fmt: skip
        charge = self._add(self.charges, "ch", "charge", fields)
        self.webhooks.send("charge.succeeded", charge)
        return charge

    def has_source(self, customer_id: object, source: str) -> bool:
        customer = self.customers.get(customer_id) if isinstance(customer_id, str) else None
        return customer is not None and customer["default_source"] == source

    def stalls_until(self, key: str) -> float:
        """Return the time at which a stalled charge with this key begins, by the monotonic
        clock."""
        return self._stalls.setdefault(key, time.monotonic() + STALL_SECONDS)

    def create_refund(self, params: Params) -> Params:
        charge = self.retrieve_charge(required(params, "charge"))
        left = charge["amount"] - charge["amount_refunded"]
        amount = whole_number(params, "amount", least=1) if "amount" in params else left
        if not left:
            message = f"Charge {charge['id']} has already been refunded."
            raise StripeError(400, "invalid_request_error", message, code="charge_already_refunded")
        if amount > left:
            raise StripeError(
                400,
                "invalid_request_error",
                "Refund amount is greater than unrefunded amount on charge.",
                param="amount",
            )
        charge["amount_refunded"] += amount
        charge["refunded"] = charge["amount_refunded"] == charge["amount"]
        fields = {
            "amount": amount,
            "charge": charge["id"],
            "currency": charge["currency"],
            "status": "succeeded",
        }
        return self._add(
            self.refunds, "re", "refund", {**fields, "metadata": params.get("metadata", {})}
        )

    def create_transfer(self, params: Params) -> Params:
        amount, currency = whole_number(params, "amount", least=1), required(params, "currency")
        if not required(params, "destination").startswith("acct_"):
            raise missing("destination", params["destination"], "destination")
        fields = {
            "amount": amount,
            "currency": currency,
            "destination": params["destination"],
            "description": params.get("description"),
            "metadata": params.get("metadata", {}),
            "transfer_group": params.get("transfer_group"),
        }
        return self._add(self.transfers, "tr", "transfer", fields)

    def send_text(self, params: Params) -> Params:
        return self._add(
            self.messages,
            "sms",
            "message",
            {"to": required(params, "to"), "text": required(params, "text")},
        )

    def retrieve_charge(self, charge_id: str) -> Params:
        if charge_id not in self.charges:
            raise missing("charge", charge_id, "id", status=404)
        return self.charges[charge_id]

    def list_charges(self, params: Params) -> Params:
        if "customer" in params and params["customer"] not in self.customers:
            raise missing("customer", params["customer"], "customer")
        return _page("charge", self.charges, ("customer",), params)

    def list_transfers(self, params: Params) -> Params:
        return _page("transfer", self.transfers, ("destination", "transfer_group"), params)

    def state(self) -> Params:
        """Return the whole state, for tests and for the consistency check."""
        executions = [
            {"key": e.key, "path": e.path, "status": e.status, "replays": e.replays}
            for e in self.executions.values()
        ]
        lists = {
            "customers": self.customers,
            "charges": self.charges,
            "refunds": self.refunds,
            "transfers": self.transfers,
            "messages": self.messages,
        }
        return {name: list(objects.values()) for name, objects in lists.items()} | {
            "keys": executions,
            "webhooks": self.webhooks.counts(),
        }

    @staticmethod
    def _add(objects: dict[str, Params], prefix: str, kind: str, fields: Params) -> Params:
        fixed = {
            "id": f"{prefix}_{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "livemode": False,
        }
        new = {**fixed, **fields}
        objects[new["id"]] = new
        return new

    def claim(self, api_key: str, key: str, path: str, params: Params) -> tuple[Execution, bool]:
        """Return the execution of the key, and whether this request must run it.

        Raises StripeError if another request uses the key now, or used it with other parameters.
        """
        fingerprint = hashlib.sha256(
            json.dumps([path, params], sort_keys=True).encode()
        ).hexdigest()
        with self.lock:
            execution = self.executions.get((api_key, key))
            if execution is None:
                execution = self.executions[api_key, key] = Execution(key, path, fingerprint)
                return execution, True
            if execution.fingerprint != fingerprint:
                message = (
                    "Keys for idempotent requests can only be used with the same parameters they"
                    " were first used with."
                )
                raise StripeError(400, "idempotency_error", message)
            if not execution.status:
                message = (
                    "There is currently another in-progress request using this idempotency key."
                    " Please try again later."
                )
                raise StripeError(
                    409, "invalid_request_error", message, code="idempotency_key_in_use"
                )
            execution.replays += 1
            return execution, False

    def release(self, api_key: str, execution: Execution) -> None:
        """Remove an execution without a stored response, so that its key is new again."""
        with self.lock:
            if not execution.status:
                self.executions.pop((api_key, execution.key), None)


def _page(
    kind: str, objects: dict[str, Params], filters: tuple[str, ...], params: Params
) -> Params:
    """Return a page of a list, newest first: the objects whose fields are those of the filters."""
    limit = min(whole_number(params, "limit", least=1) if "limit" in params else 10, 100)
    found = [
        one
        for one in reversed(objects.values())
        if all(params.get(name) in (None, one[name]) for name in filters)
    ]
    if "starting_after" in params:
        last = params["starting_after"]
        if last not in objects:
            raise missing(kind, last, "id", status=404)
        found = found[
            next((n for n, one in enumerate(found, start=1) if one["id"] == last), len(found)) :
        ]
    return {
        "object": "list",
        "url": f"/v1/{kind}s",
        "has_more": len(found) > limit,
        "data": found[:limit],
    }


def missing(kind: str, name: object, param: str, status: int = 400) -> StripeError:
    return StripeError(
        status,
        "invalid_request_error",
        f"No such {kind}: '{name}'",
        code="resource_missing",
        param=param,
    )


def required(params: Params, name: str) -> str:
    if not params.get(name) or not isinstance(params[name], str):
        message = f"Missing required param: {name}."
        raise StripeError(
            400, "invalid_request_error", message, code="parameter_missing", param=name
        )
    return str(params[name])


def whole_number(params: Params, name: str, least: int) -> int:
    value = required(params, name)
    if not (value.isascii() and value.isdigit() and len(value) < 10) or int(value) < least:
        message = f"Invalid integer: {value}"
        raise StripeError(
            400, "invalid_request_error", message, code="parameter_invalid_integer", param=name
        )
    return int(value)


def nested(pairs: Iterable[tuple[str, str]]) -> Params:
    """Convert ``metadata[ride_id]=7`` to ``{"metadata": {"ride_id": "7"}}``."""
    params: Params = {}
    for name, value in pairs:
        outer, bracket, inner = name.partition("[")
        if not bracket:
            params[outer] = value
        elif isinstance(params.setdefault(outer, {}), dict):
            params[outer][inner.rstrip("]")] = value
    return params
