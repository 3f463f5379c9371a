"""Traces of real processes: a request that kill -9 ends, its retries, its job, and the
completer."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from idempotency.models import IdempotencyKey
from rides_demo.processes.process import Process
from tests.kit.commands import environment
from tests.kit.waiting import eventually
from tests.models import Entry
from tests.processes.queues import QUEUES, Celery, Queue, Tasks
from tests.processes.service import JOB

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]

MAIN = "import django; django.setup(); from tests.traces.service import main; main()"
KILLED = -9


@dataclass(frozen=True)
class Spans:
    """The spans that the processes have written."""

    file: Path
    environment: dict[str, str]

    def call(self, kind: str) -> tuple[int, Any]:
        """Send the request or call the operation in a new process; return its status and result."""
        done = self.run([sys.executable, "-c", MAIN, kind])
        return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None

    def run(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            env=self.environment,
            cwd=settings.BASE_DIR,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )

    def command(self, line: str) -> None:
        """Run a command of Django."""
        assert self.run([sys.executable, "-m", "django", *line.split()]).returncode == 0

    def run_job(self, queue: type[Queue], folder: Path) -> dict[str, Any]:
        """Hand the staged job over, let a worker run it, and return its span."""
        self.command("enqueue_jobs")
        with Process(
            "worker",
            queue.worker,
            environment=self.environment,
            folder=settings.BASE_DIR,
            output=folder / "worker.log",
        ):
            eventually(lambda: self.named("idempotency.job"), 60)
        (job,) = self.named("idempotency.job")
        return job

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.all() if span["name"] == name]


@pytest.fixture
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Spans:
    queue: type[Queue] = getattr(request, "param", Tasks)
    spans = tmp_path / "spans"
    given = environment(
        DJANGO_SETTINGS_MODULE="tests.traces.settings",
        TEST_BACKEND=queue.backend,
        TEST_SPANS=str(spans),
        TEST_MARK=str(tmp_path / "mark"),
    )
    return Spans(spans, given)


def ids(span: dict[str, Any]) -> tuple[str, str]:
    return span["context"]["trace_id"], span["context"]["span_id"]


def links(span: dict[str, Any]) -> list[tuple[str, str]]:
    return [ids(link) for link in span["links"]]


def first_request() -> tuple[str, str]:
    """Return the trace and the span that the key has stored. A killed process ends no span."""
    _, trace, span, _ = IdempotencyKey.objects.get().traceparent.split("-")
    return f"0x{trace}", f"0x{span}"


def wait_for_lock() -> None:
    eventually(lambda: not IdempotencyKey.objects.in_flight().exists())


@pytest.mark.parametrize("processes", QUEUES, indirect=True, ids=lambda queue: queue.__name__)
def test_a_killed_request_its_retries_and_its_job(
    processes: Spans, request: pytest.FixtureRequest, broker: Any, tmp_path: Path
) -> None:
    queue = request.node.callspec.params["processes"]
    assert processes.call("view") == (KILLED, None)
    first = first_request()
    assert [span["name"] for span in processes.all()] == [
        "idempotency.claim",
        "idempotency.phase started",
    ]
    assert {span["parent_id"] for span in processes.all()} == {first[1]}

    wait_for_lock()
    assert processes.call("view") == (0, [201, None])
    assert processes.call("view") == (0, [201, "true"])
    takeover, replay = processes.named("idempotency.request")
    assert links(takeover) == links(replay) == [first]
    assert takeover["attributes"]["idempotency.attempt"] == 2
    assert replay["attributes"]["idempotency.outcome"] == "replayed"
    assert first_request() == first

    phase = processes.named("idempotency.phase half_done")[-1]
    assert phase["parent_id"] == ids(takeover)[1]
    job = processes.run_job(queue, tmp_path)
    (batch,) = processes.named("idempotency.enqueue")
    assert (batch["parent_id"], links(batch)) == (None, [ids(phase)])
    assert (job["context"]["trace_id"], job["parent_id"]) == ids(phase)
    assert Entry.objects.filter(name="job").count() == 1


@pytest.mark.parametrize("processes", [Celery], indirect=True)
def test_the_spans_of_the_instrumentor_of_celery_are_in_the_trace_of_the_job(
    processes: Spans, broker: Any, tmp_path: Path
) -> None:
    (tmp_path / "mark").touch()  # Nothing is killed.
    processes.environment["TEST_CELERY_SPANS"] = "1"
    assert processes.call("view") == (0, [201, None])
    job = processes.run_job(Celery, tmp_path)
    (sent,), (run,) = map(processes.named, (f"apply_async/{JOB}", f"run/{JOB}"))
    phase = processes.named("idempotency.phase half_done")[-1]
    assert (sent["context"]["trace_id"], sent["parent_id"]) == ids(phase)
    assert (run["context"]["trace_id"], run["parent_id"]) == ids(sent)
    assert (job["context"]["trace_id"], job["parent_id"]) == ids(run)


@pytest.mark.parametrize("kind", ["view", "operation"])
def test_the_completer_links_to_the_killed_request(kind: str, processes: Spans) -> None:
    assert processes.call(kind) == (KILLED, None)
    first = first_request()
    wait_for_lock()

    def completed_keys() -> list[dict[str, Any]]:
        processes.command("complete_keys")
        return processes.named("idempotency.complete")

    (completed,) = eventually(completed_keys)
    assert (completed["parent_id"], links(completed)) == (None, [first])
    assert completed["attributes"]["idempotency.outcome"] == "finished"
    assert first_request() == first
