"""``python -m benchmarks.report FILE``: store the figures of a run, and write the pages of the docs
and their charts from them.

Do not edit the pages: a test generates them from ``benchmarks/results.json`` and compares.
"""

import argparse
import ast
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import bars
from benchmarks.contestant import PEERS
from benchmarks.targets import QUEUES, TARGETS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = Path("docs/explanation/performance.md")
DETAILS = Path("docs/contributing/benchmarks.md")
CHART, CHART_HTTP = Path("docs/images/performance.svg"), Path("docs/images/performance-http.svg")
OURS = {"plain": "ours, plain view", "ride": "ours, the ride"}
#: The system, the view and the label of each row of the table of operations.
WORKFLOWS = (
    ("operations", "plain", "plain operation"),
    ("operations", "call", "operation with a call"),
    ("dbos_step", "call", "dbos, a workflow with one step"),
)
#: The name of each kind of request in the tables.
KINDS = {
    "first": "first request",
    "replay": "replay",
    "conflict": "duplicate while running (409)",
    "mismatch": "same key, other body (422)",
}

#: The maximum length of a line of prose on the page.
LINE = 99

INTRODUCTION = """\
<!-- Written by `python -m benchmarks.report` from benchmarks/results.json; do not edit it. -->

# Performance

This page compares a protected view with the same view without protection, and with other packages.
The *bare view* is the view without protection. The *ride* is a phased view with four commits.
[Benchmarks](../contributing/benchmarks.md) has more figures, the versions of the peers and the
method. A time in microseconds applies to one machine only. Ratios to the bare view differ less
between machines, and ratios between two systems differ least.

Over a unix socket, a request takes mostly processor time, and most of that time is spent in Python.
Over a network, the time of a request depends mostly on its round trips: the first request of a
plain view has as many as the bare view.
"""

DETAILS_INTRODUCTION = """\
<!-- Written by `python -m benchmarks.report` from benchmarks/results.json; do not edit it. -->

# Benchmarks

The command `make bench` alternates between the systems that it compares.
[Performance](../explanation/performance.md) has the figures for users, and explains the bare view
and the ride.
"""

METHOD = """\
## Method

- PostgreSQL and Redis are the embedded servers of the demo, on unix sockets. PostgreSQL runs with
  `fsync` on. Statements are prepared.
- The work of a view is one INSERT. The work of the ride is one INSERT in each of three phases, with
  an empty call between the phases.
- Each system has a separate process, which also measures the bare view. A round sends requests of
  each kind to each system. In each round, the median time of a kind of request is divided by the
  median time of the bare view. The tables show the median of these ratios, with their quartiles in
  brackets.
- Statements, commits and rows are counted in the log and the write-ahead log of PostgreSQL. Redis
  counts its own commands. The method is the same for all systems, drivers and threads.
- Over HTTP, each client has one connection. Clients, gunicorn and PostgreSQL share the cores.
- Each peer is configured as its documentation recommends for several processes. If a peer could not
  run, its row contains the error.
"""


def main() -> None:
    """Store the results, and write the page and the charts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        default=RESULTS,
        help="The JSON of a run (default: %(default)s).",
    )
    results = json.loads(parser.parse_args().file.read_text())
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for path, text in files(results).items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
        print(f"written: {path}")


def files(results: dict[str, Any]) -> dict[Path, str]:
    """Return the pages and the charts, by their paths in the repository."""
    in_process, over_http = (part(results, "systems", name) for name in ("in_process", "over_http"))
    sections = [
        INTRODUCTION,
        _machine(results),
        f"![Ratios to the bare view](../images/{CHART.name})\n",
        "## One client, in process\n",
        _in_process(in_process),
    ]
    details = [
        DETAILS_INTRODUCTION,
        *([f"{results['note']}\n"] if "note" in results else []),
        "## Targets\n",
        _targets(results),
        "## Operations and workflows\n",
        _workflows(part(results, "workflows")),
        "## Responses over HTTP\n",
        _over_http(over_http, in_process),
        "## Replays that a standby confirms\n",
        _replication(part(results, "replication")),
        "## Traces\n",
        _traces(part(results, "traces")),
        "## Processor time\n",
        _processor(in_process),
        "## Statements, commits and WAL\n",
        _costs(part(results, "systems", "costs"), in_process),
        "## Distance to the database\n",
        _distance(part(results, "distance")),
        "## All systems at a distance\n",
        _all_at_a_distance(part(results, "systems", "at_a_distance")),
        "## Staged jobs to their queue\n",
        _jobs(part(results, "jobs")),
        "## Many keys\n",
        _sizes(part(results, "sizes")),
        "## Bodies of requests, and deletion of rows\n",
        _rows(part(results, "rows")),
        "## Claims during the deletion of keys\n",
        _reaper(part(results, "reaper")),
        "## Peers\n",
        _peers(in_process),
        METHOD,
    ]
    found = {PAGE: "\n".join(sections), DETAILS: "\n".join(details)}
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
    """Return a Markdown table; all columns except the first are aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def prose(text: str, indent: str = "") -> str:
    """Return a paragraph in lines of at most LINE columns, without line breaks inside
    backquotes."""
    joined = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.fill(
        joined, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ") + "\n"


def not_measured(figures: dict[str, Any]) -> str:
    """Return the text for a part that failed."""
    return f"Not measured: {figures['error']}.\n"


def _machine(results: dict[str, Any]) -> str:
    machine = results["machine"]
    kind = "a quick run with rough figures" if results["quick"] else "a full run"
    return prose(
        f"These are the results of {kind} on {machine['system']} with {machine['cores']} cores"
        f" (load {machine['load_before']} before the run), Python {machine['python']}, Django"
        f" {machine['django']}, psycopg {machine['psycopg']}."
    )


def _targets(results: dict[str, Any]) -> str:
    rows = []
    for target in TARGETS:
        figure = target.measured(results)
        bound = f"{'at least' if target.at_least else 'at most'} {target.limit:g}"
        rows.append(
            [
                target.name,
                bound,
                "" if target.wanted is None else f"{target.wanted:g}",
                "not measured" if figure is None else f"{figure:g}",
                "met" if target.met(results) else "missed",
            ]
        )
    return (
        table(["figure", "target", "wanted", "measured", "result"], rows)
        + "\n"
        + prose(
            "The column *wanted* has the first target, if a later target has replaced it. Figures"
            " that name no measure, and times at a distance, are times relative to the bare view."
        )
    )


def _systems(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the system, the view and the label of each row; a system with an error has no view."""
    rows = [("ours", view, label) for view, label in OURS.items()]
    for name in PEERS:
        row = figures.get(name, {})
        label = row.get("distribution", name)
        views = [
            kind.removesuffix(" first") for kind in row.get("cases", {}) if kind.endswith(" first")
        ]
        rows += [
            (name, view, f"{label}, the ride" if view == "ride" else label) for view in views
        ] or [(name, "", label)]
    return rows


def _ratios(figures: dict[str, Any]) -> str:
    """Return the table of the kinds of request of each system, as ratios to the bare view."""
    rows = []
    for system, view, label in _systems(figures):
        cases = figures[system].get("cases")
        if cases is None:
            rows.append([label, figures[system]["error"], *["-"] * len(KINDS)])
            continue
        micros = f"{cases[f'{view} first']['median_us']:,}"
        rows.append([label, micros, *[_spread(cases.get(f"{view} {kind}")) for kind in KINDS]])
    return table(["", "first request, us", *KINDS.values()], rows)


def _spread(row: dict[str, float] | None) -> str:
    return f"{row['ratio']:.2f} ({row['ratio_q1']:.2f}-{row['ratio_q3']:.2f})" if row else "-"


def _processor_time(figures: dict[str, Any]) -> str:
    rows = []
    for system, view, label in [("ours", "", "bare view"), *_systems(figures)]:
        if cases := figures[system].get("cases"):
            kinds = [
                cases[f"{view} {kind}".strip()]
                for kind in (("first", "replay") if view else ("bare",))
            ]
            cells = [f"{kind[side]:,}" for kind in kinds for side in ("client_us", "server_us")]
            rows.append([label, *cells, *["-"] * (4 - len(cells))])
    heads = [
        f"{KINDS[kind]}, {side}"
        for kind in ("first", "replay")
        for side in ("Python", "PostgreSQL")
    ]
    return table(["", *heads], rows)


def _in_process(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    bare = figures["ours"]["cases"]["bare"]
    frameworks = [
        row["cases"]["bare in its framework"]["ratio"]
        for row in figures.values()
        if "bare in its framework" in row.get("cases", {})
    ]
    text = (
        f"The figures are ratios to the bare view, which took {bare['median_us']} us"
        f" ({bare['q1_us']}-{bare['q3_us']}).\n\n"
    )
    text += _ratios(figures)
    if frameworks:
        text += "\n" + prose(
            "Three of the peers need Django REST Framework. A bare view on it has a ratio of"
            f" {min(frameworks):.2f} to {max(frameworks):.2f}."
        )
    return text


def _processor(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    text = prose(
        "The processor time of one request is in microseconds, in the process of the view and in"
        " all processes of PostgreSQL:"
    )
    return text + "\n" + _processor_time(figures)


def _workflows(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    rows = []
    for system, view, label in WORKFLOWS:
        if (cases := figures[system].get("cases")) is None:
            rows.append([f"{label}: {figures[system]['error']}", *["-"] * 2])
        else:
            rows.append(
                [label, *(_spread(cases[f"{view} {kind}"]) for kind in ("first", "replay"))]
            )
    text = prose(
        "An operation is a function that runs once for each key. The figures are ratios to a bare"
        " function with the same INSERT, which is called by a bare view. The workflow of DBOS makes"
        " the same call as a step, and has the INSERT in a transaction."
    )
    return text + "\n" + table(["", "first call", "repeat"], rows)


def _traces(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    rows = []
    for view, label in OURS.items():
        for kind in ("first", "replay"):
            without, with_ = (
                figures[name]["cases"][f"{view} {kind}"] for name in ("ours", "traces")
            )
            added = with_["client_us"] - without["client_us"]
            times = (f"{case['median_us']:,}" for case in (without, with_))
            rows.append([f"{label}: {KINDS[kind]}", *times, f"{added:,}"])
    text = prose(
        "With `instrument()` each request makes spans and counts. A thread exports the spans, and"
        " the exporter of this measurement drops them. The figures are in microseconds; the last"
        " column is processor time of the process."
    )
    return text + "\n" + table(["", "without", "with traces", "added in Python"], rows)


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
            hot = (
                "-"
                if cost["hot_share"] is None
                else f"{cost['hot_updates']:g} of {cost['updates']:g}"
            )
            plain = [
                f"{cost[name]:g}"
                for name in ("statements", "redis_commands", "commits", "rows_written")
            ]
            rows.append(
                [
                    f"{label}: {KINDS[kind]}" if view else label,
                    *plain,
                    f"{cost['wal_bytes']:,}",
                    hot,
                ]
            )
    text = prose(
        "The statements are counted in PostgreSQL's log. BEGIN, SET and COMMIT are included. Each"
        " statement takes a round trip, except the statements of this app that are sent together"
        " with BEGIN or COMMIT."
    )
    return (
        text
        + "\n"
        + table(
            [
                "",
                "statements",
                "Redis commands",
                "commits",
                "rows written",
                "bytes of WAL",
                "HOT updates",
            ],
            rows,
        )
    )


def _over_http(figures: dict[str, Any], in_process: dict[str, Any]) -> str:
    if "error" in figures or "error" in in_process:
        return not_measured(figures if "error" in figures else in_process)
    text = prose(
        "The figures are responses (2xx) a second. The ratio to the bare view in the same rounds"
        f" is in brackets. The server is {figures['server']}."
    )
    text += "\n" + _rates(figures, in_process)
    text += f"\n![Answers a second](../images/{CHART_HTTP.name})\n"
    one, ride = figures["ours"]["one_key"], figures["ours"]["serializable"]
    (first, of_first), (last, of_last), *_ = (
        (name, number) for name, number in one.items() if name.isdigit()
    )
    text += "\n" + prose(
        f"Replays of one key write nothing and take no lock: {of_first:,} a second with {first}"
        f" client, {of_last:,} with {last}. The ride under SERIALIZABLE with {ride['clients']}"
        f" clients and distinct keys has {ride['answers_a_second']:,} answers a second and"
        f" {ride['conflicts']} conflicts (409). {ride['run_again']:,} of {ride['phases']:,} phases"
        " ran twice."
    )
    return text


def _rates(figures: dict[str, Any], in_process: dict[str, Any]) -> str:
    """Return the table of the responses a second of the bare view, this app and the peers."""
    counts = list(figures["ours"]["clients"])
    rows = []
    for system, view, label in [("ours", "", "bare view"), *_systems(in_process)]:
        clients = figures.get(system, {}).get("clients")
        if clients is None:
            rows.append(
                [
                    f"{label}: {figures.get(system, {}).get('error', 'not measured')}",
                    *["-"] * (len(counts) + 2),
                ]
            )
            continue
        for kind in ("first", "replay") if view else ("bare",):
            of_kind = {count: row[f"{view} {kind}".strip()] for count, row in clients.items()}
            cells = [_rate(of_kind.get(count), bare=not view) for count in counts]
            last = of_kind[counts[-1]]
            refused = ", ".join(
                f"{number:,} x {status}"
                for status, number in last["statuses"].items()
                if status[0] != "2"
            )
            rows.append(
                [
                    f"{label}: {KINDS[kind]}" if view else label,
                    *cells,
                    f"{last['p99_ms']:g}",
                    refused or "none",
                ]
            )
    heads = [f"{count} client{'s' if count != '1' else ''}" for count in counts]
    return table(
        ["", *heads, f"p99 with {counts[-1]} clients, ms", f"refused with {counts[-1]} clients"],
        rows,
    )


def _rate(row: dict[str, Any] | None, *, bare: bool) -> str:
    if row is None:
        return "-"
    return f"{row['answers_a_second']:,}" + ("" if bare else f" ({row['of_bare']:.2f})")


def _jobs(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    rows = []
    for queue, name in QUEUES.items():
        row = figures.get(queue, {})
        if "direct" not in row:
            rows.append([name, *["-"] * 6])
            continue
        rates = [f"{row[way]:,}" for way in ("direct", "one", "two")]
        ratios = [f"{row['of_direct']:.2f}", f"{row['two_to_one']:.2f}"]
        rows.append([name, *rates, *ratios, str(row.get("load", "-"))])
    latency = figures["latency_ms"]
    kafka = figures.get("kafka", {})
    return (
        prose(
            "The figures are jobs a second. The client library of the queue alone sends jobs from"
            " memory. The enqueuer reads jobs from PostgreSQL, sends them, and deletes or updates"
            " them. The library of RabbitMQ waits for the confirmation of each job. The broker of"
            " Kafka's protocol has its messages in memory, so that its library waits for no disk."
            " The last column is the load of the machine. Figures at a load above the number of"
            " cores are rough."
        )
        + "\n"
        + table(
            [
                "",
                "client library",
                "one enqueuer",
                "two enqueuers",
                "one / client library",
                "two / one",
                "load",
            ],
            rows,
        )
        + "\n"
        + (_of_kafka(kafka) + "\n" if "bare" in kafka else "")
        + prose(
            f"The time from COMMIT to the queue is {latency['after_commit']['p50']} ms (p99"
            f" {latency['after_commit']['p99']} ms) with `HAND_OVER_AFTER_COMMIT`. It is"
            f" {latency['loop']['p50']} ms (p99 {latency['loop']['p99']} ms) with the loop of the"
            " enqueuer."
        )
    )


def _of_kafka(row: dict[str, Any]) -> str:
    return prose(
        "The library of Kafka sends batches of 1,000 jobs. A view without this app sends one job"
        f" and waits for its confirmation: {row['single']:,} jobs a second, and one enqueuer sends"
        f" {row['of_single']:.1f} times as many. A script without this app that locks the rows,"
        f" sends a batch, and updates the rows sends {row['bare']:,} jobs a second:"
        f" {row['bare'] / row['direct']:.2f} of the library alone. One enqueuer reaches"
        f" {row['of_bare']:.2f} of the rate of this script. If it sends no"
        f" message, its statements process {row['statements']:,} jobs a second:"
        f" {row['statements'] / row['direct']:.2f} of the library alone."
    )


def _sizes(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    sizes = [row["keys"] for row in figures["tables"]]
    found = {(row["case"], row["keys"]): row for row in figures["rows"]}
    rows = []
    for case in dict.fromkeys(row["case"] for row in figures["rows"]):
        of_case = [found.get((case, size)) for size in sizes]
        rows.append(
            [
                case,
                *[f"{row['median_us']:,} ({row['ratio']:.2f})" if row else "-" for row in of_case],
            ]
        )
    rows.append(
        ["bytes a key, indexes included", *[f"{row['bytes_a_key']:,}" for row in figures["tables"]]]
    )
    return (
        "The figures are microseconds, with the ratio to the smallest table in brackets.\n\n"
        + table(["", *[f"{size:,} keys" for size in sizes]], rows)
    )


def _rows(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    names = ("wal_bytes", "dead_rows", "disk_bytes", "delete_us", "delete_wal_bytes")
    rows = [[row["case"], *(f"{row[name]:,g}" for name in names)] for row in figures["rows"]]
    heads = [
        "bytes of WAL",
        "dead rows",
        "bytes on disk before autovacuum",
        "DELETE, us",
        "DELETE, bytes of WAL",
    ]
    indexes = [
        [row["index"], *(f"{row[kind]:,}" for kind in ("plain", "ride"))]
        for row in figures.get("indexes", ())
    ]
    return (
        prose(
            "The figures are per key: the cost of the request, the size of its row, and the cost of"
            " deleting the row by SQL after VACUUM and a checkpoint. The bodies do not compress."
        )
        + "\n"
        + table(["", *heads], rows)
        + (_prices(indexes) if indexes else "")
    )


def _prices(rows: list[list[str]]) -> str:
    text = (
        "Two indexes of the table of keys serve only the admin. The figures are the bytes of WAL of"
        " a first request without a body; differences of a few bytes are chance:"
    )
    return "\n" + prose(text) + "\n" + table(["without the index", "plain", "ride"], rows)


def _distance(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    rows = [
        [
            row["case"],
            f"{row['round_trips']:g}",
            f"{row['direct_us']:,}",
            f"{row['unprepared_us']:,} ({row['unprepared_us'] / row['direct_us']:.2f})",
            f"{row['median_us']:,}",
            f"{row['ratio']:.2f}",
        ]
        for row in figures["rows"]
    ]
    heads = [
        "round trips",
        "near, us",
        "near, not prepared, us",
        "far, us",
        "far, ratio to the bare view",
    ]
    return (
        prose(
            f"A proxy delays each round trip by {figures['round_trip_us']:,} us. Without the option"
            " `prepare_threshold` PostgreSQL plans each statement again; the ratio to prepared"
            " statements is in brackets."
        )
        + "\n"
        + table(["", *heads], rows)
    )


def _all_at_a_distance(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    bare = figures["ours"]["cases"]["bare"]
    return (
        prose(
            "All systems have the same distance from PostgreSQL and from Redis. The figures are"
            f" ratios to the bare view, which took {bare['median_us']:,} us there."
        )
        + "\n"
        + _ratios(figures)
    )


def _replication(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    rows = [
        [row["case"], f"{row['without_us']:,}", f"{row['confirmed_us']:,}", f"{row['ratio']:.2f}"]
        for row in figures["rows"]
    ]
    return (
        prose(
            "The setting `CONFIRM_REPLICATED` adds a barrier to a replay, which waits for the disk"
            " of the primary and of its synchronous standby. Both servers share the disk and the"
            " cores here, without a network between them."
        )
        + "\n"
        + table(["", "without, us", "with the setting, us", "ratio"], rows)
    )


def _reaper(figures: dict[str, Any]) -> str:
    if "error" in figures:
        return not_measured(figures)
    rows = [
        [
            name,
            f"{figures[name]['claims']:,}",
            f"{figures[name]['p50_ms']:g}",
            f"{figures[name]['p99_ms']:g}",
        ]
        for name in ("before", "while reaping")
    ]
    return (
        f"Claims run at a fixed rate, first alone, then during the deletion of {figures['keys']:,}"
        " expired keys.\n\n" + table(["", "claims", "p50, ms", "p99, ms"], rows)
    )


def _peers(figures: dict[str, Any]) -> str:
    lines = []
    for name in PEERS:
        text = (
            ast.get_docstring(ast.parse((ROOT / "benchmarks" / "peers" / f"{name}.py").read_text()))
            or ""
        )
        version = figures.get(name, {}).get("version", "")
        label, _, rest = (
            text.replace("``", "`").replace("\n\n", " ").replace("\n", " ").partition(": ")
        )
        lines.append(
            prose(f"- **{label} {version}**: {rest}" if version else f"- **{label}**: {rest}", "  ")
        )
    return "".join(lines)


def _chart(figures: dict[str, Any]) -> str:
    groups = []
    for system, view, label in _systems(figures):
        cases = figures[system].get("cases", {})
        # Its bar would shrink all others to lines.
        if cases and (system, view) != ("dbos", "ride"):
            groups.append(
                (
                    label,
                    [
                        cases.get(f"{view} {kind}", {}).get("ratio")
                        for kind in ("first", "replay", "conflict")
                    ],
                )
            )
    return bars(
        "Time over that of the bare view",
        ["first request", "replay", "in progress"],
        groups,
        line_at=1,
    )


def _chart_http(figures: dict[str, Any], in_process: dict[str, Any]) -> str:
    count = list(figures["ours"]["clients"])[-1]
    groups = [("bare view", [figures["ours"]["clients"][count]["bare"]["answers_a_second"], None])]
    for system, view, label in _systems(in_process):
        if row := figures.get(system, {}).get("clients", {}).get(count):
            groups.append(
                (label, [row[f"{view} {kind}"]["answers_a_second"] for kind in ("first", "replay")])
            )
    return bars(
        f"Answers a second over HTTP, {count} clients",
        ["first request", "replay"],
        groups,
        digits=0,
    )


if __name__ == "__main__":
    main()
