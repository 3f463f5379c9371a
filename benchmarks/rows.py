"""Measure the cost of a key's row with bodies of 0, 1 and 10 KB, from its claim to its deletion,
and the price of the indexes of the admin.

Run ``python -m benchmarks --only rows``. The server is a PostgreSQL in a temporary folder;
autovacuum of the table is off. Bodies are random, so they do not compress. VACUUM and a checkpoint
precede the deletion, as they do for keys of yesterday. After a checkpoint, the first change of a
page writes the whole page to the WAL.
"""

import json
import logging
import os
import random
import string
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from rides_demo.processes.embedded import Postgres, postgres_url

KILOBYTES = (0, 1, 10)
REQUESTS, QUICK_REQUESTS = 3000, 300
#: Only the admin uses these indexes. A request without one of them shows its price.
OF_THE_ADMIN = ("idempotency_key_created", "idempotency_key_refused")
#: The number of requests whose WAL is counted. Counting takes longer than the request.
COUNTED = 60

EMPTY = "TRUNCATE idempotency_idempotencykey CASCADE"
LEAVE_ALONE = "ALTER TABLE idempotency_idempotencykey SET (autovacuum_enabled = off)"
FLUSH = "SELECT pg_stat_force_next_flush(), pg_stat_clear_snapshot()"
STATE = """
SELECT pg_total_relation_size('idempotency_idempotencykey'),
    pg_stat_get_dead_tuples('idempotency_idempotencykey'::regclass)
"""
#: The same number of rows as a batch of the reaper.
DELETE = """
DELETE FROM idempotency_idempotencykey
WHERE id IN (SELECT id FROM idempotency_idempotencykey ORDER BY id LIMIT 1000)
"""
WAL = "SELECT pg_current_wal_insert_lsn() - %s::pg_lsn"


def measure(quick: bool) -> dict[str, Any]:
    """Return the costs of a key for each kind of request and size of body."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_here, QUICK_REQUESTS if quick else REQUESTS).result()


def measure_here(requests: int) -> dict[str, Any]:
    """Measure in this process, on a server in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        os.environ |= {
            "DATABASE_URL": postgres_url(folder / "postgres"),
            "DJANGO_SETTINGS_MODULE": "rides_demo.settings",
            "RIDES_RUN_FOLDER": name,
        }
        with Postgres(folder / "postgres"):
            from benchmarks.ground import migrate

            migrate()
            logging.disable(logging.CRITICAL)
            return {
                "rows": [
                    _cost(kind, size, requests) for size in KILOBYTES for kind in ("plain", "ride")
                ],
                "indexes": prices(),
            }


def prices() -> list[dict[str, Any]]:
    """Return the bytes of WAL of a first request with all indexes, and without one of the admin."""
    from django.db import connection

    from benchmarks.counts import create_table

    create_table()
    found = [{"index": "none", **_wal_of_kinds()}]
    with connection.cursor() as cursor:
        for index in OF_THE_ADMIN:
            cursor.execute("SELECT pg_get_indexdef(%s::regclass)", [index])
            (definition,) = cursor.fetchone()
            cursor.execute(f"DROP INDEX {index}")
            found.append({"index": index, **_wal_of_kinds()})
            cursor.execute(definition)
    return found


def _wal_of_kinds() -> dict[str, int]:
    return {kind: round(median(_wal_bytes(_asker(kind, 0)))) for kind in ("plain", "ride")}


def _asker(kind: str, kilobytes: int) -> Callable[[], None]:
    """Return a function that sends a request with a new key and a body of this size."""
    from benchmarks import views

    view = {"plain": views.plain, "ride": views.ride}[kind]

    def ask() -> None:
        answer = view(views.request(body=body_of(1000 * kilobytes)))
        if answer.status_code != 201:
            raise RuntimeError(f"{kind}: {answer.status_code} instead of 201: {answer.content!r}")

    return ask


def _wal_bytes(ask: Callable[[], None]) -> list[int]:
    """Return the bytes of WAL of each request. The first requests read the catalogue."""
    from benchmarks.counts import count

    return [count(ask).wal_bytes for _ in range(2 * COUNTED)][COUNTED:]


def _cost(kind: str, kilobytes: int, requests: int) -> dict[str, Any]:
    from django.db import connection

    from benchmarks.counts import create_table

    ask = _asker(kind, kilobytes)
    create_table()
    with connection.cursor() as cursor:
        cursor.execute(EMPTY)
        cursor.execute(LEAVE_ALONE)
        wal = _wal_bytes(ask)
        cursor.execute(EMPTY)
        cursor.execute(FLUSH)
        cursor.execute(STATE)
        _, dead_before = cursor.fetchone()
        for _ in range(requests):
            ask()
        cursor.execute(FLUSH)
        cursor.execute(STATE)
        size, dead = cursor.fetchone()
        cursor.execute("VACUUM idempotency_idempotencykey")
        cursor.execute("CHECKPOINT")
        cursor.execute(WAL, ["0/0"])
        before, start = cursor.fetchone()[0], time.perf_counter()
        deleted = 0
        while deleted < requests:
            cursor.execute(DELETE)
            deleted += cursor.rowcount
        seconds = time.perf_counter() - start
        cursor.execute(WAL, ["0/0"])
        delete_wal = int(cursor.fetchone()[0] - before)
    return {
        "case": f"{kind}, {kilobytes} KB",
        "wal_bytes": round(median(wal)),
        "dead_rows": round((dead - dead_before) / requests, 2),
        "disk_bytes": round(size / requests),
        "delete_us": round(1e6 * seconds / requests),
        "delete_wal_bytes": round(delete_wal / requests),
    }


def body_of(size: int) -> str:
    """Return a JSON object with a random text of ``size`` characters, which does not compress."""
    return json.dumps(
        {"text": "".join(random.choices(string.ascii_letters + string.digits, k=size))}
    )
