"""Measure the cost of CONFIRM_REPLICATED, with a primary and a synchronous standby, both with
fsync.

Run ``python -m benchmarks --only replication``. Each kind of request is sent without and with the
setting in turn.
"""

import logging
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from rides_demo.processes.embedded import Postgres, postgres_url
from rides_demo.processes.replicated import Standby

ROUNDS, QUICK_ROUNDS = 300, 30
WARM_UP = 20
READY_SECONDS = 30


def measure(quick: bool) -> dict[str, Any]:
    """Return for each kind of request its median time without and with the setting, and the ratio
    of the two."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_here, QUICK_ROUNDS if quick else ROUNDS).result()


def measure_here(rounds: int) -> dict[str, Any]:
    """Measure in this process, on two servers in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        os.environ |= {
            "DATABASE_URL": postgres_url(folder / "postgres"),
            "DJANGO_SETTINGS_MODULE": "rides_demo.settings",
            "RIDES_RUN_FOLDER": name,
        }
        with Postgres(folder / "postgres") as primary, Standby(folder / "standby", primary.sockets):
            from benchmarks.ground import migrate

            migrate()
            logging.disable(logging.CRITICAL)
            wait_for_standby(primary)
            return {"rows": in_turn(rounds)}


def wait_for_standby(primary: Postgres) -> None:
    """Let commits wait for the standby, and wait until the standby is synchronous."""
    with psycopg.connect(primary.url, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        connection.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + READY_SECONDS
        while (
            connection.execute(
                "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
            ).fetchone()
            is None
        ):
            if time.monotonic() > deadline:
                raise RuntimeError("The standby did not become synchronous.")
            time.sleep(0.05)


def in_turn(rounds: int) -> list[dict[str, Any]]:
    """Send each kind of request without and with the setting in turn; return the figures."""
    from django.test import override_settings

    from benchmarks import views

    kinds = {
        "plain first": (views.plain, ""),
        "plain replay": (views.plain, "plain"),
        "ride replay": (views.ride, "ride"),
    }
    taken: dict[tuple[str, bool], list[float]] = {
        (name, on): [] for name in kinds for on in (False, True)
    }
    for _ in range(WARM_UP + rounds):
        for on in (False, True):
            with override_settings(IDEMPOTENCY={"CONFIRM_REPLICATED": on}):
                for name, (view, key) in kinds.items():
                    request = views.request(key)
                    start = time.perf_counter()
                    answer = view(request)
                    taken[name, on].append(1e6 * (time.perf_counter() - start))
                    if answer.status_code != 201:
                        raise RuntimeError(
                            f"{name}: {answer.status_code} instead of 201: {answer.content!r}"
                        )
    rows = []
    for name in kinds:
        without, confirmed = (median(taken[name, on][WARM_UP:]) for on in (False, True))
        ratio = round(confirmed / without, 2)
        rows.append(
            {
                "case": name,
                "without_us": round(without),
                "confirmed_us": round(confirmed),
                "ratio": ratio,
            }
        )
    return rows
