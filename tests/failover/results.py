"""The results of a run: the printed table, the failures, and the table of the docs.

``python -m tests.failover.results`` writes the table of the last run into
docs/contributing/failover.md.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER, FILE = ROOT / ".run" / "failover", "results.json"
PAGE = ROOT / "docs" / "contributing" / "failover.md"
BEGINNING, END = (
    "<!-- `make failover` and `python -m tests.failover.results` make this table. -->",
    "<!-- end of the table -->",
)
HEAD = (
    *("event", "replication", "acknowledged", "lost", "doubled", "changed"),
    *("5xx other than 503", "first answer, s", "loops back, s"),
)  # fmt: skip
#: The columns that are sums over the rounds, and the columns that are the longest times.
SUMS = ("acknowledged", "lost", "doubled", "changed", "server_errors")
LONGEST = ("first_answer_seconds", "loops_seconds")


@dataclass
class Cell:
    """An event in a configuration: its rounds (``rounds.Round`` as dicts), and whether the event
    must lose nothing."""

    event: str
    configuration: str
    kept: bool
    rounds: list[dict[str, Any]]

    def figures(self) -> list[str]:
        """Return the columns of the table: sums over the rounds, and the longest times."""
        sums = [f"{sum(each[name] for each in self.rounds):,}" for name in SUMS]
        return sums + [f"{max(each[name] for each in self.rounds):.1f}" for name in LONGEST]

    def failures(self) -> list[str]:
        """Return a line for each failure. An expected loss that did not occur is a failure too: the
        run proves nothing."""
        lines = [fault for each in self.rounds for fault in each["faults"]]
        broken = {
            name: sum(each[name] for each in self.rounds) for name in ("lost", "doubled", "changed")
        }
        if self.kept:
            lines += [f"{count} {name}" for name, count in broken.items() if count]
        elif not broken["lost"]:
            lines.append("the loss that is expected here did not show")
        return [f"{self.event}, {self.configuration}: {line}" for line in lines]


def table(cells: list[Cell]) -> str:
    """Return the table as Markdown."""
    lines = [HEAD, ("---",) * len(HEAD)]
    lines += [(cell.event, cell.configuration, *cell.figures()) for cell in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(cells: list[Cell], folder: Path) -> None:
    """Write the results of a run to a file."""
    (folder / FILE).write_text(json.dumps([asdict(cell) for cell in cells], indent=1))


def filled(page: str, cells: list[Cell]) -> str:
    """Return a page with the table of ``cells``."""
    part = re.compile(f"({re.escape(BEGINNING)}\n).*?({re.escape(END)})", re.S)
    return part.sub(lambda found: f"{found[1]}\n{table(cells)}\n\n{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(
        filled(PAGE.read_text(), [Cell(**cell) for cell in json.loads((FOLDER / FILE).read_text())])
    )
