"""The demo over RabbitMQ and Kafka, whose jobs survive kills of broker, enqueuer and consumer."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from rides_demo.processes.brokers import BROKERS
from rides_demo.processes.debian import NotToBeHad
from rides_demo.processes.supervisor import manage

FAULTS = {"kill-enqueuer", "kill-worker", "restart-broker"}


@pytest.mark.processes
@pytest.mark.parametrize("broker", BROKERS)
def test_a_short_demo_over_a_broker_ends_with_consistent_books(broker: str, tmp_path: Path) -> None:
    try:
        BROKERS[broker](tmp_path)
    except NotToBeHad as error:
        pytest.skip(str(error))
    report = tmp_path / "report.json"
    run = ["--requests", "30", "--faults", ",".join(FAULTS), "--json", str(report)]
    own = {"DATABASE_URL": "", "BROKER": broker, "DJANGO_SETTINGS_MODULE": "rides_demo.settings"}
    done = subprocess.run(
        manage("demo", *run), env=os.environ | own, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads(report.read_text())
    assert (found["books"]["receipts"], found["books"]["staged_jobs"]) == (30, 0)
    assert found["faults"].keys() >= FAULTS
