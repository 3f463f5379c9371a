"""Staged jobs on a server of Kafka's protocol: nothing is lost, each effect comes once."""

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from pytest_django import Settings

from idempotency.contrib.kafka import KafkaBackend, on_message
from idempotency.enqueuer import BrokerUnavailable, EnqueuePass, enqueue_once
from idempotency.models import ProcessedMessage, StagedJob
from rides_demo.processes.debian import NotToBeHad
from tests.factories import StagedJobFactory
from tests.kit.ageing import ago
from tests.kit.chance import chance
from tests.kit.kafka import Kafka
from tests.kit.kills import assert_kills_lose_nothing_and_repeat_nothing
from tests.kit.threads import WAIT_SECONDS, background
from tests.models import Entry
from tests.processes.service import JOB

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Yield a running broker."""
    try:
        broker = Kafka(tmp_path_factory.mktemp("kafka"))
    except NotToBeHad as error:
        pytest.skip(str(error))
    with broker:
        yield broker


@pytest.fixture
def broker(server: Kafka, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Kafka:
    """Stage for the broker, with a new producer; return the broker."""
    monkeypatch.setattr("idempotency._hand_over._built", {})
    settings.KAFKA = {"bootstrap.servers": server.url}
    settings.IDEMPOTENCY = {
        "JOB_MODULES": ["tests.processes.service", __name__],
        "ENQUEUERS": {"*": "idempotency.contrib.kafka.KafkaBackend"},
    }
    return server


def received(consumer: Consumer, count: int) -> list[Message]:
    """Return the next messages."""
    end, messages = time.monotonic() + WAIT_SECONDS, []
    while len(messages) < count and time.monotonic() < end:
        if (message := consumer.poll(1)) is not None:
            assert message.error() is None
            messages.append(message)
    assert len(messages) == count
    return messages


def committed(consumer: Consumer, topic: str) -> int:
    """Return the offset at which the next owner of the partition begins."""
    (partition,) = consumer.committed([TopicPartition(topic, 0)], timeout=WAIT_SECONDS)
    return int(partition.offset)


def test_a_job_takes_effect_once(broker: Kafka) -> None:
    consumer = broker.consumer(topic := broker.topic())
    job = StagedJobFactory(job_name=JOB, queue=topic, job_args={"name": "once"})
    assert enqueue_once() == EnqueuePass(handed_over=1)
    (message,) = received(consumer, 1)
    assert message.headers() == [("job_id", str(job.pk).encode())]
    assert message.key() == str(job.pk).encode()
    assert json.loads(message.value() or b"")["job_id"] == str(job.pk)
    on_message(consumer, message)
    assert committed(consumer, topic) == 1
    on_message(consumer, message)
    assert Entry.objects.count() == 1
    StagedJob.objects.update(run_at=ago(seconds=1))
    assert enqueue_once() == EnqueuePass()
    assert not StagedJob.objects.exists()
    consumer.close()


def test_messages_that_arrive_twice_and_out_of_order_take_effect_once(broker: Kafka) -> None:
    consumer, names = broker.consumer(topic := broker.topic()), [str(each) for each in range(100)]
    StagedJob.objects.bulk_create(
        StagedJobFactory.build(job_name=JOB, queue=topic, job_args={"name": name}) for name in names
    )
    for _ in range(2):
        assert enqueue_once().handed_over == 100
        StagedJob.objects.update(run_at=ago(seconds=1))
    messages = received(consumer, 200)
    chance().shuffle(messages)
    for message in messages:
        on_message(consumer, message)
    assert Counter(Entry.objects.values_list("name", flat=True)) == dict.fromkeys(names, 1)
    consumer.close()


def test_a_job_that_raises_and_a_message_of_others_do_not_stop_the_partition(
    broker: Kafka,
) -> None:
    consumer = broker.consumer(topic := broker.topic())
    StagedJobFactory(job_name=JOB, queue=topic, job_args={"wrong": "argument"})
    for hand_overs in (1, 2):
        assert enqueue_once().handed_over == 1
        on_message(consumer, *received(consumer, 1))
        assert committed(consumer, topic) == StagedJob.objects.get().hand_overs == hand_overs
        StagedJob.objects.update(run_at=ago(seconds=1))
    assert not ProcessedMessage.objects.exists()
    backend = KafkaBackend()
    for body in (b"no JSON", b"[]", b'{"job_id": 1, "job_name": 7, "job_args": {}, "using": null}'):
        backend._producer().produce(topic, body)
    assert backend._producer().flush(WAIT_SECONDS) == 0
    for message in received(consumer, 3):
        on_message(consumer, message)
    assert committed(consumer, topic) == 5
    consumer.close()


started, may_end = threading.Event(), threading.Event()


def slow(name: str) -> None:
    """Leave a row after a while."""
    started.set()
    assert may_end.wait(WAIT_SECONDS)
    Entry.objects.create(name=name)


def test_a_rebalance_while_a_job_runs_lets_it_take_effect_once(broker: Kafka) -> None:
    """The consumer exceeds ``max.poll.interval.ms``, and another gets the message."""
    first, second = (broker.consumer(topic := broker.topic()), broker.consumer(topic))
    StagedJobFactory(job_name=f"{__name__}.slow", queue=topic, job_args={"name": "slow"})
    assert enqueue_once().handed_over == 1
    # Both are members of the group, and one has the partition.
    while not (
        messages := [(each, message) for each in (first, second) if (message := each.poll(0.1))]
    ):
        """Until the group has met."""
    ((owner, message),) = messages
    other = second if owner is first else first
    with background(lambda: on_message(owner, message)):
        assert started.wait(WAIT_SECONDS)
        (again,) = received(other, 1)
        assert again.offset() == message.offset()
        on_message(other, again)  # Its job is running.
        assert not Entry.objects.exists()
        may_end.set()
    assert Entry.objects.count() == 1
    on_message(other, again)
    assert Entry.objects.count() == 1
    for consumer in (first, second):
        consumer.close()


def test_a_message_that_is_too_large_does_not_hold_the_others(broker: Kafka) -> None:
    topic = broker.topic()
    StagedJobFactory(job_name=JOB, queue=topic, job_args={"name": "x" * 2_000_000})
    StagedJobFactory(job_name=JOB, queue=topic, job_args={"name": "small"})
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert "MSG_SIZE_TOO_LARGE" in StagedJob.objects.get(refusals=1).last_error


def test_more_jobs_than_the_producer_has_room_for_are_handed_over(
    broker: Kafka, settings: Settings
) -> None:
    consumer = broker.consumer(topic := broker.topic())
    settings.KAFKA |= {"queue.buffering.max.messages": 3}
    StagedJobFactory.create_batch(10, job_name=JOB, queue=topic, job_args={"name": "many"})
    assert enqueue_once().handed_over == 10
    assert len({message.key() for message in received(consumer, 10)}) == 10
    consumer.close()


class Refusing:
    """A producer whose broker refuses each message: the broker of the tests makes topics."""

    error: KafkaError

    def __init__(self, config: dict[str, Any]) -> None:
        self.told: list[Callable[..., None]] = []

    def produce(self, *message: Any, on_delivery: Callable[..., None], **more: Any) -> None:
        """Keep the callback."""
        self.told.append(on_delivery)

    def flush(self, seconds: float) -> None:
        """Refuse the messages."""
        for each in self.told:
            each(self.error, None)


@pytest.mark.parametrize("code", [KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART])
def test_a_topic_that_does_not_exist_refuses_its_jobs(
    code: int, broker: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idempotency.contrib.kafka.Producer", Refusing)
    monkeypatch.setattr(Refusing, "error", KafkaError(code), raising=False)
    StagedJobFactory(job_name=JOB, queue="nowhere", job_args={"name": "nowhere"})
    assert enqueue_once().refused == 1
    assert "Kafka has no topic 'nowhere'" in StagedJob.objects.get().last_error


def test_an_error_of_the_consumer_ends_it() -> None:
    class Failed:
        def error(self) -> KafkaError:
            return KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)

    with pytest.raises(KafkaException):
        on_message(None, Failed())


def without_an_address(broker: Kafka, settings: Settings) -> None:
    del settings.KAFKA


def an_invalid_option(broker: Kafka, settings: Settings) -> None:
    settings.KAFKA = {"bootstrap.servers": broker.url, "no.option": 1}


def no_broker(broker: Kafka, settings: Settings) -> None:
    settings.KAFKA = {"bootstrap.servers": "127.0.0.1:9"}


def a_frozen_broker(broker: Kafka, settings: Settings) -> None:
    os.killpg(broker.pid, signal.SIGSTOP)


TROUBLES = [without_an_address, an_invalid_option, no_broker, a_frozen_broker]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_broker_that_takes_nothing_burns_no_attempt(
    trouble: Callable[..., None], broker: Kafka, settings: Settings
) -> None:
    topic, right = broker.topic(), settings.KAFKA
    StagedJobFactory.create_batch(2, job_name=JOB, queue=topic, job_args={"name": "later"})
    trouble(broker, settings)
    try:
        with pytest.raises(BrokerUnavailable):
            enqueue_once()
    finally:
        os.killpg(broker.pid, signal.SIGCONT)
        settings.KAFKA = right
    assert set(StagedJob.objects.values_list("refusals", flat=True)) == {0}
    assert enqueue_once().handed_over == 2


def test_a_producer_outlives_an_outage_of_the_broker(broker: Kafka) -> None:
    topic = broker.topic()
    StagedJobFactory(job_name=JOB, queue=topic, job_args={"name": "before"})
    assert enqueue_once().handed_over == 1
    broker.kill()
    StagedJobFactory(job_name=JOB, queue=topic, job_args={"name": "after"})
    with pytest.raises(BrokerUnavailable):
        enqueue_once()
    broker.start()
    assert enqueue_once().handed_over == 1


def test_kills_of_broker_enqueuer_and_consumer_lose_nothing_and_repeat_nothing(
    server: Kafka, tmp_path: Path
) -> None:
    """Each kill of the broker loses all its messages."""
    assert_kills_lose_nothing_and_repeat_nothing(
        tmp_path, "tests.processes.queue_kafka", {"TEST_KAFKA": server.url}, broker=server
    )
