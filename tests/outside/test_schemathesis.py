"""schemathesis against Rocket Rides as it is served: the API does what its OpenAPI document says,
whatever it is sent."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from rides_demo.documents import OPENAPI
from rides_demo.processes.ports import free_port
from rides_demo.processes.supervisor import Supervisor

pytestmark = [pytest.mark.postgres, pytest.mark.processes]

CONFIGURATION = Path(__file__).with_name("schemathesis.toml")
#: For each rider. The two of them need less than a minute; this ends one that hangs, and is no
#: measure of speed.
SECONDS = 600
#: Nothing that the environment of the tests names: these keys are counted.
OWN_SERVICES = dict.fromkeys(("DATABASE_URL", "REDIS_URL", "STRIPE_API_BASE", "STRIPE_API_KEY"), "")

logger = logging.getLogger("tests.outside")


@pytest.fixture(scope="module")
def demo() -> Iterator[Supervisor]:
    """Run every process of the demo on services of its own."""
    from django.conf import settings

    folder = Path(settings.RUN_FOLDER) / "outside"
    with Supervisor(folder, free_port(), say=logger.info, environment=OWN_SERVICES) as supervisor:
        yield supervisor
    shutil.rmtree(folder, ignore_errors=True)


def run_schemathesis(url: str, rider: str, report: Path, document: str = "") -> dict[str, Any]:
    """Run schemathesis as a rider and return its own report."""
    subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIGURATION), "run",
            document or f"{url}/openapi.json", "--url", url, "--report", "json",
            "--report-json-path", str(report),
        ],
        env={**os.environ, "RIDER": rider},
        cwd=report.parent,
        capture_output=True,
        timeout=SECONDS,
    )  # fmt: skip
    made: dict[str, Any] = json.loads(report.read_text())
    return made


# Every card of joe's is declined.
@pytest.mark.parametrize("rider", ["demo-jane", "demo-joe"])
def test_45_every_answer_is_one_that_the_document_declares(
    demo: Supervisor, rider: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    report = run_schemathesis(demo.url, rider, tmp_path / "report.json")

    cases, operations = report["test_cases"], report["operations"]
    record_property(
        "counts",
        f"schemathesis as {rider}: {cases['generated']} cases,"
        f" {cases['with_failures'] + cases['errored']} failed, {operations['tested']} of"
        f" {operations['total']} operations",
    )
    assert report["failures"] == report["errors"] == []
    assert report["complete"]
    assert operations["tested"] == operations["total"] >= 10
    assert cases["generated"] >= 1000
    with psycopg.connect(demo.environment["DATABASE_URL"]) as connection:
        left = (
            "SELECT count(*) FILTER (WHERE finished_at IS NULL), count(*) FROM"
            " idempotency_idempotencykey"
        )
        unfinished, keys = connection.execute(left).fetchone() or (0, 0)
    assert (unfinished, keys > 20) == (0, True)


def test_45_an_undeclared_answer_is_found(demo: Supervisor, tmp_path: Path) -> None:
    content = json.loads(OPENAPI.read_text())
    content["paths"] = {"/healthz": {"get": content["paths"]["/healthz"]["get"]}}
    answers = content["paths"]["/healthz"]["get"]["responses"]
    answers["299"] = answers.pop("200")
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(content))

    report = run_schemathesis(demo.url, "demo-jane", tmp_path / "report.json", str(document))

    assert {failure["title"] for failure in report["failures"]} == {"Undocumented status code"}


def test_the_document_is_what_is_served(demo: Supervisor) -> None:
    answer = httpx.get(f"{demo.url}/openapi.json", timeout=60, trust_env=False)

    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/json")
    assert answer.content == OPENAPI.read_bytes()
