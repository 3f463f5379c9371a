"""Duplicates that wait for the first request of their key."""

from idempotency import conf
from idempotency._engine.attempts import waiting_slots


def waiting_requests() -> int:
    """Return the number of requests of this process that wait for the first request of their
    key."""
    most = conf.get().MAX_WAITING_REQUESTS
    return most - waiting_slots(most)._value
