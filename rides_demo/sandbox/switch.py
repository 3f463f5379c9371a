"""The behaviour of the Stripe sandbox, which the web page shows and sets.

There is no behaviour if the service uses the real Stripe, or a server other than the sandbox.
"""

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from django.conf import settings

TIMEOUT_SECONDS = 2
_CHARGES = {"path": "/v1/charges"}


@dataclass(frozen=True)
class Behaviour:
    """One behaviour of Stripe: its text on the page, and the faults that produce it."""

    title: str
    text: str
    faults: tuple[dict[str, Any], ...] = ()


BEHAVIOURS = {
    "works": Behaviour("Works", "It charges the card and responds."),
    "slow": Behaviour(
        "Is slow",
        "It charges the card at once, and responds some seconds later. Press “Book” again during"
        " this time.",
        ({"fault": "slow_after"},),
    ),
    "down": Behaviour(
        "Is down",
        "It closes every connection. Book, then choose “Works” and watch the retry.",
        ({"fault": "down"},),
    ),
    "silent": Behaviour(
        "Charges, then disconnects",
        "The card is charged, but the response is lost. The retry gets the same charge, so the"
        " booking ends by itself.",
        ({"fault": "cut_first"},),
    ),
    "broken": Behaviour(
        "Fails permanently",
        "It returns 500 and replays that for a day. The key becomes stuck and needs manual review"
        " in the admin.",
        ({"fault": "500_begun"},),
    ),
}


class NoSandbox(Exception):
    """The service does not use the sandbox."""


def behaviour() -> str | None:
    """Return the name of the current behaviour, "" if no behaviour has these faults, None without a
    sandbox."""
    try:
        state = _ask("GET", "/_faults")
        in_force = [fault for fault in state["faults"] if fault["count"] != 0]
    except (NoSandbox, KeyError, TypeError):
        return None
    for name, one in BEHAVIOURS.items():
        if len(in_force) == len(one.faults) and all(
            wanted.items() <= fault.items()
            for wanted, fault in zip(map(_on_charges, one.faults), in_force, strict=True)
        ):
            return name
    return ""


def set_behaviour(name: str, *, slow_seconds: float) -> None:
    """Set the behaviour ``name`` of BEHAVIOURS; raise NoSandbox without a sandbox."""
    if behaviour() is None:
        raise NoSandbox
    _ask(
        "POST",
        "/_faults",
        [_on_charges(fault) | {"seconds": slow_seconds} for fault in BEHAVIOURS[name].faults],
    )


def charges_of(ride_id: int) -> int | None:
    """Return the number of charges of the ride in the sandbox; None without a sandbox."""
    try:
        return sum(
            charge["metadata"]["ride_id"] == str(ride_id)
            for charge in _ask("GET", "/_state")["charges"]
        )
    except (NoSandbox, KeyError, TypeError):
        return None


def _on_charges(fault: dict[str, Any]) -> dict[str, Any]:
    return _CHARGES | fault


def _ask(method: str, path: str, body: Any = None) -> Any:
    base = settings.STRIPE_API_BASE or ""
    if urlsplit(base).hostname != "127.0.0.1":
        raise NoSandbox
    try:
        # A proxy of the environment cannot reach the loopback port.
        answer = httpx.request(
            method, f"{base}{path}", json=body, timeout=TIMEOUT_SECONDS, trust_env=False
        )
        return answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        raise NoSandbox from None
