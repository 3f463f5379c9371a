"""``OnceTask`` in real workers of Celery: each task takes effect once, whatever it calls, returns
or runs into."""

import gc
from asyncio import CancelledError
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chord
from celery.canvas import Signature
from celery.exceptions import Reject, Retry
from celery.result import AsyncResult
from django.db.models import TextChoices
from kombu import Queue

from idempotency.contrib.celery import SHARD_HEADER, CeleryBackend, OnceTask
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.models import ProcessedMessage, StagedJob
from rides_demo.models import AuditRecord
from tests.factories import StagedJobFactory, UserFactory
from tests.jobs.celery_tasks import (
    app,
    asynchronous,
    book,
    charge,
    does_nothing,
    hopeless,
    of_shard,
    refund,
    slow,
    tree,
    unlucky,
    whole,
)
from tests.kit.brokers import Celery
from tests.kit.database import session_setting
from tests.kit.threads import Gate, background
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True), pytest.mark.processes]


class Worker(Celery):
    """A worker of the app with the tasks of these tests."""

    worker = Celery.worker.replace("tests.kit.celery_app", "tests.jobs.celery_tasks")

    def finish(self, *results: AsyncResult, pool: str = "prefork") -> list[str]:
        """Let a worker run until there are ``results`` and nothing is left to do; return what took
        effect."""
        self.worker = type(self).worker.replace("prefork", pool)
        self.work(until=lambda: all(result.ready() for result in results))
        return sorted(AuditRecord.objects.values_list("action", flat=True))

    def work(self, until: Any) -> None:
        with self.working():
            eventually(lambda: until() and self.idle(), 60)


@pytest.fixture
def worker(broker: Any) -> Iterator[Worker]:
    yield Worker(broker)
    gc.collect()  # A result asks Redis to forget it when it is deleted: while Redis is there.
    app.close()


@pytest.fixture
def user() -> int:
    return UserFactory().pk


@pytest.fixture
def mark(tmp_path: Any) -> str:
    return str(tmp_path / "mark")


@pytest.mark.parametrize("error", [ValueError, CancelledError])
def test_a_message_whose_retry_cannot_be_published_returns_to_the_broker(error, monkeypatch):
    """Celery itself acknowledges it, and the task is lost."""

    @app.task(base=OnceTask, name=f"tests.fails.{error.__name__}")
    def fails():
        raise error

    def refuse(*args, **options):
        raise OSError("OOM command not allowed")

    monkeypatch.setattr(Signature, "apply_async", refuse)
    fails.push_request(id="1", called_directly=False, retries=0)
    try:
        with pytest.raises(Reject) as rejected:
            fails()
    finally:
        fails.pop_request()
    assert rejected.value.requeue
    assert not ProcessedMessage.objects.exists()


def test_a_delivery_beside_a_running_one_is_published_anew(monkeypatch):
    """RabbitMQ drops a message that has returned to a quorum queue 20 times."""
    gate, sent = Gate(), []

    def running() -> None:
        with process_once(STAGED_JOBS, "1"):
            gate.wait_here()

    @app.task(base=OnceTask, name="tests.is_running")
    def is_running():
        raise AssertionError("It runs elsewhere.")

    monkeypatch.setattr(Signature, "apply_async", lambda self: sent.append(self.options))
    headers = {"idempotency_outages": 3}
    with background(running), session_setting("lock_timeout", "200"):
        gate.wait_until_reached()
        is_running.push_request(
            id="1", called_directly=False, retries=14, args=[], kwargs={}, headers={}, **headers
        )
        try:
            with pytest.raises(Retry):
                is_running()
        finally:
            is_running.pop_request()
            gate.open()
    assert [(each["retries"], each["countdown"]) for each in sent] == [(14, 8)]
    assert sent[0]["headers"]["idempotency_outages"] == 4


def test_a_cancellation_in_the_last_try_fails_the_task_and_not_its_worker():
    @app.task(base=OnceTask, name="tests.is_cancelled", max_retries=0)
    def is_cancelled():
        raise CancelledError("by its channel")

    is_cancelled.push_request(id="1", called_directly=False, retries=0)
    try:
        with pytest.raises(RuntimeError, match="CancelledError: by its channel"):
            is_cancelled()
    finally:
        is_cancelled.pop_request()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_an_async_task_is_awaited_in_the_transaction_of_its_inbox_row(worker, user, mark, pool):
    result = asynchronous.delay(user, mark)
    assert worker.finish(result, pool=pool) == ["try 2"], (
        "what the other tries wrote was rolled back"
    )
    assert result.result == "done"
    assert ProcessedMessage.objects.count() == 1


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_calls_itself_does_all_of_its_calls_once_in_one_run(worker, user, mark, pool):
    result = tree.delay(user, mark, 3)
    assert worker.finish(result, pool=pool) == ["node 0", "node 1", "node 2", "node 3"]
    assert ProcessedMessage.objects.count() == 1


def test_a_generator_function_fails_in_place_of_doing_nothing(worker, user):
    result = does_nothing.delay(user)
    assert worker.finish(result) == []
    assert "tests.kit.jobs.yielding" in str(result.result)
    assert not ProcessedMessage.objects.exists()


def test_a_task_is_not_lost_when_one_that_it_calls_directly_asks_for_another_try(
    worker, user, mark
):
    result = whole.delay(user, mark)
    assert worker.finish(result) == ["ran"]
    assert result.successful()


def follow(how: str, user: int, mark: str) -> AsyncResult:
    """Send a charge that something follows; return the result of the charge."""
    first = charge.s(user, mark).on_error(refund.s(user=user))
    if how == "link":
        return first.apply_async(link=book.s(user))
    if how == "chain":
        return (first | book.s(user)).apply_async().parent
    return chord([first], book.s(user)).apply_async().parent[0]


@pytest.mark.parametrize("how", ["link", "chain", "chord"])
def test_what_follows_a_task_never_goes_on_with_the_none_of_a_second_delivery(
    worker, user, mark, how
):
    result = follow(how, user, mark)
    assert worker.finish(result) == ["charged"], "nothing was booked, and nothing refunded"
    assert result.failed()
    assert "stage_job()" in str(result.result)


@pytest.mark.parametrize("how", ["link", "chain", "chord"])
def test_what_follows_a_task_gets_its_result(worker, user, tmp_path, how):
    result = follow(how, user, str(tmp_path))
    with worker.working():
        eventually(lambda: AuditRecord.objects.count() == 2)
    booked = ["ch_1"] if how == "chord" else "ch_1"
    assert set(AuditRecord.objects.values_list("action", flat=True)) == {
        "charged",
        f"booked {booked}",
    }
    assert result.successful()


@pytest.mark.parametrize("limit", ["of the task", "of the call", "soft"])
def test_a_task_that_runs_into_its_time_limit_is_run_again(worker, user, mark, limit):
    task = app.tasks["slow_by_nature"] if limit == "of the task" else slow
    options = {"of the task": {}, "of the call": {"time_limit": 1}, "soft": {"soft_time_limit": 1}}[
        limit
    ]
    result = task.apply_async([user, mark], link_error=refund.s(user=user), **options)
    assert worker.finish(result) == ["ran"], "and nothing was refunded"
    assert result.successful()


def test_a_run_without_a_database_leaves_a_task_all_of_its_tries(worker, user, mark):
    result = unlucky.delay(user, mark)
    assert worker.finish(result) == ["ran"]
    assert result.successful()


def test_a_run_without_a_database_gives_no_further_tries(worker, user, mark):
    """Celery keeps the number of retries of one call for later ones of ``autoretry_for``."""
    result = hopeless.delay(user, mark)
    assert worker.finish(result) == []
    assert result.failed()
    assert Path(f"{mark} runs").read_text() == "xxx"


@pytest.mark.parametrize(
    ("of_message", "of_retry"),
    [({}, {"mine": "1"}), ({"headers": {"traceparent": "00"}}, {})],
    ids=["headers of the task", "headers of a tracer, as ddtrace sends them"],
)
def test_each_retry_uses_the_database_of_the_job(worker, user, mark, of_message, of_retry):
    """Otherwise another delivery would not find its row in the inbox."""
    result = of_shard.apply_async(
        [user, mark, of_retry], headers={SHARD_HEADER: "default", **of_message}
    )
    assert worker.finish(result) == ["default"]


class Pool(TextChoices):
    """The queues of a project."""

    SLOW = "slow"


@pytest.mark.parametrize(
    ("queue", "of_retry", "expected", "next_queue"),
    [
        ("celery", {}, {"queue": "celery"}, "celery"),
        ("unknown", {}, {"exchange": "payments", "routing_key": "eu"}, "unknown"),
        ("celery", {"queue": "slow"}, {"queue": "slow"}, "slow"),
        ("celery", {"queue": Queue("slow")}, {"queue": Queue("slow")}, "slow"),
        ("celery", {"queue": Pool.SLOW}, {"queue": "slow"}, "slow"),
        ("celery", {"queue": None}, {"queue": "celery"}, "celery"),
        ("celery", {"routing_key": "us"}, {"exchange": "payments", "routing_key": "us"}, None),
    ],
)
def test_a_retry_goes_to_the_queue_of_the_job_or_of_the_last_retry(
    queue, of_retry, expected, next_queue, monkeypatch
):
    sent = []

    @app.task(base=OnceTask, bind=True, name=f"tests.goes_on.{queue}.{of_retry}")
    def goes_on(self):
        self.retry(**of_retry)

    monkeypatch.setattr(Signature, "apply_async", lambda self: sent.append(self.options))
    message = {"args": [], "kwargs": {}, "headers": {}, "idempotency_queue": queue}
    delivered = {"exchange": "payments", "routing_key": "eu"}
    goes_on.push_request(
        id="1", called_directly=False, retries=0, delivery_info=delivered, **message
    )
    try:
        with pytest.raises(Retry):
            goes_on()
    finally:
        goes_on.pop_request()
    where = ("queue", "exchange", "routing_key")
    assert {name: sent[0][name] for name in where if name in sent[0]} == expected
    assert sent[0]["headers"]["idempotency_queue"] == next_queue


def test_no_task_is_taken_that_is_lost_with_its_process(settings, monkeypatch):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": Celery.backend}}
    backend = CeleryBackend()
    backend.app = app
    job: StagedJob = StagedJobFactory.build(job_name="on_its_own")
    with pytest.raises(TypeError, match="acks_late"):
        backend.hand_over_one("default", job)
