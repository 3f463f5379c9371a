"""Staged operations in one process: what is staged, what a worker runs, and what its queue does
with the outcome."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Reject
from celery.exceptions import Retry as CeleryRetry
from django.contrib.auth.models import AnonymousUser
from django.core.management import call_command
from django.db import transaction
from django.test import Client
from django.urls import reverse
from pytest_django import Settings
from rq import Retry as RqRetry

from idempotency.contrib.celery import RETRIES, run_operation
from idempotency.contrib.rq import run_once
from idempotency.contrib.tasks import run_staged
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.exceptions import (
    InProgress,
    JobNotAllowed,
    KeyReused,
    NoOpenTransaction,
    Rejected,
    Unavailable,
    Unfinished,
)
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.jobs import STAGED_OPERATION, call_job, shard_of, stage_job
from idempotency.models import IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.operations import operation
from idempotency.reaper import MESSAGE_RETENTION
from tests.factories import UserFactory
from tests.kit.shards import GUIDE, tenant
from tests.models import Account, Entry
from tests.operations import Bank, note, pay

pytestmark = pytest.mark.django_db(transaction=True)


def run_by_celery(name: str, args: Any, job_id: str) -> Any:
    """Run the task as a worker does, with the job's id and the arguments by name."""
    run_operation.push_request(id=job_id, called_directly=False, retries=0, is_eager=True)
    try:
        return run_operation(**args)
    finally:
        run_operation.pop_request()


#: The function of each worker that gets the name, the arguments and the id of a staged job.
WORKERS = [
    pytest.param(run_once, id="RQ"),
    pytest.param(run_staged.func, id="Django Tasks"),
    pytest.param(run_by_celery, id="Celery"),
]


def stage_pay(cents: int = 9) -> StagedJob:
    with transaction.atomic():
        return pay.stage("key", name="one", cents=cents)


def deliver(worker: Callable[..., Any], job: StagedJob) -> Any:
    return worker(job.job_name, job.job_args, str(job.pk))


def test_a_job_is_staged_with_the_transaction_and_not_without_it() -> None:
    with pytest.raises(NoOpenTransaction):
        note.stage("key", name="one")
    with transaction.atomic():
        pay.stage("key", name="one", cents=9)
        transaction.set_rollback(True)
    assert not StagedJob.objects.exists()
    job = stage_pay()
    assert (job.job_name, job.label) == (STAGED_OPERATION, "operation tests.pay")
    assert job.job_args == {
        "operation": "tests.pay",
        "key": "key",
        "arguments": {"name": "one", "cents": 9},
    }


@pytest.mark.parametrize("modules", [None, ["shop.jobs"]])
def test_the_registry_permits_an_operation_and_not_the_setting(
    modules: Any, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"JOB_MODULES": modules}
    job = stage_pay()
    assert call_job(job.job_name, job.job_args) == {"transfer": 0}
    with pytest.raises(JobNotAllowed), transaction.atomic():
        stage_job("idempotency.operations.operation")


@pytest.mark.parametrize("worker", WORKERS)
def test_a_phased_operation_takes_effect_once_and_its_job_is_marked(
    worker: Callable[..., Any], bank: Bank
) -> None:
    job = stage_pay()
    deliver(worker, job)
    assert ProcessedMessage.objects.get().message_id == str(job.pk)
    deliver(worker, job)
    assert pay.once("key", name="one", cents=9) == {"transfer": 0}
    assert (bank.requests, Account.objects.count()) == (1, 1)


@pytest.mark.parametrize("worker", WORKERS)
def test_a_delivery_after_a_process_died_before_the_mark_is_a_repeat(
    worker: Callable[..., Any], bank: Bank
) -> None:
    job = stage_pay()
    deliver(worker, job)
    ProcessedMessage.objects.all().delete()
    deliver(worker, job)
    assert (bank.requests, ProcessedMessage.objects.count()) == (1, 1)


@pytest.mark.parametrize("worker", WORKERS)
def test_a_key_outlives_the_deliveries_of_its_job(worker: Callable[..., Any]) -> None:
    with transaction.atomic():
        job = note.stage("key", name="one")
    deliver(worker, job)
    ProcessedMessage.objects.all().delete()
    almost = MESSAGE_RETENTION - timedelta(hours=1)
    key = IdempotencyKey.objects.get()
    key.expires_at -= almost
    key.save()
    deliver(worker, job)
    assert Entry.objects.count() == 1


@pytest.mark.parametrize("worker", WORKERS)
def test_a_discarded_job_is_not_run(worker: Callable[..., Any], bank: Bank) -> None:
    job = stage_pay()
    with process_once(STAGED_JOBS, str(job.pk)):
        pass
    deliver(worker, job)
    assert not bank.requests


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("fails", ["raises", "returns"])
def test_a_refusal_is_an_effect_of_the_job(worker: Callable[..., Any], fails: str) -> None:
    with transaction.atomic():
        job = note.stage("key", name="one", fails=fails)
    deliver(worker, job)
    assert ProcessedMessage.objects.count() == 1
    with pytest.raises(Rejected):
        note.once("key", name="one", fails=fails)


@pytest.mark.parametrize("worker", WORKERS)
def test_a_job_of_a_user_has_the_key_of_the_user(worker: Callable[..., Any]) -> None:
    user = UserFactory()
    with transaction.atomic():
        job = note.by(user).stage("key", name="one")
    json.dumps(job.job_args)
    deliver(worker, job)
    key = IdempotencyKey.objects.get()
    assert (key.scope, key.user_id) == (f"tests.note:user:{user.pk}", user.pk)
    assert note.by(user).once("key", name="one") == {
        "entry": Entry.objects.get().pk,
        "list": [1, 2],
    }


@pytest.mark.parametrize("worker", WORKERS)
def test_a_job_of_a_scope_without_a_user_has_the_key_of_the_scope(
    worker: Callable[..., Any],
) -> None:
    with transaction.atomic():
        job = note.by(AnonymousUser(), scope="session:1").stage("key", name="one")
    deliver(worker, job)
    key = IdempotencyKey.objects.get()
    assert (key.scope, key.user_id) == ("tests.note:session:1", None)


@pytest.fixture(params=[InProgress, Unavailable, Unfinished])
def not_now(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let ``pay`` end with an error after which its queue must try again."""

    def raise_it(*args: Any, **options: Any) -> None:
        raise request.param

    monkeypatch.setattr("idempotency.operations.run", raise_it)
    return request.param


def test_what_may_succeed_later_is_a_retry_of_rq_that_does_not_count(
    not_now: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("idempotency.contrib.rq._PAUSE_SECONDS", 0)
    assert isinstance(deliver(run_once, stage_pay()), RqRetry)
    assert not ProcessedMessage.objects.exists()
    assert "is retried" in caplog.text


def test_what_may_succeed_later_is_a_retry_of_celery_that_does_not_count(not_now: Any) -> None:
    job = stage_pay()
    run_operation.push_request(
        id=str(job.pk), called_directly=False, retries=12, kwargs=job.job_args, args=[], headers={}
    )
    sent: list[Any] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("celery.canvas.Signature.apply_async", lambda task: sent.append(task))
            with pytest.raises(CeleryRetry):
                run_operation(**job.job_args)
    finally:
        run_operation.pop_request()
    assert sent[0].options["retries"] == 12, "the last counted try"


def test_a_retry_of_a_task_with_the_options_that_cannot_be_published_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Celery("tests", set_as_current=False, broker="memory://")

    @app.task(shared=False, name="tests.is_in_progress", **RETRIES)
    def is_in_progress() -> None:
        raise InProgress

    def full(*args: Any, **options: Any) -> None:
        raise OSError("OOM command not allowed")

    monkeypatch.setattr("celery.canvas.Signature.apply_async", full)
    is_in_progress.push_request(id="1", called_directly=False, retries=0)
    try:
        with pytest.raises(Reject) as rejected:
            is_in_progress.run()
    finally:
        is_in_progress.pop_request()
        app.close()
    assert rejected.value.requeue, "the message returns to the broker"


def test_what_may_succeed_later_fails_a_task_of_django_which_is_enqueued_again(
    not_now: Any,
) -> None:
    with pytest.raises(not_now):
        deliver(run_staged.func, stage_pay())
    assert not ProcessedMessage.objects.exists()


@pytest.mark.parametrize("worker", WORKERS[:2])
def test_an_exceeded_time_limit_is_a_try(
    worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exceed(*args: Any, **options: Any) -> None:
        raise Unavailable(code="time_limit_exceeded")

    monkeypatch.setattr("idempotency.operations.run", exceed)
    with pytest.raises(Unavailable):
        deliver(worker, stage_pay())


@pytest.mark.parametrize("worker", WORKERS[:2])
def test_other_arguments_under_the_key_are_an_error(worker: Callable[..., Any]) -> None:
    pay.once("key", name="one", cents=1)
    with pytest.raises(KeyReused):
        deliver(worker, stage_pay())
    assert not ProcessedMessage.objects.exists()


@pytest.mark.parametrize("worker", WORKERS[:2])
def test_an_operation_that_the_running_code_does_not_have_is_not_allowed(
    worker: Callable[..., Any],
) -> None:
    job = stage_pay()
    job.job_args["operation"] = "tests.removed"
    with pytest.raises(JobNotAllowed, match=r"tests\.removed"):
        deliver(worker, job)


BACKENDS = [
    "idempotency.contrib.rq.RQBackend",
    "idempotency.contrib.celery.CeleryBackend",
    "idempotency.contrib.tasks.TasksBackend",
    "tests.kit.jobs.anything",
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_enqueuer_refuses_an_unknown_operation_and_shows_its_name(
    backend: str, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": backend}}
    job = stage_pay()
    job.job_args["operation"] = "tests.removed"
    job.save()
    assert enqueue_once() == EnqueuePass(refused=1)
    job.refresh_from_db()
    assert job.last_error.startswith("JobNotAllowed: The running code has no operation 'tests.rem")
    assert "(operation tests.removed) was refused" in caplog.text


def test_an_operation_outside_of_a_module_of_operations_cannot_be_staged() -> None:
    @operation("tests.late")
    def late() -> None:
        """Do nothing."""

    assert late.once("key") is None
    with pytest.raises(JobNotAllowed, match=r"operations\.py"), transaction.atomic():
        late.stage("key")


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
@pytest.mark.parametrize("worker", WORKERS[:2])
def test_the_operation_runs_in_the_database_of_its_staged_row(
    worker: Callable[..., Any], settings: Settings
) -> None:
    settings.DATABASE_ROUTERS = [GUIDE["TenantRouter"]()]
    with tenant("shard_b"), transaction.atomic(using="shard_b"):
        job = note.stage("key", name="one")
    assert shard_of(job) == "shard_b"
    worker(job.job_name, job.job_args, str(job.pk), shard_of(job))
    for model in (IdempotencyKey, ProcessedMessage):
        assert model.objects.using("shard_b").count() == 1
        assert not model.objects.using("default").exists()
    with tenant("shard_b"):
        assert note.once("key", name="one")["entry"]  # type: ignore[index]


def test_lists_and_pages_name_the_operation(
    admin_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    job = stage_pay()
    call_command("staged_jobs", "list")
    assert "  operation tests.pay" in capsys.readouterr().out
    changelist = reverse("admin:idempotency_stagedjob_changelist")
    page = reverse("admin:idempotency_stagedjob_change", args=[job.pk])
    for url in (changelist, page):
        assert "operation tests.pay" in admin_client.get(url).content.decode()
    deliver(run_once, job)
    key = reverse("admin:idempotency_idempotencykey_change", args=[IdempotencyKey.objects.get().pk])
    assert key in admin_client.get(page).content.decode()
