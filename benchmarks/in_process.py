"""One client in process: each system against the bare view of its own process, in interleaved
rounds.

A round visits one process after another; in each process, it sends one kind of request after
another. The ratio of the medians is computed in each round, so that a temporary load affects both
of them. The result is the median of these ratios, with their quartiles.
"""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

from benchmarks.contestant import Contestant, Failed, Taken

ROUNDS, QUICK_ROUNDS = 60, 10
#: Rounds at a distance, where a round takes longer and rounds differ less.
FAR_ROUNDS, QUICK_FAR_ROUNDS = 20, 3
#: Requests of one kind in a round.
IN_A_ROUND = 15


def measure(names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return the figures of ``compete``, and those that compare this app with peers."""
    found = compete(names, rounds)
    return found | {"beside": beside(found)}


def compete(names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return for each system its version and the figures of its kinds of request, or its error."""
    systems = {name: Contestant(name) for name in names}
    try:
        return _compete(systems, rounds)
    finally:
        for system in systems.values():
            system.stop()


def _compete(systems: dict[str, Contestant], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    taken: dict[str, list[dict[str, Taken]]] = {name: [] for name in systems}
    for number in range(-1, rounds):  # The first round warms up: connections, prepared statements.
        for name, system in systems.items():
            if "error" in found.get(name, {}):
                continue
            try:
                if number < 0:
                    found[name] = system.ask("versions")
                    system.ask("round", 20)
                else:
                    taken[name].append(system.ask("round", IN_A_ROUND))
            except Failed as error:
                found.setdefault(name, {})["error"] = str(error)
                print(f"in process: {name} cannot run: {error}", flush=True)
        if number >= 0 and (number + 1) % 10 == 0:
            print(f"in process: round {number + 1} of {rounds}", flush=True)
    for name, of_rounds in taken.items():
        if "error" not in found[name]:
            found[name]["cases"] = summary(of_rounds)
    return found


def beside(found: dict[str, Any]) -> dict[str, float]:
    """Return the figures that depend least on the machine: our ratios over a peer's in the same
    run; DBOS's ride over ours."""

    def ratio(system: str, kind: str) -> float:
        return float(found[system]["cases"][kind]["ratio"])

    said = {}
    if "cases" in found["ours"] and "cases" in found.get("idemkit", {}):
        for kind, of_idemkit in (
            ("plain first",) * 2,
            ("plain replay",) * 2,
            ("ride replay", "plain replay"),
        ):
            said[f"{kind} over idemkit's"] = round(
                ratio("ours", kind) / ratio("idemkit", of_idemkit), 2
            )
    if "cases" in found["ours"] and "cases" in found.get("dbos", {}):
        said["DBOS's ride over ours"] = round(
            ratio("dbos", "ride first") / ratio("ours", "ride first"), 2
        )
    return said


def summary(rounds: list[dict[str, Taken]]) -> dict[str, dict[str, float]]:
    """Return for each kind of request its microseconds and its ratio to the bare view (medians and
    quartiles), and the median of its processor time."""
    found = {}
    for kind in rounds[0]:
        lower, middle, upper = quantiles(
            [each for of_round in rounds for each in of_round[kind].microseconds], n=4
        )
        ratios = [
            median(of_round[kind].microseconds) / median(of_round["bare"].microseconds)
            for of_round in rounds
        ]
        ratio_lower, ratio, ratio_upper = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        found[kind] = {
            "median_us": round(middle),
            "q1_us": round(lower),
            "q3_us": round(upper),
            "ratio": round(ratio, 2),
            "ratio_q1": round(ratio_lower, 2),
            "ratio_q3": round(ratio_upper, 2),
            "client_us": round(median(of_round[kind].client_us for of_round in rounds)),
            "server_us": round(median(of_round[kind].server_us for of_round in rounds)),
        }
    return found
