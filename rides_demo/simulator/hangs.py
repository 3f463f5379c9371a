"""Bookings whose payment hangs: Stripe sends interim responses for longer than a run of the
completer may make no progress.

A timeout of the client limits the wait for each read, so it never ends such a call. The client of
the booking does not retry. The completer takes the key, and its run hangs too.
"""

import hashlib
import re
import uuid
from pathlib import Path

from rides_demo import payments
from rides_demo.models import User
from rides_demo.sandbox.account import STALLING_SOURCE

HANG = "hang"
MARKED, EXITS = "hang: runs marked as hung", "hang: loops that ended with status 3"
TOKEN = "soak-ann"
BODY = {"origin_lat": 37.8, "origin_lon": -122.4, "target_lat": 37.9, "target_lon": -122.5}
#: The line of the supervisor, and that of ``idempotency_worker``.
_EXIT = re.compile(r"ended with (the )?status 3\b")


def create_rider(shard: str) -> None:
    """Create the rider whose payments hang in the database ``shard``, if there is none."""
    riders = User.objects.using(shard)
    if not riders.filter(username="ann").exists():
        email, key = "ann@example.com", hashlib.sha256(uuid.uuid4().bytes).hexdigest()
        customer = payments.create_customer(email, STALLING_SOURCE, key)
        riders.create(
            username="ann",
            email=email,
            stripe_customer_id=customer,
            api_token_hash=User.hash_token(TOKEN),
        )


def count_exits(run_dir: Path) -> int:
    """Return how often a loop ended because a run of it hung, according to the log of the
    processes."""
    with (run_dir / "processes.log").open(errors="replace") as lines:
        return sum(_EXIT.search(line) is not None for line in lines)
