"""Measure each page of the admin and the scrape of the metrics on a table of 1,000,000 keys.

``python -m tests.admin.scale [--keys N] [--plans] [FOLDER]`` fills a PostgreSQL in ``FOLDER`` (a
temporary one without it), and prints for each page: the seconds of the first request after a
restart of the server, the median of the following ones, the median of the processor's seconds of
the web process and the database (other load on the machine changes these least), and the slowest
statement, with its plan.
"""

# ruff: noqa: T201 - it prints the figures

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rides_demo.processes.embedded import Postgres

KEYS = "/admin/idempotency/idempotencykey/"
JOBS = "/admin/idempotency/stagedjob/"
UNFINISHED, JOBS_WAITING, JOBS_FAILED, ACTED_ON = 63_000, 300_000, 14_000, 5_000
GROUP = "state=stuck&stuck_code=attempts_exhausted&error_group=ReadTimeout%3A+no+answer+to+%23"
ROUNDS = 5
#: The goal in seconds, warm and cold.
GOALS = (0.3, 1.0)
PAGES = {
    "dashboard": f"{KEYS}dashboard/",
    "list": KEYS,
    "stuck": f"{KEYS}?state=stuck",
    "unfinished": f"{KEYS}?state=unfinished",
    "abandoned": f"{KEYS}?state=abandoned",
    "acknowledged": f"{KEYS}?state=acknowledged",
    "refused": f"{KEYS}?state=refused",
    "finished": f"{KEYS}?state=finished",
    "mine": f"{KEYS}?mine=1",
    "group": f"{KEYS}?{GROUP}&request_group=POST+%2Frides%2F%23%2Fpay",
    "search: whole value": f"{KEYS}?q=VALUE",
    "search: prefix": f"{KEYS}?q=1f2e3d4c",
    "search: scope": f"{KEYS}?q=user:1",
    "page 400": f"{KEYS}?p=400",
    "status 5xx": f"{KEYS}?status=5xx",
    "path": f"{KEYS}?path=/none",
    "a key": f"{KEYS}KEY/change/",
    "hand back a group": f"{KEYS}bulk/hand_back/?{GROUP}",
    "hand back all": f"{KEYS}bulk/hand_back/?state=stuck",
    "jobs": JOBS,
    "failed jobs": f"{JOBS}?state=failed",
    "retry all jobs": f"{JOBS}bulk/retry/?state=failed",
}


def main() -> int:
    """Fill, measure, print; return 1 if a page misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--only", default="", help="Only pages with this text in their name.")
    parser.add_argument("--plans", action="store_true", help="The plan of the slowest statement.")
    parser.add_argument("folder", nargs="?")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="admin-scale-") as temporary:
        server = Postgres(Path(options.folder or temporary) / "postgres")
        os.environ |= {"DATABASE_URL": server.url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
        server.start()
        try:
            return _measure(server, options)
        finally:
            server.stop()


def _measure(server: Postgres, options: Any) -> int:
    import django

    django.setup()
    client = _prepare(options.keys)
    from django.db import connections

    from idempotency.contrib.prometheus import DatabaseCollector
    from idempotency.models import IdempotencyKey

    key = IdempotencyKey.objects.stuck().order_by("created_at")[0]
    pages: dict[str, Callable[[], Any]] = {"scrape": lambda: [*DatabaseCollector().collect()]}
    for name, url in PAGES.items():
        there = url.replace("KEY", str(key.pk)).replace("VALUE", key.idempotency_key)
        pages[name] = lambda there=there: _get(client, there)
    missed = 0
    print(f"{'page':20} {'cold s':>7} {'warm s':>7} {'CPU s':>7} {'statement':>9}")
    for name, page in pages.items():
        if options.only not in name:
            continue
        connections.close_all()
        server.stop()
        _forget(server.data)
        server.start()
        cold = _timed(page)[0]
        times = [_timed(page) for _ in range(ROUNDS)]
        warm, cpu = (statistics.median(row[place] for row in times) for place in (0, 1))
        slowest, sql = max(times[-1][2], default=(0.0, ""))
        late = warm > GOALS[0] or cold > GOALS[1]
        missed += late
        print(
            f"{name:20} {cold:7.2f} {warm:7.3f} {cpu:7.3f} {slowest:9.3f}"
            f"{'  missed' if late else ''}",
            flush=True,
        )
        if options.plans:
            with connections["default"].cursor() as cursor:
                cursor.execute(f"EXPLAIN {sql}")
                print("\n".join(f"    {row[0]}" for row in cursor.fetchall()))
    return int(missed > 0)


def _prepare(count: int) -> Any:
    from django.contrib.auth import get_user_model
    from django.core.management import call_command
    from django.test import Client

    from idempotency.models import IdempotencyKey
    from tests.admin import filled

    call_command("migrate", verbosity=0)
    person, made = get_user_model().objects.get_or_create(
        email="scale@example.com", defaults={"is_staff": True, "is_superuser": True}
    )
    if made:
        start = time.monotonic()
        filled.fill_keys(count - UNFINISHED, UNFINISHED, 500)
        filled.fill_jobs(JOBS_WAITING, JOBS_FAILED)
        filled.fill_log(person.pk, ACTED_ON)
        print(f"{IdempotencyKey.objects.count()} keys in {time.monotonic() - start:.0f} s")
    client = Client()
    client.force_login(person)
    return client


def _forget(folder: Path) -> None:
    """Drop the files of the stopped server from the cache of the operating system."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _get(client: Any, url: str) -> None:
    response = client.get(url)
    assert response.status_code == 200, (url, response.status_code)


def _timed(page: Callable[[], Any]) -> tuple[float, float, list[tuple[float, str]]]:
    """Return the seconds of a page, those of the processor, and the statements with theirs."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    connection.ensure_connection()
    connection.connection.prepare_threshold = None
    backend = psutil.Process(connection.connection.info.backend_pid)
    start, used = time.monotonic(), _cpu(backend)
    with CaptureQueriesContext(connection) as queries:
        page()
    seconds, cpu = time.monotonic() - start, _cpu(backend) - used
    selects = [
        query
        for query in queries.captured_queries
        # The engine's own statements are logged with placeholders, which have no plan.
        if query["sql"].startswith("SELECT") and "%(" not in query["sql"]
    ]
    return seconds, cpu, [(float(query["time"]), query["sql"]) for query in selects]


def _cpu(backend: psutil.Process) -> float:
    """Return the seconds of the processor that this process and the backend have used."""
    return time.process_time() + sum(backend.cpu_times()[:2])


if __name__ == "__main__":
    sys.exit(main())
