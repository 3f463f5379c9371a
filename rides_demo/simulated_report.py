"""What a simulation says at its end: for people a few tables, for programs the same as JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from rides_demo.books import Books
from rides_demo.simulated_plan import KINDS
from rides_demo.simulator import Simulation

#: At most so many findings are printed; all of them are in the JSON.
FINDINGS = 20


def struck(simulation: Simulation) -> dict[str, int]:
    """Return how many times each fault really struck."""
    counts = sorted(simulation.tally.counts.items())
    declined = sum(count for (_, label), count in simulation.table().items() if label == "402")
    found = {name.removeprefix("fault "): count for name, count in counts if name.startswith("fault ") and count}
    return found | ({"declined": declined} if declined else {})


def never_struck(simulation: Simulation) -> list[str]:
    """Return the faults that were due and never struck: nothing was proved of them."""
    found = tuple(struck(simulation))
    return sorted(fault for fault in simulation.plan.due if not any(name.startswith(fault) for name in found))


def totals(simulation: Simulation) -> dict[str, int]:
    """Return the size of it: requests sent, processes killed, crashes of PostgreSQL and restarts of Redis."""
    counts, faults = simulation.tally.counts, struck(simulation)
    return {
        "requests": sum(count for name, count in counts.items() if name.startswith(("answer ", "no answer", "raw"))),
        "process kills": sum(count for name, count in faults.items() if name.startswith("kill-")),
        "database crashes": faults.get("restart-postgres", 0),
        "Redis restarts": faults.get("restart-redis", 0),
    }


def report(simulation: Simulation, books: Books, seconds: dict[str, float], seed: int) -> dict[str, Any]:
    """Return all there is to say, for JSON."""
    return {
        "seed": seed,
        "right": books.right,
        "never struck": never_struck(simulation),
        "totals": totals(simulation),
        "books": asdict(books),
        "transactions held on": simulation.vanishing.held_on,
        "outcomes": [
            {"booking": kind, "outcome": label, "count": n} for (kind, label), n in sorted(simulation.table().items())
        ],
        "faults": struck(simulation),
        "answers": {n: c for n, c in sorted(simulation.tally.counts.items()) if not n.startswith("fault ")},
        "seconds": seconds,
    }


def print_report(console: Console, simulation: Simulation, books: Books, seconds: dict[str, float]) -> None:
    """Print the tables, what is wrong, and the books."""
    table, outcomes = Table(title="Outcomes"), simulation.table()
    labels = sorted({label for _, label in outcomes})
    table.add_column("booking")
    for label in labels:
        table.add_column(label, justify="right")
    for kind in KINDS:
        if any(outcomes[kind, label] for label in labels):
            table.add_row(kind, *(str(outcomes[kind, label] or "") for label in labels))
    console.print(table)
    faults = Table("fault", "struck", title="Faults that really struck")
    for name, count in struck(simulation).items():
        faults.add_row(name, str(count))
    console.print(faults)
    for finding in books.findings[:FINDINGS]:
        console.print(finding, markup=False, highlight=False)
    for statement in simulation.vanishing.held_on:
        line = f"not ended in time: a vanished host's transaction after {statement[:160]}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in (
        f"rides {books.rides}, charges {books.charges}, receipts {books.receipts}, keys {books.keys}, "
        f"kill -9 of web workers {struck(simulation).get('kill-web', 0)}",
        f"resumed keys {books.resumed_keys}, by the completer {books.completer_keys}, stuck keys {books.stuck_keys}; "
        f"booking took {seconds['booking']} s, all {seconds['all']} s, the slowest restart {seconds['slowest restart']} s",
        f"unmatched charges {books.unmatched_charges}, surplus rides {books.surplus_rides}, staged jobs "
        f"{books.staged_jobs}, wrong answers {books.wrong_answers}, unpaid rides {books.unpaid_rides}",
        f"changed answers {books.changed_answers}, changed rides {books.changed_rides}, unaudited rides "
        f"{books.unaudited_rides}, surplus receipts {books.surplus_receipts}, stuck for no reason {books.unexplained_stuck}",
        ", ".join(f"{name} {count}" for name, count in totals(simulation).items()),
        books.line(),
    ):
        console.print(line, highlight=False, soft_wrap=True)
