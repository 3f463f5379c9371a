"""The price of traces and metrics: the views of this app without them and with them."""

from typing import Any

from benchmarks import in_process
from benchmarks.ground import ground, migrate

#: The systems of this part; ``contestant.load`` knows their modules.
NAMES = ("ours", "traces")


def measure(quick: bool) -> dict[str, Any]:
    """Return for each of the two systems the figures of its kinds of request."""
    with ground():
        migrate()
        rounds = in_process.QUICK_ROUNDS if quick else in_process.ROUNDS
        return in_process.compete(NAMES, rounds)
