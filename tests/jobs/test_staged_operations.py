"""Operations in real workers of RQ, Celery and Django Tasks, some of which are killed: one effect,
one transfer, and its result."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from pytest_django import Settings

from idempotency.contrib.celery import CeleryBackend
from idempotency.contrib.tasks import TasksBackend
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.exceptions import Rejected
from idempotency.models import IdempotencyKey, ProcessedMessage
from tests.jobs.killed_operations import AFTER_THE_TASK, PLACES, app, noted, pay_by_rq, pay_invoice
from tests.kit.brokers import KINDS, Broker, Celery, Rq
from tests.kit.commands import start
from tests.kit.faulty_service import FaultyService, serving
from tests.kit.waiting import eventually
from tests.models import Account, Entry
from tests.operations import note, pay

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True), pytest.mark.processes]


@pytest.fixture(autouse=True)
def bank_on_a_socket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyService]:
    with serving() as service:
        monkeypatch.setenv("TEST_BANK_URL", service.url)
        yield service


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__.lower())
def queue(
    request: pytest.FixtureRequest, broker: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Broker:
    for backend in (CeleryBackend, TasksBackend):
        monkeypatch.setattr(backend, "follow_up_seconds", 2)
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": request.param.backend}}
    queue: Broker = request.param(broker)
    return queue


def dies(queue: Broker, place: str, mark: Path) -> None:
    """Let the worker be killed once."""
    kill = f"from tests.jobs.killed_operations import kill_at; kill_at({place!r}, {str(mark)!r})\n"
    queue.worker = kill + queue.worker


def test_staged_operations_run_once_after_the_commit(
    queue: Broker, bank_on_a_socket: FaultyService
) -> None:
    with transaction.atomic():
        note.stage("plain", name="plain")
        pay.stage("phased", name="phased", cents=9)
        note.stage("rejected", name="rejected", fails="raises")
    with transaction.atomic():
        pay.stage("dropped", name="dropped", cents=9)
        transaction.set_rollback(True)
    assert enqueue_once() == EnqueuePass(handed_over=3)
    queue.work(until=lambda: ProcessedMessage.objects.count() == 3)
    assert sorted(Entry.objects.values_list("name", flat=True)) == ["booked phased", "plain"]
    assert Account.objects.get().name == "phased"
    assert bank_on_a_socket.bodies() == [b"9"]
    assert note.once("plain", name="plain")["entry"]  # type: ignore[index]
    assert pay.once("phased", name="phased", cents=9) == {"transfer": 0}
    with pytest.raises(Rejected):
        note.once("rejected", name="rejected", fails="raises")
    assert not IdempotencyKey.objects.filter(idempotency_key="dropped").exists()


@pytest.mark.parametrize("place", ["in the first transaction", "after the call", PLACES[-1]])
def test_a_staged_operation_whose_worker_is_killed_is_continued(
    queue: Broker, place: str, bank_on_a_socket: FaultyService, tmp_path: Path
) -> None:
    dies(queue, place, tmp_path / "mark")
    with transaction.atomic():
        pay.stage("key", name="one", cents=9)
    enqueue_once()
    queue.work(until=ProcessedMessage.objects.exists)
    assert (tmp_path / "mark").exists()
    assert pay.once("key", name="one", cents=9) == {"transfer": 0}
    assert Entry.objects.count() == Account.objects.count() == len(bank_on_a_socket.done) == 1


@pytest.mark.parametrize("place", [*PLACES, AFTER_THE_TASK])
def test_a_task_whose_process_is_killed_pays_once_and_has_the_result(
    broker: Any, place: str, bank_on_a_socket: FaultyService, tmp_path: Path
) -> None:
    queue = Celery(broker)
    queue.worker = queue.worker.replace("tests.kit.celery_app", "tests.jobs.celery_tasks")
    dies(queue, place, tmp_path / "mark")
    result = (pay_invoice.s("one", 9) | noted.s()).apply_async()
    with queue.working():
        assert eventually(result.ready, 90)
        eventually(queue.idle, 30)
    assert (tmp_path / "mark").exists()
    assert result.result == {"noted": {"transfer": 0}}
    assert pay.once("one", name="one", cents=9) == {"transfer": 0}
    assert Entry.objects.count() == Account.objects.count() == len(bank_on_a_socket.done) == 1
    app.close()


def test_each_process_that_imports_celery_first_knows_the_task() -> None:
    """As a worker does. Nothing else in it imports the module with the task."""
    python = (
        "import celery, django; django.setup()\n"
        "from idempotency.jobs import STAGED_OPERATION\n"
        "print(STAGED_OPERATION in celery.Celery(broker='memory://').tasks)"
    )
    with start(python=python, DJANGO_SETTINGS_MODULE="rides_demo.settings") as process:
        assert process.communicate(timeout=60) == ("True\n", "")


def test_a_job_of_rq_whose_process_is_killed_pays_once_and_has_the_result(
    broker: Any, bank_on_a_socket: FaultyService, tmp_path: Path
) -> None:
    queue = Rq(broker)
    dies(queue, "after the call", tmp_path / "mark")
    queued = pay_by_rq.delay("one", 9)
    with queue.working():
        assert eventually(lambda: queued.return_value(refresh=True), 90) == {"transfer": 0}
    assert (tmp_path / "mark").exists()
    assert Entry.objects.count() == Account.objects.count() == len(bank_on_a_socket.done) == 1
