"""The backends of the enqueuer, one suite for all: with real brokers and real workers a staged job
takes effect once."""

import json
from contextlib import nullcontext
from datetime import timedelta

import pytest
from django.db.models.functions import Now
from django.utils import timezone

from idempotency.backends import MAX_ATTEMPTS, BrokerUnavailable
from idempotency.contrib.celery import CeleryBackend, OnceTask
from idempotency.contrib.tasks import TasksBackend
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.models import ProcessedMessage, StagedJob
from rides_demo.models import AuditRecord
from rides_demo.processes.ports import free_port
from tests.factories import StagedJobFactory, UserFactory
from tests.kit.brokers import KINDS, Celery, Rq, SlowLine, Tasks, tasks_table_locked
from tests.kit.celery_app import app
from tests.kit.database import waits_for_a_lock
from tests.kit.threads import Gate, background
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True), pytest.mark.processes]


def follow_up_after(seconds, monkeypatch):
    """Let a job that was handed over be looked for, and offered again, after so long."""
    for backend in (CeleryBackend, TasksBackend):
        monkeypatch.setattr(backend, "follow_up_seconds", seconds)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__.lower())
def queue(request, broker, settings, monkeypatch):
    """Return the queue, empty, with the enqueuer handing over to it."""
    follow_up_after(2, monkeypatch)
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": request.param.backend}}
    return request.param(broker)


@pytest.fixture
def user():
    return UserFactory()


def stage(function, *args, **values):
    return StagedJobFactory(job_name=f"tests.kit.jobs.{function}", job_args=list(args), **values)


def effects():
    return AuditRecord.objects.count()


def test_a_worker_runs_the_job_with_its_arguments(queue, user):
    stage("record", user.pk, "by position")
    StagedJobFactory(
        job_name="tests.kit.jobs.record", job_args={"user": user.pk, "label": "by name"}
    )
    assert enqueue_once() == EnqueuePass(handed_over=2)
    assert StagedJob.objects.exists() == queue.follows_up
    queue.work(until=lambda: effects() == 2)
    assert set(AuditRecord.objects.values_list("action", flat=True)) == {"by position", "by name"}


def test_a_job_that_is_handed_over_twice_takes_effect_once(queue, user):
    for _ in range(2):
        StagedJob.objects.all().delete()
        stage("record", user.pk, pk="01900000-0000-7000-8000-000000000001")
        assert enqueue_once() == EnqueuePass(handed_over=1)
    assert queue.waiting() == 2
    queue.work(until=effects)
    assert effects() == 1


def due_now():
    StagedJob.objects.update(run_at=Now())


@pytest.mark.parametrize("queue", [Celery, Tasks], indirect=True)
def test_a_job_that_the_queue_lost_is_handed_over_again_and_the_row_stays_until_it_took_effect(
    queue, user, monkeypatch
):
    follow_up_after(3600, monkeypatch)
    stage("record", user.pk)
    for _ in range(2):
        due_now()
        assert enqueue_once() == EnqueuePass(handed_over=1)
        assert enqueue_once() == EnqueuePass(), "not at once"
        queue.lose()
    follow_up_after(2, monkeypatch)
    due_now()
    queue.work(until=effects)
    assert effects() == 1
    assert not StagedJob.objects.exists()


@pytest.mark.parametrize("queue", [Celery, Tasks], indirect=True)
def test_a_job_that_never_takes_effect_ends_in_the_list_of_the_failed(queue, user):
    job = stage("record", user.pk, hand_overs=MAX_ATTEMPTS - 1)
    assert enqueue_once() == EnqueuePass(handed_over=1)
    due_now()
    assert enqueue_once() == EnqueuePass(failed=1)
    job.refresh_from_db()
    assert "NoEffect" in job.last_error
    assert job.failed_at


@pytest.mark.parametrize(
    "function", ["record_after_a_failure", "record_after_a_failure_in_a_coroutine"]
)
def test_a_job_that_raises_leaves_nothing_and_is_tried_again(queue, user, tmp_path, function):
    stage(function, user.pk, str(tmp_path / "mark"))
    enqueue_once()
    queue.work(until=effects)
    assert (tmp_path / "mark").exists()
    assert effects() == 1


@pytest.mark.sample
def test_a_job_whose_worker_is_killed_is_run_by_another(queue, user, tmp_path):
    stage("record_after_a_kill", user.pk, str(tmp_path / "mark"))
    enqueue_once()
    queue.work(until=effects)
    assert (tmp_path / "mark").exists()
    assert effects() == 1


def test_a_job_whose_database_connection_is_lost_is_tried_again(queue, user, tmp_path):
    stage("record_after_a_lost_connection", user.pk, str(tmp_path / "mark"))
    enqueue_once()
    queue.work(until=effects)
    assert (tmp_path / "mark").exists()
    assert effects() == 1


def test_a_delivery_that_meets_another_one_comes_back(queue, user):
    job = stage("record", user.pk)
    enqueue_once()
    gate = Gate()

    def other_delivery():
        with process_once(STAGED_JOBS, str(job.pk)):
            gate.wait_here()
            raise RuntimeError("on purpose")

    def failing_delivery():
        with pytest.raises(RuntimeError, match="on purpose"):
            other_delivery()

    with queue.working():
        with background(failing_delivery):
            try:
                gate.wait_until_reached()
                for _ in range(2):  # It was refused, and came back.
                    eventually(lambda: enqueue_once() and waits_for_a_lock())
                    eventually(lambda: not waits_for_a_lock())
            finally:
                gate.open()
        eventually(lambda: enqueue_once() and effects())
        eventually(queue.idle)
    assert effects() == 1
    assert ProcessedMessage.objects.count() == 1


def test_a_poison_job_fails_alone_with_its_error(queue, user):
    values, reason = queue.poison
    poison = StagedJobFactory(**values)
    for _ in range(3):
        stage("record", user.pk)
    assert enqueue_once() == EnqueuePass(handed_over=3, refused=1)
    assert queue.waiting() == 3
    poison.refresh_from_db()
    assert (poison.refusals, poison.failed_at) == (1, None)
    assert reason in poison.last_error
    assert poison.run_at > timezone.now(), "it waits before it is offered again"


def test_a_broker_that_is_down_burns_nothing_and_gets_the_jobs_when_it_is_back(queue, user):
    for _ in range(3):
        stage("record", user.pk)
    address = f"127.0.0.1:{free_port()}"
    with (
        queue.through(f"redis://user:secret@{address}/0"),
        tasks_table_locked() if isinstance(queue, Tasks) else nullcontext(),
    ):
        for _ in range(2):
            with pytest.raises(BrokerUnavailable, match="0 jobs were handed over") as caught:
                enqueue_once()
    named = {
        Rq: f"Redis at {address}, database 0",
        Celery: f"redis://user:**@{address}/0",
        Tasks: "",
    }
    assert named[type(queue)] in str(caught.value)
    assert "secret" not in str(caught.value)
    assert set(StagedJob.objects.values_list("refusals", "last_error", "failed_at")) == {
        (0, "", None)
    }
    assert enqueue_once() == EnqueuePass(handed_over=3)
    queue.work(until=lambda: effects() == 3)
    assert effects() == 3


def test_a_broker_that_is_slower_than_every_timeout_does_not_get_the_jobs_again_and_again(
    queue, user
):
    """It takes what was under way when it became slow, once; then it gets nothing until it
    answers."""
    line = SlowLine()
    with line.listener, queue.through(line.url):
        stage("record", user.pk)
        assert enqueue_once() == EnqueuePass(handed_over=1)
        # If it is followed up: not now.
        StagedJob.objects.update(run_at=timezone.now() + timedelta(hours=1))
        for _ in range(3):
            stage("record", user.pk)
        line.open.clear()
        with tasks_table_locked() if isinstance(queue, Tasks) else nullcontext():
            for _ in range(4):
                with pytest.raises(BrokerUnavailable):
                    enqueue_once()
        assert set(
            StagedJob.objects.filter(run_at__lte=timezone.now()).values_list("refusals", flat=True)
        ) == {0}
        line.open.set()
        assert queue.waiting() <= 4, "what was there, and at most one copy of the rest"
        assert enqueue_once() == EnqueuePass(handed_over=3)
    due_now()
    queue.work(until=lambda: effects() == 4)
    assert effects() == 4


@pytest.mark.parametrize("limit", ["client-query-buffer-limit", "proto-max-bulk-len"])
def test_what_redis_never_takes_is_refused_and_stops_no_other_job_of_celery(
    broker, settings, user, limit
):
    """Redis closes the connection of a client that sends too much."""
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": Celery.backend}}
    large = stage("record", user.pk, "x" * 1_500_000, run_at=timezone.now() - timedelta(hours=1))
    stage("record", user.pk)
    before = broker.config_get(limit)[limit]
    broker.config_set(limit, 1024**2)
    try:
        assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    finally:
        broker.config_set(limit, before)
    assert "limit of the broker" in StagedJob.objects.get(pk=large.pk).last_error


def test_celery_takes_no_task_that_could_be_lost_or_take_effect_twice(
    broker, settings, monkeypatch
):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": Celery.backend}}
    job = StagedJobFactory(job_name="tests.unprotected", job_args=[1])
    assert enqueue_once() == EnqueuePass(refused=1)
    job.refresh_from_db()
    assert "OnceTask" in job.last_error
    monkeypatch.setattr(OnceTask, "acks_late", False)
    job = stage("record", 1)
    assert enqueue_once() == EnqueuePass(refused=1)
    job.refresh_from_db()
    assert "acks_late" in job.last_error


def test_celery_gets_the_queue_by_its_name_and_the_staged_id(broker, settings, user):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": Celery.backend}}
    job = stage("record", user.pk, queue="mail")
    assert enqueue_once() == EnqueuePass(handed_over=1)
    [message] = broker.lrange("mail", 0, -1)
    assert json.loads(message)["headers"]["id"] == str(job.pk)


def test_a_once_task_that_is_called_directly_just_runs(user):
    task = app.tasks["tests.kit.jobs.record"]
    for _ in range(2):
        task(user.pk)
    assert effects() == 2
