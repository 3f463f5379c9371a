"""``python -m benchmarks.report FILE``: keep the figures of a run, and write the page of the docs and its charts from them.

Nobody types a number into that page: a test writes it again from ``benchmarks/results.json`` and compares.
"""

import argparse
import ast
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import bars
from benchmarks.contestant import PEERS
from benchmarks.targets import TARGETS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = Path("docs/explanation/performance.md")
CHART, CHART_HTTP = Path("docs/images/performance.svg"), Path("docs/images/performance-http.svg")
OURS = {"plain": "ours, plain view", "ride": "ours, four-phase ride"}
#: What a kind of request is called in a table.
KINDS = {"first": "first request", "replay": "replay", "conflict": "in progress", "mismatch": "another body"}

INTRODUCTION = """\
<!-- `python -m benchmarks.report` writes this page from benchmarks/results.json; what is changed here is lost. -->

# Performance

What protection costs: beside the same view without it, and beside what you could take instead. `make bench` measures in turns
what it compares; run it on your machine. A microsecond holds on one machine alone, a ratio to the bare view on more of them,
and best holds what one system takes over another.
"""

METHOD = """\
## How it is measured

- PostgreSQL and Redis are the embedded ones of the demo, on unix sockets; PostgreSQL with `fsync` on. Statements are prepared.
- The work is one INSERT; in the ride it is one in each of three phases, with a call between them that does nothing.
- In process each system has a process of its own, in which the bare view is measured too. A round sends requests of each kind
  to each system; the ratio is that of the medians of a round, and what is shown is the median of these ratios with their
  quartiles in brackets.
- Statements, commits and rows are what PostgreSQL's log and write-ahead log say, Redis commands what Redis says: the same
  instrument for all, whatever drivers and threads they use.
- Over HTTP there is a connection for each client. Clients, gunicorn and PostgreSQL share the cores.
- A peer is set up as its documentation says for several processes. One that could not run has its error in its row.
"""


def main() -> None:
    """Keep the results and write what is made of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS, help="The JSON of a run (default: %(default)s).")
    results = json.loads(parser.parse_args().file.read_text())
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for path, text in files(results).items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
        print(f"written: {path}")


def files(results: dict[str, Any]) -> dict[Path, str]:
    """Return the page and the charts, by their paths in the repository."""
    in_process, over_http = (part(results, "systems", name) for name in ("in_process", "over_http"))
    sections = [
        INTRODUCTION,
        *([f"{results['note']}\n"] if "note" in results else []),
        _machine(results),
        f"![Ratios to the bare view](../images/{CHART.name})\n",
        "## The targets\n",
        _targets(results),
        "## One client, in process\n",
        _in_process(in_process),
        "## What a request costs on any machine\n",
        _costs(part(results, "systems", "costs"), in_process),
        "## Over HTTP\n",
        _over_http(over_http, in_process),
        "## Staged jobs to their queue\n",
        _jobs(part(results, "jobs")),
        "## Many keys\n",
        _sizes(part(results, "sizes")),
        "## A network before the database\n",
        _distance(part(results, "distance")),
        "## While keys are reaped\n",
        _reaper(part(results, "reaper")),
        "## The peers\n",
        _peers(in_process),
        METHOD,
    ]
    found = {PAGE: "\n".join(sections)}
    if "error" not in in_process:
        found[CHART] = _chart(in_process)
    if "error" not in over_http:
        found[CHART_HTTP] = _chart_http(over_http, in_process)
    return found


def part(results: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the figures of a part, or its error."""
    found = results
    for name in names:
        if "error" in found:
            return found
        found = found.get(name, {"error": "it was not part of this run"})
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; numbers stand to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def not_measured(figures: dict[str, Any]) -> str:
    """Return what is said of a part that failed."""
    return f"Not measured: {figures['error']}.\n"


def _machine(results: dict[str, Any]) -> str:
    machine = results["machine"]
    kind = "a quick run, whose figures are rough" if results["quick"] else "a full run"
    return (
        f"This was {kind}: {machine['system']} with {machine['cores']} cores (load {machine['load_before']} before it), "
        f"Python {machine['python']}, Django {machine['django']}, psycopg {machine['psycopg']}.\n"
    )


def _targets(results: dict[str, Any]) -> str:
    rows = []
    for target in TARGETS:
        figure = target.measured(results)
        bound = f"{'at least' if target.at_least else 'at most'} {target.limit:g}"
        rows.append(
            [target.name, bound, "not measured" if figure is None else f"{figure:g}", "" if target.met(results) else "missed"]
        )
    return table(["", "target", "measured", ""], rows)


def _systems(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the system, the view and the label of each row; a system with an error has no view."""
    rows = [("ours", view, label) for view, label in OURS.items()]
    for name in PEERS:
        row = figures.get(name, {})
        label = row.get("distribution", name)
        views = [kind.removesuffix(" first") for kind in row.get("cases", {}) if kind.endswith(" first")]
        rows += [(name, view, f"{label}, the ride" if view == "ride" else label) for view in views] or [(name, "", label)]
    return rows


def _in_process(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)

    def spread(row: dict[str, float] | None) -> str:
        return f"{row['ratio']:.2f} ({row['ratio_q1']:.2f}-{row['ratio_q3']:.2f})" if row else "-"

    rows = []
    for system, view, label in _systems(figures):
        cases = figures[system].get("cases")
        if cases is None:
            rows.append([label, figures[system]["error"], *["-"] * len(KINDS)])
            continue
        micros = f"{cases[f'{view} first']['median_us']:,}"
        rows.append([label, micros, *[spread(cases.get(f"{view} {kind}")) for kind in KINDS]])
    bare = figures["ours"]["cases"]["bare"]
    frameworks = [
        row["cases"]["bare in its framework"]["ratio"]
        for row in figures.values()
        if "bare in its framework" in row.get("cases", {})
    ]
    text = f"Ratios to the bare view, which took {bare['median_us']} us ({bare['q1_us']}-{bare['q3_us']}).\n\n"
    text += table(["", "first request, us", *KINDS.values()], rows)
    if frameworks:
        text += (
            f"\nA bare view on Django REST Framework, which three of the peers need, takes {min(frameworks):.2f} to "
            f"{max(frameworks):.2f} by itself.\n"
        )
    if beside := figures.get("beside"):
        text += "\nA statement beside a COMMIT costs more on one machine than on another. What one system takes over another "
        text += "changes less:\n\n" + table(
            ["", "ratio"],
            [[f"our {name}" if "over idemkit" in name else name, f"{ratio:.2f}"] for name, ratio in beside.items()],
        )
    return text


def _costs(figures: dict[str, Any], in_process: dict[str, Any]) -> str:
    if "error" in figures or "error" in in_process:
        return not_measured(figures if "error" in figures else in_process)
    rows = []
    for system, view, label in [("ours", "", "bare view"), *_systems(in_process)]:
        cases = figures[system].get("cases")
        if cases is None:
            rows.append([f"{label}: {figures[system]['error']}", *["-"] * 6])
            continue
        for kind in ("first", "replay") if view else ("bare",):
            cost = cases[f"{view} {kind}".strip()]
            hot = "-" if cost["hot_share"] is None else f"{cost['hot_updates']:g} of {cost['updates']:g}"
            plain = [f"{cost[name]:g}" for name in ("statements", "redis_commands", "commits", "rows_written")]
            rows.append([f"{label}: {KINDS[kind]}" if view else label, *plain, f"{cost['wal_bytes']:,}", hot])
    return "BEGIN and COMMIT are statements too; each is a round trip.\n\n" + table(
        ["", "statements", "Redis commands", "commits", "rows written", "bytes of WAL", "HOT updates"], rows
    )


def _over_http(figures: dict[str, Any], in_process: dict[str, Any]) -> str:
    if "error" in figures or "error" in in_process:
        return not_measured(figures if "error" in figures else in_process)
    counts = list(figures["ours"]["clients"])
    text = (
        f"Answers a second (2xx), and in brackets their share of the bare view's in the same rounds; {figures['server']}.\n\n"
    )
    rows = []
    for system, view, label in [("ours", "", "bare view"), *_systems(in_process)]:
        clients = figures.get(system, {}).get("clients")
        if clients is None:
            rows.append([f"{label}: {figures.get(system, {}).get('error', 'not measured')}", *["-"] * (len(counts) + 2)])
            continue
        for kind in ("first", "replay") if view else ("bare",):
            of_kind = {count: row[f"{view} {kind}".strip()] for count, row in clients.items()}
            cells = [_rate(of_kind.get(count), bare=not view) for count in counts]
            last = of_kind[counts[-1]]
            refused = ", ".join(f"{number:,} x {status}" for status, number in last["statuses"].items() if status[0] != "2")
            rows.append([f"{label}: {KINDS[kind]}" if view else label, *cells, f"{last['p99_ms']:g}", refused or "none"])
    heads = [f"{count} client{'s' if count != '1' else ''}" for count in counts]
    text += table(["", *heads, f"p99 of {counts[-1]}, ms", f"refused of {counts[-1]}"], rows)
    text += f"\n![Answers a second](../images/{CHART_HTTP.name})\n"
    one, ride = figures["ours"]["one_key"], figures["ours"]["serializable"]
    (first, of_first), (last, of_last), *_ = ((name, number) for name, number in one.items() if name.isdigit())
    text += (
        f"\nReplays of one key: {of_first:,} a second by {first} client, {of_last:,} by {last}; they write nothing and lock "
        f"nothing.\n\nThe ride under SERIALIZABLE, {ride['clients']} clients, each request with a key of its own: "
        f"{ride['answers_a_second']:,} answers a second, {ride['conflicts']} conflicts (409), {ride['run_again']:,} of "
        f"{ride['phases']:,} phases run twice.\n"
    )
    return text


def _rate(row: dict[str, Any] | None, *, bare: bool) -> str:
    if row is None:
        return "-"
    return f"{row['answers_a_second']:,}" + ("" if bare else f" ({row['of_bare']:.2f})")


def _jobs(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    rows = []
    for queue, name in (("rq", "RQ"), ("celery", "Celery on Redis")):
        row = figures[queue]
        rates = [f"{row[way]:,}" for way in ("direct", "one", "two")]
        rows.append([name, *rates, f"{row['of_direct']:.2f}", f"{row['two_to_one']:.2f}"])
    latency = figures["latency_ms"]
    return (
        "Jobs a second: the queue's own client alone with jobs that it has in memory, and the enqueuer, which reads them from "
        "PostgreSQL and deletes them.\n\n"
        + table(["", "client alone", "one enqueuer", "two", "one over the client", "two over one"], rows)
        + f"\nFrom COMMIT to the queue: {latency['after_commit']['p50']} ms (p99 {latency['after_commit']['p99']} ms) with the "
        f"hand-over after COMMIT, {latency['loop']['p50']} ms (p99 {latency['loop']['p99']} ms) with the enqueuer's loop.\n"
    )


def _sizes(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    sizes = [row["keys"] for row in figures["tables"]]
    found = {(row["case"], row["keys"]): row for row in figures["rows"]}
    rows = []
    for case in dict.fromkeys(row["case"] for row in figures["rows"]):
        of_case = [found.get((case, size)) for size in sizes]
        rows.append([case, *[f"{row['median_us']:,} ({row['ratio']:.2f})" if row else "-" for row in of_case]])
    rows.append(["bytes a key, indexes included", *[f"{row['bytes_a_key']:,}" for row in figures["tables"]]])
    return "Microseconds, and in brackets the ratio to the smallest table.\n\n" + table(
        ["", *[f"{size:,} keys" for size in sizes]], rows
    )


def _distance(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    rows = [
        [row["case"], f"{row['round_trips']:g}", f"{row['direct_us']:,}", f"{row['median_us']:,}", f"{row['ratio']:.2f}"]
        for row in figures["rows"]
    ]
    return f"Each round trip takes {figures['round_trip_us']:,} us more here than on the unix socket.\n\n" + table(
        ["", "round trips", "direct, us", "far, us", "far, ratio to the bare view"], rows
    )


def _reaper(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    rows = [
        [name, f"{figures[name]['claims']:,}", f"{figures[name]['p50_ms']:g}", f"{figures[name]['p99_ms']:g}"]
        for name in ("before", "while reaping")
    ]
    return f"Claims at a fixed pace, alone and while {figures['keys']:,} expired keys are deleted.\n\n" + table(
        ["", "claims", "p50, ms", "p99, ms"], rows
    )


def _peers(figures: dict[str, Any]) -> str:
    lines = []
    for name in PEERS:
        text = ast.get_docstring(ast.parse((ROOT / "benchmarks" / "peers" / f"{name}.py").read_text())) or ""
        version = figures.get(name, {}).get("version", "")
        label, _, rest = text.replace("``", "`").replace("\n\n", " ").replace("\n", " ").partition(": ")
        lines.append(f"- **{label} {version}**: {rest}\n" if version else f"- **{label}**: {rest}\n")
    return "".join(lines)


def _chart(figures: dict[str, Any]) -> str:
    groups = []
    for system, view, label in _systems(figures):
        cases = figures[system].get("cases", {})
        if cases and (system, view) != ("dbos", "ride"):  # It would make all others a line.
            groups.append((label, [cases.get(f"{view} {kind}", {}).get("ratio") for kind in ("first", "replay", "conflict")]))
    return bars("Time over that of the bare view", ["first request", "replay", "in progress"], groups, line_at=1)


def _chart_http(figures: dict[str, Any], in_process: dict[str, Any]) -> str:
    count = list(figures["ours"]["clients"])[-1]
    groups = [("bare view", [figures["ours"]["clients"][count]["bare"]["answers_a_second"], None])]
    for system, view, label in _systems(in_process):
        if row := figures.get(system, {}).get("clients", {}).get(count):
            groups.append((label, [row[f"{view} {kind}"]["answers_a_second"] for kind in ("first", "replay")]))
    return bars(f"Answers a second over HTTP, {count} clients", ["first request", "replay"], groups, digits=0)


if __name__ == "__main__":
    main()
