"""Us and the peers on the same servers: one client in process, what a request costs, and clients over HTTP."""

from typing import Any

from benchmarks import costs, in_process, over_http
from benchmarks.contestant import PEERS
from benchmarks.ground import ground, migrate

NAMES = ("ours", *PEERS)


def measure(quick: bool) -> dict[str, Any]:
    """Return the figures of each of the three."""
    with ground() as servers:
        migrate()
        figures = in_process.measure(NAMES, quick)
        views = {
            name: [kind.removesuffix(" first") for kind in row["cases"] if kind.endswith(" first")]
            for name, row in figures.items()
            if "cases" in row
        }
        return {
            "in_process": figures,
            "costs": costs.measure(servers, NAMES),
            "over_http": over_http.measure(servers, views, quick),
        }
