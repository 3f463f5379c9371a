"""Run the contract in each configuration: ``python -m tests.configurations [--sample] [NAME ...]``.

One PostgreSQL serves all runs; each run is a process with a database of its own. The last lines
count the runs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg

from tests.configurations.projects import PAIRS, PROJECTS, SAMPLE
from tests.kit.servers import HastyPostgres

#: A run that takes longer has failed.
LIMIT_SECONDS = 300
#: The tests of the sample: the plain and the phased view.
IN_SAMPLE = (
    "test_first_request_and_replay",
    "test_retry_resumes_a_phased_view",
    "test_completer_finishes",
)


def main() -> int:
    """Run the configurations, and return 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.configurations", description="Run the contract in other projects."
    )
    parser.add_argument(
        "names",
        nargs="*",
        help="configurations, or several joined by +; all of them if none is named",
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="six configurations, on the plain and the phased view only",
    )
    given = parser.parse_args()
    names = given.names or (SAMPLE if given.sample else [*PROJECTS, *PAIRS])
    tests = (
        [f"tests.configurations.contract.Contract.{name}" for name in IN_SAMPLE]
        if given.sample
        else []
    )
    with tempfile.TemporaryDirectory(prefix="configurations-") as folder:
        Path(folder).chmod(0o755)
        with HastyPostgres(Path(folder) / "postgres", max_connections=200) as server:
            _prepare(str(server.sockets))
            with ThreadPoolExecutor(2) as two:
                ends = list(two.map(lambda name: _run(name, str(server.sockets), tests), names))
    failed = ends.count(False)
    print(f"{len(ends) - failed} passed, {failed} failed")
    return int(failed > 0)


def _prepare(host: str) -> None:
    """Create the role and the template that some configurations need."""
    with psycopg.connect(
        host=host, user="postgres", dbname="postgres", autocommit=True
    ) as connection:
        connection.execute("CREATE ROLE shop CREATEDB")
        connection.execute("CREATE DATABASE template_shop")
        connection.execute("CREATE DATABASE shop_of_gevent")
    with psycopg.connect(
        host=host, user="postgres", dbname="template_shop", autocommit=True
    ) as connection:
        connection.execute("CREATE SCHEMA shop")


def _run(name: str, host: str, tests: list[str]) -> bool:
    began = time.monotonic()
    environment = os.environ | {
        "CONFIGURATION": name,
        "CONFIGURATION_SERVER": host,
        "DJANGO_SETTINGS_MODULE": "tests.configurations.settings",
        "DD_TRACE_STARTUP_LOGS": "false",
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    }
    command = [
        sys.executable,
        "-m",
        "django",
        "test",
        "--noinput",
        *(tests or ["tests.configurations.contract"]),
    ]
    if "gevent_pool" in name:
        command[2:2] = ["gevent.monkey", "--module"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        ok, told = done.returncode == 0, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        ok, told = False, f"no end after {error.timeout:.0f} s\n{error.stdout or ''}"
    skipped = told.rpartition("skipped=")[2].partition(")")[0] if "skipped=" in told else "0"
    print(
        f"{name}: {'ok' if ok else 'FAILED'} ({time.monotonic() - began:.0f} s, {skipped} skipped)",
        flush=True,
    )
    if not ok:
        print(told[-6000:], flush=True)
    return ok


if __name__ == "__main__":
    sys.exit(main())
