"""Staged jobs on a real RabbitMQ, with pika and with Celery: nothing is lost, each effect comes
once."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pika
import pytest
from pika.channel import Channel
from pika.exceptions import AMQPError
from pytest_django import Settings

from idempotency.contrib.celery import CeleryBackend
from idempotency.contrib.rabbitmq import on_message
from idempotency.enqueuer import BrokerUnavailable, EnqueuePass, enqueue_once
from idempotency.models import ProcessedMessage, StagedJob
from rides_demo.processes.brokers import RabbitMQ
from rides_demo.processes.debian import NotToBeHad
from tests.factories import StagedJobFactory
from tests.kit.ageing import ago
from tests.kit.commands import start
from tests.kit.kills import assert_kills_lose_nothing_and_repeat_nothing
from tests.kit.waiting import eventually
from tests.models import Entry
from tests.processes.delayed_celery import QUEUE, TASK, app_of
from tests.processes.service import JOB

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]

QUORUM = {"x-queue-type": "quorum"}
#: Consumers, with the queues and the backends of their jobs.
KINDS = [("pika", "killed", "Backend"), ("celery", "default", "CeleryOnRabbitMQ")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """Yield a running broker."""
    try:
        broker = RabbitMQ(tmp_path_factory.mktemp("rabbitmq"))
    except NotToBeHad as error:
        pytest.skip(str(error))
    with broker:
        yield broker


@pytest.fixture
def queue(server: RabbitMQ, settings: Settings) -> Iterator[Callable[..., Any]]:
    """Stage for the broker; yield a function that declares a new queue, and returns its channel and
    its name."""
    server.start()
    settings.RABBITMQ_URL = server.url
    settings.IDEMPOTENCY = {
        "JOB_MODULES": ["tests.processes.service", "tests.kit.jobs"],
        "ENQUEUERS": {"*": "idempotency.contrib.rabbitmq.RabbitMQBackend"},
    }
    opened = pika.BlockingConnection(pika.URLParameters(server.url))

    def declare(**arguments: Any) -> Any:
        channel = opened.channel()
        channel.confirm_delivery()
        name = f"queue-{uuid4()}"
        channel.queue_declare(name, durable=True, arguments=QUORUM | arguments)
        return channel, name

    yield declare
    with suppress(AMQPError):  # The broker may have been killed.
        opened.close()


def received(channel: Any, name: str) -> list[Any]:
    """Run the callback of the consumer for each message of the queue; return the messages."""
    messages = []
    while (message := channel.basic_get(name))[0] is not None:
        messages.append(message)
        on_message(channel, *message)
    return messages


def test_a_job_takes_effect_once(queue: Callable[..., Any]) -> None:
    channel, name = queue()
    job = StagedJobFactory(job_name=JOB, queue=name, job_args={"name": "once"})
    assert enqueue_once() == EnqueuePass(handed_over=1)
    ((method, properties, body),) = received(channel, name)
    assert (properties.message_id, properties.delivery_mode) == (str(job.pk), 2)
    told = {"job_id": str(job.pk), "using": "default", "trace": None}
    assert json.loads(body) == {"job_name": JOB, "job_args": {"name": "once"}} | told
    on_message(_Deaf(), method, properties, body)
    assert Entry.objects.count() == 1
    StagedJob.objects.update(run_at=ago(seconds=1))
    assert enqueue_once() == EnqueuePass()
    assert not StagedJob.objects.exists()


class _Deaf:
    """A channel whose acknowledgements nobody hears."""

    def basic_ack(self, tag: int) -> None:
        """Do nothing."""


def test_a_job_that_raises_is_handed_over_again(queue: Callable[..., Any]) -> None:
    channel, name = queue()
    StagedJobFactory(job_name=JOB, queue=name, job_args={"wrong": "argument"})
    for hand_overs in (1, 2):
        assert enqueue_once().handed_over == 1
        assert len(received(channel, name)) == 1
        assert StagedJob.objects.get().hand_overs == hand_overs
        StagedJob.objects.update(run_at=ago(seconds=1))
    assert not ProcessedMessage.objects.exists()


def test_a_message_of_others_is_rejected(queue: Callable[..., Any]) -> None:
    channel, name = queue()
    for body in (b"no JSON", b"[]", b'{"job_name": 7, "job_args": {}, "using": null}'):
        channel.basic_publish("", name, body)
    assert len(received(channel, name)) == 3
    assert channel.queue_declare(name, passive=True).method.message_count == 0


def test_a_queue_that_does_not_exist_refuses_its_jobs(queue: Callable[..., Any]) -> None:
    StagedJobFactory(job_name=JOB, queue="nowhere", job_args={"name": "nowhere"})
    assert enqueue_once().refused == 1
    assert "RabbitMQ has no queue 'nowhere'" in StagedJob.objects.get().last_error


def test_a_full_queue_burns_no_attempt(queue: Callable[..., Any]) -> None:
    _, name = queue(**{"x-max-length": 1, "x-overflow": "reject-publish"})
    StagedJobFactory.create_batch(20, job_name=JOB, queue=name, job_args={"name": "full"})

    def until_full() -> None:
        while enqueue_once().handed_over:
            """A quorum queue accepts some messages more than its limit."""

    with pytest.raises(BrokerUnavailable):
        until_full()
    assert set(StagedJob.objects.values_list("failed_at", flat=True)) == {None}


def test_a_message_that_is_too_large_does_not_hold_the_others(
    queue: Callable[..., Any], settings: Settings
) -> None:
    channel, name = queue()
    StagedJobFactory(job_name=JOB, queue=name, job_args={"name": "x" * 140_000_000})
    StagedJobFactory(job_name=JOB, queue=name, job_args={"name": "small"})
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert len(received(channel, name)) == 1


def test_a_message_that_is_not_confirmed_holds_no_other_queue(
    queue: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quorum queue without a majority confirms nothing, while heartbeats are answered."""

    def deaf(self: Any, ack_nack_callback: Any, callback: Any = None) -> None:
        confirm_delivery(self, lambda frame: None, callback)

    confirm_delivery = Channel.confirm_delivery
    monkeypatch.setattr(Channel, "confirm_delivery", deaf)
    monkeypatch.setattr("idempotency.contrib.rabbitmq.BROKER_TIMEOUT_SECONDS", 1)
    monkeypatch.setattr("idempotency._hand_over._built", {})  # without the former connection
    _, name = queue()
    StagedJobFactory(job_name=JOB, queue=name, job_args={"name": "first"})
    with pytest.raises(BrokerUnavailable, match="did not confirm"):
        enqueue_once()
    assert StagedJob.objects.get().refusals == 0


def test_an_invalid_address_shows_no_password_and_burns_no_attempt(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idempotency._hand_over._built", {})
    settings.IDEMPOTENCY = {
        "JOB_MODULES": ["tests.processes.service"],
        "ENQUEUERS": {"*": "idempotency.contrib.rabbitmq.RabbitMQBackend"},
    }
    settings.RABBITMQ_URL = "amqp://user:secret/@host:5672/%2F"
    StagedJobFactory(job_name=JOB, queue="unused", job_args={})
    with pytest.raises(BrokerUnavailable) as raised:
        enqueue_once()
    assert "secret" not in f"{raised.value} {StagedJob.objects.get().last_error}"
    assert StagedJob.objects.get().refusals == 0


def stopped(server: RabbitMQ) -> None:
    server.stop()


def frozen(server: RabbitMQ) -> None:
    os.killpg(server.pid, signal.SIGSTOP)


@pytest.mark.parametrize("trouble", [stopped, frozen])
def test_a_broker_that_does_not_answer_burns_no_attempt(
    trouble: Callable[[RabbitMQ], None], queue: Callable[..., Any], server: RabbitMQ
) -> None:
    # RabbitMQ 3.10 elects no leader for a new quorum queue after a kill.
    _, name = queue(**{"x-queue-type": "classic"})
    StagedJobFactory(job_name=JOB, queue=name, job_args={"name": "first"})
    assert enqueue_once().handed_over == 1
    StagedJobFactory(job_name=JOB, queue=name, job_args={"name": "later"})
    trouble(server)
    try:
        with pytest.raises(BrokerUnavailable):
            enqueue_once()
    finally:
        server.kill()
        server.start()
    assert set(StagedJob.objects.values_list("refusals", flat=True)) == {0}

    assert enqueue_once().handed_over >= 1
    assert StagedJob.objects.get(job_args__name="later").hand_overs == 1


def test_a_retry_that_rabbitmq_delays_returns_to_the_queue_of_its_job(
    server: RabbitMQ,
) -> None:
    """Celery itself sends it to the default queue."""
    server.start()
    backend = CeleryBackend()
    backend.app = app_of(server.url)
    job: StagedJob = StagedJobFactory(job_name=TASK, queue=QUEUE, job_args={"name": "delayed"})
    backend.hand_over_one(QUEUE, job)
    backend._broker.disconnect()
    worker = f"from tests.processes.delayed_celery import work; work({server.url!r})"
    with start(python=f"import django; django.setup(); {worker}"):
        eventually(Entry.objects.exists, 60)


@pytest.mark.parametrize(("kind", "queue", "backend"), KINDS)
def test_kills_of_broker_enqueuer_and_consumer_lose_nothing_and_repeat_nothing(
    kind: str, queue: str, backend: str, server: RabbitMQ, tmp_path: Path
) -> None:
    assert_kills_lose_nothing_and_repeat_nothing(
        tmp_path,
        "tests.processes.queue_rabbitmq",
        {"TEST_RABBITMQ_URL": server.url},
        queue=queue,
        backend=backend,
        arguments=[kind],
        broker=server,
    )
