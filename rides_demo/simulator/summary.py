"""The report of a simulation: tables for the terminal, and the same content as JSON."""

from dataclasses import asdict, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from rides_demo.simulator.consistency import CheckResult
from rides_demo.simulator.crashes import FAILOVER, RESTART_BROKER, RESTART_POSTGRES
from rides_demo.simulator.hangs import EXITS, HANG, MARKED
from rides_demo.simulator.payouts import PilotTotals
from rides_demo.simulator.plan import KINDS
from rides_demo.simulator.simulation import Simulation

#: The maximum number of printed findings; the JSON has all of them.
FINDINGS = 20


def observed_faults(simulation: Simulation) -> dict[str, int]:
    """Return how often each fault was observed."""
    counts = sorted(simulation.tally.counts.items())
    declined = sum(count for (_, label), count in simulation.table().items() if label == "402")
    found = {
        name.removeprefix("fault "): count
        for name, count in counts
        if name.startswith("fault ") and count
    }
    return found | ({"declined": declined} if declined else {})


def unobserved_faults(simulation: Simulation) -> list[str]:
    """Return the required faults that were not observed: the run did not test them."""
    found = tuple(observed_faults(simulation))
    return sorted(
        fault
        for fault in simulation.plan.required
        if not any(name.startswith(fault) for name in found)
    )


def totals(simulation: Simulation) -> dict[str, int]:
    """Return the numbers of requests, process kills, PostgreSQL crashes, failovers, and restarts of
    Redis or the broker."""
    counts, faults = simulation.tally.counts, observed_faults(simulation)
    return {
        "requests": sum(
            count
            for name, count in counts.items()
            if name.startswith(("answer ", "no answer", "raw"))
        ),
        "process kills": sum(count for name, count in faults.items() if name.startswith("kill-")),
        "database crashes": faults.get(RESTART_POSTGRES, 0),
        **({"failovers": faults[FAILOVER]} if FAILOVER in faults else {}),
        "Redis restarts": faults.get("restart-redis", 0),
        **({"broker restarts": faults[RESTART_BROKER]} if RESTART_BROKER in faults else {}),
        **(
            {"hung runs": faults.get(MARKED, 0), "ends of hung loops": faults.get(EXITS, 0)}
            if HANG in simulation.plan.required
            else {}
        ),
        "tenants": len(simulation.hosts),
    }


def report(
    simulation: Simulation, result: CheckResult, seconds: dict[str, float], seed: int
) -> dict[str, Any]:
    """Return the whole report for JSON."""
    return {
        "seed": seed,
        "right": result.consistent,
        "never struck": unobserved_faults(simulation),
        "totals": totals(simulation),
        "books": asdict(result),
        "paydays": {
            "days": [str(day) for day in simulation.paydays.days],
            "runs": simulation.paydays.runs,
            "kills": simulation.paydays.kills,
        },
        "transactions held on": simulation.suspensions.still_open,
        "outcomes": [
            {"booking": kind, "outcome": label, "count": n}
            for (kind, label), n in sorted(simulation.table().items())
        ],
        "faults": observed_faults(simulation),
        "answers": {
            n: c for n, c in sorted(simulation.tally.counts.items()) if not n.startswith("fault ")
        },
        "seconds": seconds,
    }


def print_report(
    console: Console, simulation: Simulation, result: CheckResult, seconds: dict[str, float]
) -> None:
    """Print the tables, the findings and the counts."""
    table, outcomes = Table(title="Outcomes"), simulation.table()
    labels = sorted({label for _, label in outcomes})
    table.add_column("booking")
    for label in labels:
        table.add_column(label, justify="right")
    for kind in (*KINDS, HANG):
        if any(outcomes[kind, label] for label in labels):
            table.add_row(kind, *(str(outcomes[kind, label] or "") for label in labels))
    console.print(table)
    faults = Table("fault", "count", title="Observed faults")
    for name, count in observed_faults(simulation).items():
        faults.add_row(name, str(count))
    console.print(faults)
    if result.pilots:
        console.print(_pilots(result))
    for finding in result.findings[:FINDINGS]:
        console.print(finding, markup=False, highlight=False)
    for statement in simulation.suspensions.still_open:
        line = (
            "still open after the lock timeout: the transaction of a suspended worker, last"
            f" statement {statement[:160]}"
        )
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in (
        (
            f"rides {result.rides}, charges {result.charges}, receipts {result.receipts}, keys"
            f" {result.keys}, kill -9 of web workers"
            f" {observed_faults(simulation).get('kill-web', 0)}"
        ),
        (
            f"resumed keys {result.resumed_keys}, by the completer {result.completer_keys}, stuck"
            f" keys {result.stuck_keys}; booking took {seconds['booking']} s, all {seconds['all']}"
            f" s, the slowest restart {seconds['slowest restart']} s"
        ),
        (
            f"unmatched charges {result.unmatched_charges}, surplus rides {result.surplus_rides},"
            f" staged jobs {result.staged_jobs}, wrong answers {result.wrong_answers}, unpaid rides"
            f" {result.unpaid_rides}"
        ),
        (
            f"changed answers {result.changed_answers}, changed rides {result.changed_rides},"
            f" unaudited rides {result.unaudited_rides}, surplus receipts"
            f" {result.surplus_receipts}, unexplained stuck keys {result.unexplained_stuck}"
        ),
        *(_payouts(simulation, result) if result.pilots else ()),
        ", ".join(f"{name} {count}" for name, count in totals(simulation).items()),
        result.summary_line(),
    ):
        console.print(line, highlight=False, soft_wrap=True)


def _pilots(result: CheckResult) -> Table:
    """Return a table of what each pilot has earned, and what was paid."""
    table = Table(title="Pilots: each is paid once a day, to the cent")
    table.add_column("pilot")
    for name in ("days", "rides", "earned", "payouts", "paid out", "transfers", "at Stripe"):
        table.add_column(name, justify="right")
    total = PilotTotals("all")
    for row in result.pilots:
        for entry in fields(row):
            if entry.name != "pilot":
                setattr(total, entry.name, getattr(total, entry.name) + getattr(row, entry.name))
    for row in (*result.pilots, total):
        table.add_row(
            row.pilot,
            "" if row is total else str(row.days), str(row.rides), _dollars(row.earned_cents),
            str(row.payouts), _dollars(row.paid_cents),
            str(row.transfers), _dollars(row.transferred_cents),
            end_section=row is result.pilots[-1],
        )  # fmt: skip
    return table


def _payouts(simulation: Simulation, result: CheckResult) -> tuple[str, str]:
    paydays = simulation.paydays
    return (
        f"pilots were paid for {len(paydays.days)} days by {paydays.runs} runs of pay_pilots, two"
        f" at once, of which {paydays.kills} were killed; the completer continued"
        f" {result.completer_payouts} payouts",
        f"double transfers {result.double_transfers}, transfers or payouts without the other"
        f" {result.unmatched_transfers}, payouts of a wrong sum {result.wrong_payouts}, unpaid"
        f" pilots {result.unpaid_pilots}",
    )


def _dollars(cents: int) -> str:
    return f"${cents / 100:,.2f}"
