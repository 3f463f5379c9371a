"""The switch of the web page: how Stripe's sandbox behaves, and what it has charged.

There is nothing to switch where a real Stripe answers, or a stand-in of somebody else's.
"""

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from django.conf import settings

TIMEOUT_SECONDS = 2
#: Longer than it takes to press a button twice; shorter than the Stripe client waits.
SLOW_SECONDS = 4
_CHARGES = {"path": "/v1/charges"}


@dataclass(frozen=True)
class Behaviour:
    """One position of the switch: what the page says of it, and the faults that make it so."""

    title: str
    text: str
    faults: tuple[dict[str, Any], ...] = ()


BEHAVIOURS = {
    "works": Behaviour("Works", "It charges the card and says so."),
    "slow": Behaviour(
        "Is slow",
        f"It takes {SLOW_SECONDS} seconds. Press the button again meanwhile.",
        ({"fault": "slow", "seconds": SLOW_SECONDS},),
    ),
    "down": Behaviour("Is down", "Nobody answers. Book, then bring it back and watch the retry.", ({"fault": "down"},)),
    "silent": Behaviour(
        "Charges, then hangs up", "The card is charged, but the answer is lost: the worst moment.", ({"fault": "cut_after"},)
    ),
    "broken": Behaviour(
        "Fails for good",
        "It answers 500, and repeats that for a day: a person must answer, in the admin.",
        ({"fault": "500_begun"},),
    ),
}


class NoSandbox(Exception):
    """There is no sandbox that this service could switch."""


def behaviour() -> str | None:
    """Return the position of the switch, "" for faults of somebody else's; None where there is no sandbox."""
    try:
        state = _ask("GET", "/_faults")
        in_force = [fault for fault in state["faults"] if fault["count"] != 0]
    except (NoSandbox, KeyError, TypeError):
        return None
    for name, one in BEHAVIOURS.items():
        if len(in_force) == len(one.faults) and all(
            wanted.items() <= fault.items() for wanted, fault in zip(map(_on_charges, one.faults), in_force, strict=True)
        ):
            return name
    return ""


def set_behaviour(name: str) -> None:
    """Put the switch to ``name``, one of BEHAVIOURS. Raises NoSandbox, changing nothing."""
    if behaviour() is None:
        raise NoSandbox
    _ask("POST", "/_faults", [_on_charges(fault) for fault in BEHAVIOURS[name].faults])


def charges_of(ride_id: int) -> int | None:
    """Return how many charges the sandbox has made for the ride; None where there is no sandbox."""
    try:
        return sum(charge["metadata"]["ride_id"] == str(ride_id) for charge in _ask("GET", "/_state")["charges"])
    except (NoSandbox, KeyError, TypeError):
        return None


def _on_charges(fault: dict[str, Any]) -> dict[str, Any]:
    return _CHARGES | fault


def _ask(method: str, path: str, body: Any = None) -> Any:
    base = settings.STRIPE_API_BASE or ""
    if urlsplit(base).hostname != "127.0.0.1":
        raise NoSandbox
    try:
        # A proxy from the environment does not lead there.
        answer = httpx.request(method, f"{base}{path}", json=body, timeout=TIMEOUT_SECONDS, trust_env=False)
        return answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        raise NoSandbox from None
