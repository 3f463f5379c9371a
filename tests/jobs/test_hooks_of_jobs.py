"""The on_commit hooks of a job are called once at most: one that raises is recorded, and does not
repeat the job."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction
from pytest_django import Settings

import tests.kit.jobs
from idempotency.contrib.rq import run_once
from idempotency.contrib.tasks import TasksBackend
from idempotency.enqueuer import enqueue_once
from idempotency.inbox import STAGED_JOBS
from idempotency.interventions import forget_hook_errors
from idempotency.jobs import stage_job
from idempotency.models import ProcessedMessage, StagedJob
from idempotency.monitoring.doctor import diagnose
from rides_demo.models import AuditRecord
from tests.factories import StagedJobFactory, UserFactory
from tests.kit.brokers import KINDS
from tests.kit.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "tests.kit.jobs.record_with_hooks"
IDS = [f"00000000-0000-7000-8000-00000000000{number}" for number in range(3)]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


def errors() -> dict[str, str]:
    """Return the errors of hooks by the ids of their jobs."""
    return dict(
        ProcessedMessage.objects.exclude(hook_error="").values_list("message_id", "hook_error")
    )


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    call_command("staged_jobs", "list", *options)
    return capsys.readouterr().out.splitlines()


@pytest.mark.postgres
@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.lower())
def test_a_hook_that_raises_is_recorded_and_the_others_are_called(
    kind: Any, broker: Any, settings: Settings, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TasksBackend, "follow_up_seconds", 2)
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": kind.backend}}
    job = StagedJobFactory(job_name=NAME, job_args=[UserFactory().pk, str(mark)])
    enqueue_once()
    queue = kind(broker)
    with queue.working():
        eventually(lambda: errors() and mark.exists() and queue.idle(), 60)
    assert "OSError: the mail server is away" in errors()[str(job.pk)]
    assert AuditRecord.objects.count() == 1
    StagedJob.objects.update(run_at=job.created_at)
    enqueue_once()
    assert not StagedJob.objects.exists()
    assert queue.idle()


class RaisingLog(logging.Handler):
    """A log whose errors are raised."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError


def test_a_log_that_raises_drops_no_hook(mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("idempotency"), "handlers", [RaisingLog()])
    run_once(NAME, [UserFactory().pk, str(mark)], IDS[0])
    assert mark.exists()
    assert "OSError: the mail server is away" in errors()[IDS[0]]


def test_a_hook_that_ends_its_process_is_recorded(
    mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tests.kit.jobs, "fail_in_hook", sys.exit)
    with pytest.raises(SystemExit):
        run_once(NAME, [UserFactory().pk, str(mark)], IDS[0])
    assert "SystemExit" in errors()[IDS[0]]


def test_an_operator_gets_a_list_of_failed_hooks(
    mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = UserFactory().pk
    for job_id in IDS:
        run_once(NAME, [user, str(mark)], job_id)
    StagedJobFactory()
    lines = listed(capsys)
    assert [line.split()[:3] for line in lines[:3]] == [
        ["hook", "failed", job_id] for job_id in IDS
    ]
    assert f"{NAME}: OSError: the mail server is away" in lines[0]
    assert (len(lines), len(listed(capsys, "--limit", "2")), len(listed(capsys, "--failed"))) == (
        4,
        2,
        3,
    )
    assert [finding.code for finding in diagnose().findings if finding.code == "hooks_failed"] == [
        "hooks_failed"
    ]


def test_an_operator_removes_the_hooks_from_the_list(
    mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = UserFactory().pk
    for job_id in IDS:
        run_once(NAME, [user, str(mark)], job_id)
    call_command("staged_jobs", "purge", IDS[0])
    assert errors().keys() == set(IDS[1:])
    with pytest.raises(CommandError, match="1 of the ids"):
        call_command("staged_jobs", "purge", *IDS[:2])
    assert (forget_hook_errors(), errors()) == (1, {})
    assert not [finding for finding in diagnose().findings if finding.code == "hooks_failed"]
    run_once(NAME, [user, str(mark)], IDS[0])
    assert (
        AuditRecord.objects.count()
        == ProcessedMessage.objects.filter(source=STAGED_JOBS).count()
        == 3
    )


def test_a_hook_of_an_outer_transaction_is_left_to_that_transaction(mark: Path) -> None:
    """For example of a task that runs at once, in the process that sent it."""
    user = UserFactory().pk
    with pytest.raises(OSError, match="the mail server is away"), transaction.atomic():
        run_once(NAME, [user, str(mark)], IDS[0])
    assert (errors(), AuditRecord.objects.count()) == ({}, 1)


def job_with_two_hooks() -> None:
    for text in ("one", "two"):
        transaction.on_commit(lambda text=text: int(text), robust=text == "two")


def job_without_commit() -> None:
    transaction.on_commit(lambda: int("never"))
    raise RuntimeError("on purpose")


def test_each_hook_that_raises_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    run_once(f"{__name__}.job_with_two_hooks", {}, IDS[0])
    with pytest.raises(RuntimeError, match="on purpose"):
        run_once(f"{__name__}.job_without_commit", {}, IDS[1])
    assert [word in errors()[IDS[0]] for word in ("'one'", "'two'")] == [True, True]
    assert errors().keys() == {IDS[0]}
    logged = [record for record in caplog.records if record.name == "idempotency"]
    assert [(record.levelname, IDS[0] in record.message) for record in logged] == [
        ("ERROR", True)
    ] * 2
    assert all(record.exc_info for record in logged)


def job_that_stages_the_next_one(user: int) -> None:
    stage_job("tests.kit.jobs.record", [user])


def test_work_that_a_hook_would_lose_is_staged_as_the_next_job() -> None:
    run_once(f"{__name__}.job_that_stages_the_next_one", [1], IDS[0])
    assert StagedJob.objects.get().job_args == [1]
