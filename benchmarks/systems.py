"""This app and the peers on the same servers: one client in process, near and at a distance; the
costs of a request; and clients over HTTP."""

from typing import Any

from benchmarks import costs, in_process, over_http
from benchmarks.contestant import PEERS
from benchmarks.ground import far_away, ground, migrate

NAMES = ("ours", *PEERS)


def measure(quick: bool) -> dict[str, Any]:
    """Return the figures of the four measurements."""
    with ground() as servers:
        migrate()
        figures = in_process.measure(NAMES, in_process.QUICK_ROUNDS if quick else in_process.ROUNDS)
        with far_away(servers):
            far = in_process.measure(
                NAMES, in_process.QUICK_FAR_ROUNDS if quick else in_process.FAR_ROUNDS
            )
        views = {
            name: [kind.removesuffix(" first") for kind in row["cases"] if kind.endswith(" first")]
            for name, row in figures.items()
            if "cases" in row
        }
        return {
            "in_process": figures,
            "at_a_distance": far,
            "costs": costs.measure(servers, NAMES),
            "over_http": over_http.measure(servers, views, quick),
        }
