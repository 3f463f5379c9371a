"""Staged jobs on a server of the protocol of SQS: nothing is lost, each effect comes once."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from pytest_django import Settings

from idempotency.contrib.sqs import on_message
from idempotency.enqueuer import BrokerUnavailable, EnqueuePass, enqueue_once
from idempotency.models import ProcessedMessage, StagedJob
from tests.factories import StagedJobFactory
from tests.kit.ageing import ago
from tests.kit.kills import assert_kills_lose_nothing_and_repeat_nothing
from tests.kit.sqs import SQS
from tests.kit.threads import WAIT_SECONDS, background
from tests.models import Entry
from tests.processes.service import JOB

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SQS]:
    """Yield a running server."""
    with SQS(tmp_path_factory.mktemp("sqs")) as sqs:
        yield sqs


@pytest.fixture
def sqs(server: SQS, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> SQS:
    """Stage for the server, with a new client; return the server."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("idempotency._hand_over._built", {})
    settings.IDEMPOTENCY = {
        "JOB_MODULES": ["tests.processes.service", __name__],
        "ENQUEUERS": {"*": "idempotency.contrib.sqs.SQSBackend"},
    }
    return server


def received(sqs: SQS, url: str, seconds: int = 0) -> list[dict[str, Any]]:
    """Receive the messages of a queue; wait for the first for some seconds."""
    answer = sqs.client().receive_message(
        QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=seconds
    )
    messages: list[dict[str, Any]] = answer.get("Messages", [])
    return messages


def count(sqs: SQS, url: str) -> int:
    """Return the number of messages of a queue, also of those that are not visible."""
    asked = sqs.client().get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
    names = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
    return sum(int(asked["Attributes"][name]) for name in names)


def test_a_job_takes_effect_once(sqs: SQS) -> None:
    name, url = sqs.queue(VisibilityTimeout="1")
    job = StagedJobFactory(job_name=JOB, queue=name, job_args={"name": "once"})
    assert enqueue_once() == EnqueuePass(handed_over=1)
    (message,) = received(sqs, url)
    assert json.loads(message["Body"])["job_id"] == str(job.pk)
    on_message(_Deaf(), url, message)
    (again,) = received(sqs, url, 5)
    on_message(sqs.client(), url, again)
    assert (Entry.objects.count(), count(sqs, url)) == (1, 0)
    StagedJob.objects.update(run_at=ago(seconds=1))
    assert enqueue_once() == EnqueuePass()
    assert not StagedJob.objects.exists()


class _Deaf:
    """A client whose requests fail."""

    def delete_message(self, **arguments: str) -> None:
        """Fail as with a receipt handle that has expired."""
        raise ClientError({"Error": {"Code": "ReceiptHandleIsInvalid"}}, "DeleteMessage")


started, may_end = threading.Event(), threading.Event()


def slow(name: str) -> None:
    """Leave a row after a while."""
    started.set()
    assert may_end.wait(WAIT_SECONDS)
    Entry.objects.create(name=name)


def test_work_that_is_longer_than_the_visibility_timeout_takes_effect_once(sqs: SQS) -> None:
    name, url = sqs.queue(VisibilityTimeout="1")
    StagedJobFactory(job_name=f"{__name__}.slow", queue=name, job_args={"name": "slow"})
    assert enqueue_once().handed_over == 1
    (first,) = received(sqs, url)
    with background(lambda: on_message(sqs.client(), url, first)):
        assert started.wait(WAIT_SECONDS)
        (second,) = received(sqs, url, 5)
        on_message(sqs.client(), url, second)  # It stays, because its job is running.
        assert (Entry.objects.count(), count(sqs, url)) == (0, 1)
        may_end.set()
    for message in received(sqs, url, 5):
        on_message(sqs.client(), url, message)
    assert (Entry.objects.count(), count(sqs, url)) == (1, 0)


def test_a_fifo_queue_drops_a_second_hand_over_and_holds_back_no_other_job(sqs: SQS) -> None:
    name, url = sqs.queue(".fifo")
    StagedJobFactory.create_batch(2, job_name=JOB, queue=name, job_args={"name": "fifo"})
    for _ in range(2):
        assert enqueue_once().handed_over == 2
        StagedJob.objects.update(run_at=ago(seconds=1))
    messages = received(sqs, url)
    ids = {json.loads(message["Body"])["job_id"] for message in messages}
    assert ids == set(map(str, StagedJob.objects.values_list("pk", flat=True)))
    assert len(messages) == 2


def test_a_job_that_fails_goes_to_the_dead_letter_queue_and_stays_staged(sqs: SQS) -> None:
    _, dead = sqs.queue()
    name, url = sqs.queue(VisibilityTimeout="0", RedrivePolicy=sqs.redrive_to(dead, 2))
    StagedJobFactory(job_name=JOB, queue=name, job_args={"wrong": "argument"})
    assert enqueue_once().handed_over == 1
    for _ in range(2):
        (message,) = received(sqs, url)
        on_message(sqs.client(), url, message)
    assert received(sqs, url) == []
    assert json.loads(received(sqs, dead)[0]["Body"])["job_args"] == {"wrong": "argument"}
    assert not ProcessedMessage.objects.exists()
    StagedJob.objects.update(run_at=ago(seconds=1))
    assert enqueue_once().handed_over == 1
    assert StagedJob.objects.get().hand_overs == 2


def test_a_message_of_others_stays(sqs: SQS) -> None:
    _, url = sqs.queue()
    for body in ("no JSON", "[]", '{"job_id": 1, "job_name": 7, "job_args": {}, "using": null}'):
        sqs.client().send_message(QueueUrl=url, MessageBody=body)
    for message in received(sqs, url):
        on_message(sqs.client(), url, message)
    assert count(sqs, url) == 3


@pytest.mark.parametrize("name", ["nowhere", "not a name"])
def test_a_queue_that_does_not_exist_refuses_its_jobs(name: str, sqs: SQS) -> None:
    StagedJobFactory(job_name=JOB, queue=name, job_args={"name": "nowhere"})
    assert enqueue_once().refused == 1
    assert f"SQS has no queue '{name}'" in StagedJob.objects.get().last_error


def test_a_queue_that_is_deleted_and_made_again_is_found_again(sqs: SQS) -> None:
    name, url = sqs.queue()
    StagedJobFactory.create_batch(2, job_name=JOB, queue=name, job_args={"name": "again"})
    assert enqueue_once(batch_size=1).handed_over == 2
    sqs.client().delete_queue(QueueUrl=url)
    StagedJobFactory(job_name=JOB, queue=name, job_args={"name": "late"})
    assert enqueue_once().refused == 1
    sqs.client().create_queue(QueueName=name)
    StagedJob.objects.update(run_at=ago(seconds=1))
    assert enqueue_once().handed_over == 3


def test_a_message_that_is_too_large_does_not_hold_the_others(sqs: SQS) -> None:
    name, url = sqs.queue()
    StagedJobFactory(job_name=JOB, queue=name, job_args={"name": "x" * 2**20})
    StagedJobFactory(job_name=JOB, queue=name, job_args={"name": "small"})
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert count(sqs, url) == 1
    assert "must be shorter than" in StagedJob.objects.get(refusals=1).last_error


def without_credentials(sqs: SQS, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)


def without_a_region(sqs: SQS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")


def refused_credentials(sqs: SQS, monkeypatch: pytest.MonkeyPatch) -> None:
    sqs.check_credentials()


def no_server(sqs: SQS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", "http://127.0.0.1:9")


def an_invalid_address(sqs: SQS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", "no address")


def a_frozen_server(sqs: SQS, monkeypatch: pytest.MonkeyPatch) -> None:
    os.killpg(sqs.pid, signal.SIGSTOP)


TROUBLES = [
    without_credentials, without_a_region, refused_credentials, no_server, an_invalid_address,
    a_frozen_server,
]  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_lost_network_or_credential_burns_no_attempt(
    trouble: Any, sqs: SQS, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = sqs.queue()
    StagedJobFactory.create_batch(2, job_name=JOB, queue=name, job_args={"name": "later"})
    try:
        with monkeypatch.context() as change:
            trouble(sqs, change)
            with pytest.raises(BrokerUnavailable):
                enqueue_once()
    finally:
        os.killpg(sqs.pid, signal.SIGCONT)
        sqs.check_credentials(checked=False)
    assert set(StagedJob.objects.values_list("refusals", flat=True)) == {0}
    assert enqueue_once().handed_over == 2


def test_kills_of_enqueuer_and_consumer_lose_nothing_and_repeat_nothing(
    server: SQS, tmp_path: Path
) -> None:
    server.queue(name="killed", VisibilityTimeout="2")
    assert_kills_lose_nothing_and_repeat_nothing(
        tmp_path, "tests.processes.queue_sqs", server.variables
    )
