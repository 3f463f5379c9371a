"""``python -m benchmarks [--quick] [--json FILE]``: measure on a PostgreSQL of its own, print;
exit 1 when a target is missed.

Times are compared with the bare view of the same run, for machines differ. Counts are the same on every machine.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.targets import AT_MOST
from rides_demo.services import Postgres, postgres_url

ROUNDS, QUICK_ROUNDS = 100, 20


def main() -> None:
    """Measure, print, and exit with the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Fewer rounds.")
    parser.add_argument("--json", type=Path, help="Where the figures go.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        server = Postgres(Path(folder) / "postgres", max_connections=50)
        server.start()
        try:
            os.environ |= {
                "DATABASE_URL": postgres_url(Path(folder) / "postgres"),
                "DJANGO_SETTINGS_MODULE": "rides_demo.settings",
                "RIDES_RUN_FOLDER": folder,
            }
            found = measured(QUICK_ROUNDS if options.quick else ROUNDS)
        finally:
            server.stop()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print_table(found)
    missed = missed_targets(found)
    print(*missed, sep="\n")
    print(f"bench: FAILED {len(missed)}" if missed else "bench: ok")
    sys.exit(bool(missed))


def measured(rounds: int) -> dict[str, Any]:
    """Return every figure, and the load of the machine beside them."""
    import logging

    import django

    django.setup()
    logging.disable(logging.CRITICAL)
    from django.core.management import call_command
    from django.db import connection

    from benchmarks import counts, in_process

    call_command("migrate", verbosity=0)
    counts.create_table()
    before = os.getloadavg()[0]
    in_process.measure(1)
    times = in_process.measure(rounds)
    counted = {}
    for name, (view, make, _) in in_process.cases().items():
        request = make()
        cost = counts.count(lambda view=view, request=request: view(request))
        counted[name] = {
            "statements": len(cost.statements),
            "commits": cost.commits,
            "wal_bytes": cost.wal_bytes,
            "rows_written": cost.rows_written,
        }
    connection.close()
    return {
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "cores": os.cpu_count(),
        "times": times,
        "counts": counted,
    }


def print_table(found: dict[str, Any]) -> None:
    """Print what was measured."""
    print(f"load of the machine {found['load']}, {found['cores']} cores")
    for name, row in found["times"].items():
        cost = found["counts"][name]
        print(
            f"{name:15} {row['median_us']:6} us ({row['q1_us']}-{row['q3_us']})  ratio {row['ratio']:5.2f}  "
            f"statements {cost['statements']:2}  commits {cost['commits']}  WAL {cost['wal_bytes']:5} bytes"
        )


def missed_targets(found: dict[str, Any]) -> list[str]:
    """Return a line for each target that was missed, or not measured."""
    ratios = {name: row["ratio"] for name, row in found["times"].items()}
    return [
        f"{name}: {ratios.get(name, 'not measured')}, target at most {limit}"
        for name, limit in AT_MOST.items()
        if not ratios.get(name, limit + 1) <= limit
    ]


if __name__ == "__main__":
    main()
