"""What ``make bench`` makes of its figures: the verdict, and the page of the docs that nobody types
a number into."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import __main__ as bench
from benchmarks import calls, clients, in_process, report
from benchmarks.contestant import Taken
from benchmarks.targets import TARGETS, Target, missed

RESULTS: dict[str, Any] = json.loads(report.RESULTS.read_text())


def pages(results: dict[str, Any]) -> list[str]:
    """Return the two pages of the docs."""
    found = report.files(results)
    return [found[report.PAGE], found[report.DETAILS]]


def put(results: dict[str, Any], target: Target, figure: float) -> None:
    """Write the figure where the target looks for it."""
    at: Any = results
    for step, following in zip(target.path, [*target.path[1:], None], strict=True):
        if isinstance(step, dict):
            rows = [row for row in at if step.items() <= row.items()]
            if not rows:
                at.append(dict(step))
            at = rows[0] if rows else at[-1]
        elif following is None:
            at[step] = figure
        else:
            at = at.setdefault(step, [] if isinstance(following, dict) else {})


def all_at_their_limits() -> dict[str, Any]:
    """Return results in which each target is just met."""
    results: dict[str, Any] = {}
    for target in TARGETS:
        put(results, target, target.limit)
    return results


def each_target() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def test_the_pages_and_the_charts_are_made_of_the_results() -> None:
    for path, text in report.files(RESULTS).items():
        assert (report.ROOT / path).read_text() == text, (
            f"run `python -m benchmarks.report` after benchmarks/results.json: {path}"
        )


def test_no_figure_is_in_the_words_of_the_page() -> None:
    assert (
        re.findall(r"\d+", report.INTRODUCTION + report.DETAILS_INTRODUCTION + report.METHOD) == []
    )


def test_another_figure_makes_another_page() -> None:
    results = deepcopy(RESULTS)
    put(results, TARGETS[0], 98.76)
    assert all("98.76" in page for page in pages(results))


def test_the_price_of_traces_has_rows() -> None:
    results = deepcopy(RESULTS)
    ours = results["systems"]["in_process"]["ours"]
    dearer = deepcopy(ours)
    dearer["cases"]["ride first"]["client_us"] += 7
    results["traces"] = {"ours": ours, "traces": dearer}
    took = f"{ours['cases']['ride first']['median_us']:,}"
    assert f"| ours, the ride: first request | {took} | {took} | 7 |" in pages(results)[1]


def test_all_targets_met_is_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.verdict(all_at_their_limits()) == 0
    assert capsys.readouterr().out.endswith("bench: ok\n")


@each_target()
def test_a_missed_target_is_a_failure(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    results = all_at_their_limits()
    put(results, target, target.limit - 0.01 if target.at_least else target.limit + 0.01)
    assert bench.verdict(results) == 1
    assert capsys.readouterr().out.endswith("bench: FAILED 1\n")
    assert missed(results)[0].startswith(target.name)


@each_target()
def test_a_target_that_was_not_measured_is_a_failure(target: Target) -> None:
    results: dict[str, Any] = {}
    for other in TARGETS:
        if other is not target:
            put(results, other, other.limit)
    assert bench.verdict(results) == 1
    assert missed(results)[0].startswith(f"{target.name}: not measured")


def test_the_worst_of_several_rows_counts() -> None:
    rows = [
        {"case": "plain claim", "keys": keys, "ratio": ratio}
        for keys, ratio in ((1, 1.0), (2, 1.3), (3, 1.1))
    ]
    target = next(target for target in TARGETS if target.path[0] == "sizes")
    assert target.measured({"sizes": {"rows": rows}}) == 1.3


@pytest.mark.parametrize("name", bench.PARTS)
def test_a_part_that_failed_is_said_on_the_page_and_misses_its_targets(name: str) -> None:
    results = deepcopy(RESULTS) | {name: {"error": "it broke"}}
    assert "Not measured: it broke." in "".join(pages(results))
    of_part = [target.name for target in TARGETS if target.path[0] == name]
    lines = missed(results)
    assert all(any(line.startswith(f"{name}: not measured") for line in lines) for name in of_part)


def test_a_peer_that_cannot_run_is_in_the_tables_with_its_error() -> None:
    results = deepcopy(RESULTS)
    for figures in results["systems"].values():
        figures["idemkit"] = {
            "distribution": "idemkit",
            "version": "1",
            "error": "ImportError: no module",
        }
    assert "".join(pages(results)).count("ImportError: no module") == len(results["systems"])


def test_a_process_that_ends_without_figures_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert bench._measured_apart("jobs", quick=True) == {
        "error": "ended with status 3; the reason is above"
    }


def test_the_charts_are_xml() -> None:
    charts = [text for path, text in report.files(RESULTS).items() if path.suffix == ".svg"]
    assert len(charts) == 2
    for chart in charts:
        assert ElementTree.fromstring(chart).tag.endswith("svg")


def test_a_ratio_is_taken_within_its_round() -> None:
    # The machine was twice as slow in the second round, for both.
    def taken(microseconds: float) -> Taken:
        return Taken([microseconds] * 2, client_us=1, server_us=1)

    rounds = [{"bare": taken(100), "first": taken(150)}, {"bare": taken(200), "first": taken(300)}]
    assert in_process.summary(rounds)["first"]["ratio"] == 1.5


@pytest.mark.parametrize(
    ("received", "complete"),
    [
        (b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}", True),
        (b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{", False),
        (b"HTTP/1.1 201 Created\r\nContent-Len", False),
        (b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", False),
    ],
)
def test_a_client_knows_when_an_answer_has_come(received: bytes, complete: bool) -> None:
    assert clients._complete(received) is complete


def test_clients_send_what_the_views_are_sent_in_process() -> None:
    from benchmarks import views

    assert clients.BODY == views.BODY


def counted(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    figure: int,
    versions: Any = None,
    *options: str,
) -> Any:
    """Run ``make calls`` with this figure, where 100 is stored; return the stored figures after
    it."""
    stored = tmp_path / "calls.json"
    stored.write_text(
        json.dumps({"versions": versions or calls.versions(), "calls": {"plain, first": 100}})
    )
    monkeypatch.setattr(calls, "STORED", stored)
    monkeypatch.setattr(calls, "measure", lambda: {"plain, first": figure})
    monkeypatch.setattr("sys.argv", ["calls", *options])
    calls.main()
    return json.loads(stored.read_text())


def test_a_count_of_calls_that_rises_by_more_than_two_percent_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted(monkeypatch, tmp_path, 102)
    with pytest.raises(SystemExit, match="plain, first"):
        counted(monkeypatch, tmp_path, 103)
    counted(monkeypatch, tmp_path, 103, {"python": "3.0"})  # Other versions are not compared.


def test_counts_of_calls_are_stored_with_their_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = counted(monkeypatch, tmp_path, 103, {"python": "3.0"}, "--store")
    assert found == {"versions": calls.versions(), "calls": {"plain, first": 103}}
