"""Tests of the lab: the failures of a run, the table of the docs, and a short run with real
nodes."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.failover.configurations import ASYNCHRONOUS, CONFIGURATIONS, CONFIRMED
from tests.failover.events import EVENTS
from tests.failover.results import BEGINNING, END, HEAD, PAGE, ROOT, Cell, filled

PLAYED = [
    (event, configuration)
    for configuration in CONFIGURATIONS
    for event in EVENTS
    if configuration in event.played_in
]
NOTHING_LOST = {"acknowledged": 9, "lost": 0, "doubled": 0, "changed": 0, "server_errors": 0}


def cell(*, kept: bool, **values: Any) -> Cell:
    """Return the cell of one round."""
    times = {"first_answer_seconds": 0.1, "loops_seconds": 1.0, "faults": []}
    return Cell("primary killed", "asynchronous", kept, [NOTHING_LOST | times | values])


def rows_of_the_page() -> list[list[str]]:
    """Return the cells of the table's rows below its head."""
    text = PAGE.read_text().partition(BEGINNING)[2].partition(END)[0]
    rows = [
        [part.strip() for part in line.strip("|").split("|")] for line in text.strip().splitlines()
    ]
    assert tuple(rows[0]) == HEAD
    return rows[2:]


def test_the_table_of_the_docs_has_a_row_for_each_event_in_each_configuration() -> None:
    rows = rows_of_the_page()
    assert [tuple(row[:2]) for row in rows] == [
        (event.name, configuration.name) for event, configuration in PLAYED
    ]
    assert all(re.fullmatch(r"[\d,]+", figure) for row in rows for figure in row[2:7])
    assert all(re.fullmatch(r"\d+\.\d", figure) for row in rows for figure in row[7:])


def test_the_table_of_the_docs_is_of_a_run_that_succeeded() -> None:
    for row, (event, configuration) in zip(rows_of_the_page(), PLAYED, strict=True):
        if configuration in event.kept_in:
            assert row[3:7] == ["0"] * 4
        else:
            assert row[3] != "0"


def test_nothing_is_lost_with_the_setting() -> None:
    assert all(CONFIRMED in event.kept_in for event in EVENTS)


@pytest.mark.parametrize("figure", ["lost", "doubled", "changed"])
def test_what_is_promised_and_broken_is_a_failure(figure: str) -> None:
    assert cell(kept=True, **{figure: 1}).failures() == [
        f"primary killed, asynchronous: 1 {figure}"
    ]
    assert cell(kept=False, lost=1, **({figure: 1} if figure != "lost" else {})).failures() == []


def test_a_loss_that_does_not_show_is_a_failure() -> None:
    assert cell(kept=True).failures() == []
    assert len(cell(kept=False).failures()) == 1


def test_a_fault_of_a_round_is_a_failure_everywhere() -> None:
    for kept in (True, False):
        assert (
            len(cell(kept=kept, lost=int(not kept), faults=["1 5xx other than 503"]).failures())
            == 1
        )


def test_the_table_is_put_between_the_comments_of_a_page() -> None:
    page = filled(f"before\n{BEGINNING}\n\nold\n\n{END}\nafter\n", [cell(kept=True)])
    assert re.fullmatch(r"before\n.*\n\n\| event .*\| 9 \|.*\n\n.*\nafter\n", page, re.S)
    assert "old" not in page


@pytest.mark.processes
@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(ASYNCHRONOUS, id="async"),
        pytest.param(CONFIRMED, id="confirmed", marks=pytest.mark.sample),
    ],
)
def test_a_killed_primary(configuration: Any, short_folder: Path) -> None:
    """One round: an asynchronous standby loses requests, a synchronous one with the setting loses
    none."""
    names = ["--events", "^primary killed$", "--configurations", f"^{configuration.name}$"]
    command = [
        sys.executable,
        "-m",
        "tests.failover",
        "--rounds",
        "1",
        "--folder",
        str(short_folder),
        *names,
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["failover: ok"], done.stdout + done.stderr
