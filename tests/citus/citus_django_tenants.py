"""django-tenants on Citus: requests by host, and the passes of the three processes over all
tenants."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("django_tenants", reason="on Citus: pip install -r requirements/citus.txt")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "tests.citus.tenants_project"
ANSWERS = """\
shop_a /plain/ 201 shop_a 1
shop_a /plain/ 201 shop_a 1 replayed
shop_b /plain/ 201 shop_b 1
shop_b /plain/ 201 shop_b 1 replayed
shop_a /phased/ 201 shop_a 2
shop_a /phased/ 201 shop_a 2 replayed
shop_b /phased/ 201 shop_b 2
shop_b /phased/ 201 shop_b 2 replayed
shop_b /phased/ 500 None None
"""


def run(*arguments: str) -> list[str]:
    """Run Python with the settings of the project; return the lines that it printed."""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": f"{PROJECT}.settings"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [line.strip() for line in done.stdout.splitlines()]


def test_requests_by_host_and_the_passes_over_all_tenants() -> None:
    assert run(PROJECT) == ANSWERS.splitlines()

    def passed(command: str) -> list[str]:
        lines = run("django", "all_tenants_command", "--no-public", command)
        return [line for line in lines if not line.startswith("Applying command to")]

    first, second = (f"shop_{letter}: job of shop_{letter}" for letter in "ab")
    counts = "enqueue_jobs: 1 handed over, 0 refused, 0 failed"
    assert passed("enqueue_jobs") == [first, counts, second, counts]
    assert passed("complete_keys") == [
        f"complete_keys: {count} finished, 0 failed, 0 stuck" for count in (0, 1)
    ]
    deleted = [
        f"reap_keys: {count} deleted, 0 protected, 0 settled, 0 stuck, 0 messages"
        for count in (1, 0)
    ]
    assert passed("reap_keys") == deleted
