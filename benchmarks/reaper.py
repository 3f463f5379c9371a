"""Measure how much slower a claim is while the reaper deletes a million keys.

``python -m benchmarks.reaper [--keys N]`` starts a PostgreSQL in a temporary folder, fills the
table with finished keys past their retention, and measures claims in autocommit: first without the
reaper, then while ``manage.py reap_keys`` runs in a process. It prints both and their ratio, and
exits with 1 if the p99 is above ``REAPER_AT_MOST`` times the p99 before.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.targets import REAPER_AT_MOST
from rides_demo.processes.embedded import Postgres, postgres_url

#: Claims have a fixed rate, like requests. A closed loop would only measure how two processes share
#: the cores.
CLAIMS_A_SECOND = 200
SECONDS_BEFORE = 15

FILL = """
INSERT INTO idempotency_idempotencykey (
    scope, idempotency_key, created_at, last_run_at, finished_at, expires_at, attempts,
    completer_attempts, request_method, request_path, request_body, request_content_type,
    request_headers, remote_addr, request_fingerprint, seed, recovery_point, response_code,
    response_headers, response_body, stuck_code, stuck_reason, last_error, lease_seconds, history)
SELECT 'user:' || n %% 1000, 'key-' || n, now() - interval '100 hours' - n * interval '1 ms',
    now() - interval '100 hours' - n * interval '1 ms',
    now() - interval '99 hours' - n * interval '1 ms',
    now() - interval '27 hours' - n * interval '1 ms', 1, 0,
    'POST', '/rides', '{}', 'application/json', '{}', '127.0.0.1', 'v1:' || md5(n::text),
    '\\x00', 'finished', 201, '{}', convert_to(repeat('x', 200), 'UTF8'), '', '', '', 90, '[]'
FROM generate_series(1, %s) AS n
"""


def main() -> None:
    """Measure, print the figures, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--keys", type=int, default=1_000_000, help="How many keys to reap (default: %(default)s)."
    )
    found = measure(False, keys=parser.parse_args().keys)
    for name in ("before", "while reaping"):
        row = found[name]
        print(
            f"{name:14} {row['claims']:6} claims  p50 {row['p50_ms']:6.2f} ms  p99"
            f" {row['p99_ms']:6.2f} ms"
        )
    print(
        f"p99 while reaping is {found['ratio']:.2f} times the p99 before (target: at most"
        f" {REAPER_AT_MOST:g})"
    )
    print("reaper: ok" if found["ratio"] <= REAPER_AT_MOST else "reaper: FAILED 1")
    sys.exit(found["ratio"] > REAPER_AT_MOST)


def measure(quick: bool, *, keys: int = 60_000) -> dict[str, Any]:
    """Return the figures of claims before and while ``keys`` keys are reaped, 10,000 if
    ``quick``."""
    keys = min(keys, 10_000) if quick else keys
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        server = Postgres(Path(folder) / "postgres", max_connections=20)
        server.start()
        try:
            os.environ |= {
                "DATABASE_URL": postgres_url(Path(folder) / "postgres"),
                "DJANGO_SETTINGS_MODULE": "rides_demo.settings",
                "RIDES_RUN_FOLDER": folder,
            }
            return _measured(keys)
        finally:
            server.stop()


def _measured(keys: int) -> dict[str, Any]:
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import connection

    call_command("migrate", verbosity=0)
    print(f"filling the table with {keys:,} keys past their retention", flush=True)
    with connection.cursor() as cursor:
        cursor.execute(FILL, [keys])
        cursor.execute("VACUUM ANALYZE idempotency_idempotencykey")
        cursor.execute("CHECKPOINT")  # Otherwise it may run during the measurement.
    deadline = time.monotonic() + SECONDS_BEFORE
    before = claims(lambda: time.monotonic() < deadline)
    start = time.monotonic()
    reaper = subprocess.Popen(
        [sys.executable, "manage.py", "reap_keys"], stdout=subprocess.PIPE, text=True
    )
    during = claims(lambda: reaper.poll() is None)
    seconds = time.monotonic() - start
    print((reaper.communicate()[0]).strip())
    if reaper.returncode != 0:
        raise RuntimeError(f"reap_keys ended with status {reaper.returncode}")
    connection.close()
    ratio = round(at(during, 0.99) / at(before, 0.99), 2)
    return {
        "keys": keys,
        "seconds": round(seconds),
        "before": row(before),
        "while reaping": row(during),
        "ratio": ratio,
    }


def row(seconds: list[float]) -> dict[str, float]:
    """Return the number and the percentiles of claims that took ``seconds``."""
    return {
        "claims": len(seconds),
        "p50_ms": round(1e3 * at(seconds, 0.5), 2),
        "p99_ms": round(1e3 * at(seconds, 0.99), 2),
    }


def claims(go_on: Callable[[], bool]) -> list[float]:
    """Claim new keys at a fixed rate while ``go_on()`` is true; return the seconds of each
    claim."""
    from idempotency._engine.adapter import ClaimedRequest
    from idempotency._engine.claims import claim_phased

    taken: list[float] = []
    due = time.monotonic()
    while go_on():
        due += 1 / CLAIMS_A_SECOND
        time.sleep(max(0, due - time.monotonic()))
        request = ClaimedRequest(
            scope="bench",
            idempotency_key=f"{due}",
            user_id=None,
            request_method="POST",
            request_path="/",
            request_body=b"{}",
            request_content_type="application/json",
            request_headers={},
            remote_addr="",
            request_fingerprint="v1:bench",
            fingerprint_as=lambda _: None,
            plain_fingerprint=lambda: "v1:bench",
            retention_hours=72,
            lease_seconds=90,
        )
        start = time.perf_counter()
        claim_phased(request, ("started",), using="default")
        taken.append(time.perf_counter() - start)
    return taken


def at(seconds: list[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie."""
    return sorted(seconds)[int(share * (len(seconds) - 1))]


if __name__ == "__main__":
    main()
