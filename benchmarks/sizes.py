"""Measure the same requests on tables of 10 thousand and of 1 million keys.

``python -m benchmarks.sizes [--quick] [--scale] [--json FILE]`` starts a PostgreSQL in a temporary
folder. Each size has a separate database on the same server. Each call runs on all databases in
turn, so that other load on the machine affects all of them. With ``--quick`` the larger table has
100 thousand keys. ``--scale`` adds a table of 10 million keys, which takes about 15 GB of disk. The
command prints a table, and exits with 1 if a claim or a replay takes more than ``SIZE_AT_MOST``
times its time at 10 thousand keys.

New keys are random, like those of real clients, and replays use random stored keys. The pages that
the larger tables use do not fit into the buffers of PostgreSQL (128 MB here).
"""

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.targets import SIZE_AT_MOST
from rides_demo.processes.embedded import Postgres, postgres_url

SIZES, QUICK_SIZES, SCALE_SIZES = (
    (10_000, 1_000_000),
    (10_000, 100_000),
    (10_000, 1_000_000, 10_000_000),
)
ROUNDS, QUICK_ROUNDS = 30, 8
#: The cases that have a target.
WITH_TARGET = ("plain claim", "phased claim", "plain replay", "phased replay")
FILL_AT_ONCE = 500_000

BYTES = """
SELECT pg_table_size('idempotency_idempotencykey'), pg_indexes_size('idempotency_idempotencykey'),
    (SELECT round(avg(pg_column_size(k.*)))
     FROM (SELECT * FROM idempotency_idempotencykey LIMIT 10000) AS k)
"""
#: After a checkpoint, the first change of each page writes the whole page to the WAL; a larger
#: table has more such pages.
CLAIMS_AFTER_CHECKPOINT = 300
#: Counts the pages that are read to find a key: the only figure here that is the same on every
#: machine.
LOOK = """
EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT request_fingerprint FROM idempotency_idempotencykey
WHERE scope = 'scope=user:1' AND idempotency_key = md5('fill1')::uuid::text
"""


class ToOneSize:
    """A database router that sends everything to the database of the current size."""

    alias: str | None = None

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        """Return the database of the size that is measured."""
        return ToOneSize.alias

    db_for_write = db_for_read


def main() -> None:
    """Measure, print the figures, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="Smaller tables, fewer rounds.")
    parser.add_argument("--scale", action="store_true", help="10 million keys as well.")
    parser.add_argument("--json", type=Path, help="Where the figures go.")
    options = parser.parse_args()
    found = measure(options.quick, sizes=SCALE_SIZES if options.scale else None)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print_table(found)
    missed = missed_targets(found)
    print(*missed, sep="\n")
    print(f"sizes: FAILED {len(missed)}" if missed else "sizes: ok")
    sys.exit(bool(missed))


def measure(
    quick: bool, *, sizes: Sequence[int] | None = None, rounds: int | None = None
) -> dict[str, Any]:
    """Return the tables, and for each case and size the median and the quartiles in microseconds
    and the ratio to the smallest.

    The function starts a process and a server, so the caller need not set up Django.
    """
    sizes = sizes or (QUICK_SIZES if quick else SIZES)
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_here, sizes, rounds).result()


def measure_here(sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure in this process, on a server in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ |= {
            "DATABASE_URL": postgres_url(Path(folder) / "postgres"),
            "DJANGO_SETTINGS_MODULE": "rides_demo.settings",
            "RIDES_RUN_FOLDER": folder,
        }
        with Postgres(Path(folder) / "postgres", max_connections=20):
            import django
            from django.test import override_settings

            django.setup()
            logging.disable(logging.CRITICAL)
            with override_settings(DATABASE_ROUTERS=[ToOneSize()]), databases(sizes) as aliases:
                tables = [fill(alias, keys) for keys, alias in aliases.items()]
                return {"tables": tables, "rows": alternate(aliases, rounds)}


def alternate(aliases: dict[int, str], rounds: int) -> list[dict[str, Any]]:
    """Measure each case on each of the databases in turn; return a row for each case and size."""
    from benchmarks import size_cases

    taken: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds + 1):
        for name, (times, case) in size_cases.cases().items():
            for _ in range(times):
                for keys, alias in random.sample(list(aliases.items()), len(aliases)):
                    ToOneSize.alias = alias
                    seconds = case(alias, keys)
                    if number:  # The first round only warms up.
                        taken.setdefault((name, keys), []).append(1e6 * seconds)
        print(f"sizes: round {number} of {rounds}", flush=True)
    rows = []
    for name in size_cases.cases():
        for keys in aliases:
            lower, middle, upper = quantiles(taken[name, keys], n=4)
            ratio = middle / median(taken[name, min(aliases)])
            times = {"median_us": round(middle), "q1_us": round(lower), "q3_us": round(upper)}
            rows.append({"case": name, "keys": keys, **times, "ratio": round(ratio, 2)})
    return rows


@contextmanager
def databases(sizes: Sequence[int]) -> Iterator[dict[int, str]]:
    """Create an empty database with an alias for each size; drop the databases at the end of the
    block."""
    from django.core.management import call_command
    from django.db import connection, connections

    aliases = {}
    try:
        for keys in sizes:
            alias = aliases[keys] = f"bench_{keys}"
            with connection.cursor() as cursor:
                cursor.execute(f"DROP DATABASE IF EXISTS {alias}")
                cursor.execute(f"CREATE DATABASE {alias}")
            connections.settings[alias] = connections.settings["default"] | {"NAME": alias}
            ToOneSize.alias = alias
            call_command("migrate", database=alias, verbosity=0)
        yield aliases
    finally:
        ToOneSize.alias = None
        for alias in aliases.values():
            if alias in connections.settings:
                connections[alias].close()
                del connections[alias], connections.settings[alias]
            with connection.cursor() as cursor:
                cursor.execute(f"DROP DATABASE IF EXISTS {alias}")


def fill(alias: str, keys: int) -> dict[str, Any]:
    """Fill the table of a size with finished keys of the last 60 hours; return its size and the
    costs of a lookup."""
    from django.db import connections

    from benchmarks import size_cases

    print(f"sizes: filling a table with {keys:,} keys", flush=True)
    start = time.monotonic()
    for first in range(1, keys + 1, FILL_AT_ONCE):
        size_cases.insert(
            alias,
            "fill",
            min(first + FILL_AT_ONCE - 1, keys),
            first=first,
            of=keys,
            oldest_hours=60,
        )
    with connections[alias].cursor() as cursor:
        cursor.execute("VACUUM ANALYZE idempotency_idempotencykey")
        cursor.execute("CHECKPOINT")
        cursor.execute(BYTES)
        table, indexes, row = cursor.fetchone()
        cursor.execute(LOOK)
        plan = cursor.fetchone()[0][0]["Plan"]
        ToOneSize.alias = alias
        cursor.execute("SELECT pg_current_wal_insert_lsn()")
        before = cursor.fetchone()
        for _ in range(CLAIMS_AFTER_CHECKPOINT):
            size_cases.answered(size_cases.ask(), size_cases.plain)
        cursor.execute("SELECT pg_current_wal_insert_lsn() - %s::pg_lsn", before)
        wal = int(cursor.fetchone()[0])
    return {
        "keys": keys,
        "table_bytes": table,
        "index_bytes": indexes,
        "row_bytes": int(row),
        "bytes_a_key": round((table + indexes) / keys),
        "wal_bytes_a_claim": round(wal / CLAIMS_AFTER_CHECKPOINT),
        "pages_a_look": plan["Shared Hit Blocks"] + plan["Shared Read Blocks"],
        "fill_seconds": round(time.monotonic() - start, 1),
    }


def print_table(found: dict[str, Any]) -> None:
    """Print the figures."""
    for table in found["tables"]:
        megabytes = (
            f"{table['table_bytes'] / 1e6:,.0f} MB and {table['index_bytes'] / 1e6:,.0f} MB of"
            " indexes"
        )
        print(
            f"{table['keys']:>10,} keys: {megabytes}; a row {table['row_bytes']} bytes, with all"
            f" {table['bytes_a_key']}"
        )
        looks = f"{table['pages_a_look']} pages for a look"
        print(
            f"{'':16} {looks}, {table['wal_bytes_a_claim']} bytes of WAL for each claim after a"
            " checkpoint"
        )
    for row in found["rows"]:
        spread = f"({row['q1_us']}-{row['q3_us']})"
        print(
            f"{row['case']:20} {row['keys']:>10,} keys  {row['median_us']:7} us {spread:17} ratio"
            f" {row['ratio']:5.2f}"
        )


def missed_targets(found: dict[str, Any]) -> list[str]:
    """Return a line for each claim and replay that misses its target in a larger table."""
    return [
        f"{row['case']} at {row['keys']:,} keys: {row['ratio']}, target at most {SIZE_AT_MOST}"
        for row in found["rows"]
        if row["case"] in WITH_TARGET and row["ratio"] > SIZE_AT_MOST
    ]


if __name__ == "__main__":
    main()
