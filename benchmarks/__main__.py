"""``python -m benchmarks [--quick] [--json FILE] [--only PART ...]``: measure all parts on
temporary servers and print the figures; exit with 1 if a target of ``benchmarks/targets.py`` is
missed or was not measured.

Each part runs in a separate process. If a part fails, the results contain its error, and the other
parts still run. Figures that are compared are measured in the same run, in turns, because machines
differ and the load of a machine changes.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from benchmarks.ground import stop_in_order
from benchmarks.targets import TARGETS, missed

#: The modules of the parts; ``measure(quick)`` of each module returns its figures.
PARTS = (
    *("systems", "workflows", "traces", "jobs", "reaper", "sizes", "rows", "distance"),
    "replication",
)
PATIENCE_SECONDS = 900
ROOT = Path(__file__).parent.parent


def main() -> None:
    """Measure, print the figures, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="Smaller tables, fewer rounds: to see that it works."
    )
    parser.add_argument("--json", type=Path, help="Where the figures go.")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="Some of the parts; the targets of others are missed.",
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    stop_in_order()
    if options.part:
        options.json.write_text(
            json.dumps(import_module(f"benchmarks.{options.part}").measure(options.quick))
        )
        return
    results = measured(options.only, options.quick)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(verdict(results))


def measured(parts: tuple[str, ...], quick: bool) -> dict[str, Any]:
    """Return the figures of each part, and a description of the machine."""
    results: dict[str, Any] = {"quick": quick, "machine": machine(), "seconds": {}}
    for part in parts:
        start = time.monotonic()
        print(f"{part}: begins", flush=True)
        results[part] = _measured_apart(part, quick)
        results["seconds"][part] = round(time.monotonic() - start)
        print(
            f"{part}: {results[part].get('error', 'measured')}, {results['seconds'][part]} s",
            flush=True,
        )
    results["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    return results


def machine() -> dict[str, Any]:
    """Return the properties and versions on which the figures depend."""
    versions = {name: metadata.version(name) for name in ("django", "psycopg", "redis", "gunicorn")}
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_before": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **versions,
    }


def _measured_apart(part: str, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        answer = Path(folder) / "figures.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            "--part",
            part,
            "--json",
            answer,
            *(["--quick"] if quick else []),
        ]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            status = process.wait(PATIENCE_SECONDS)
        except BaseException as error:
            process.terminate()
            process.wait(30)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return {"error": f"no end within {PATIENCE_SECONDS} s"}
        if status or not answer.exists():
            return {"error": f"ended with status {status}; the reason is above"}
        figures: dict[str, Any] = json.loads(answer.read_text())
        return figures


def verdict(results: dict[str, Any]) -> int:
    """Print each target with its figure, then the overall result; return the exit status."""
    for target in TARGETS:
        figure = target.measured(results)
        shown = "-" if figure is None else f"{figure:g}"
        bound = "at least" if target.at_least else "at most"
        print(
            f"{'ok    ' if target.met(results) else 'MISSED'} {target.name:72} {shown:>8}  {bound}"
            f" {target.limit:g}"
        )
    failures = missed(results)
    print(f"bench: FAILED {len(failures)}" if failures else "bench: ok")
    return int(bool(failures))


if __name__ == "__main__":
    main()
