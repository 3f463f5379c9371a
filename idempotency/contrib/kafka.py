"""Staged jobs for Apache Kafka, through confluent-kafka: a backend, and the function that a
consumer calls for each message."""

import logging
import threading
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException, Producer
from django.conf import settings

from idempotency._hidden import Hidden
from idempotency.backends import (
    BROKER_TIMEOUT_SECONDS,
    BrokerUnavailable,
    HandOverResult,
    OneByOne,
)
from idempotency.contrib._messages import message_of, run_message
from idempotency.exceptions import MessageInProgress
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")

_NO_TOPIC = (
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.TOPIC_EXCEPTION,
)
#: The cause is the message. Any other error may be a matter of the network, of a login or of a
#: limit, and counts only if Kafka takes another job.
_INVALID = (
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.POLICY_VIOLATION,
)
_SAFE = {
    "enable.idempotence": True,
    "acks": "all",
    "message.timeout.ms": (BROKER_TIMEOUT_SECONDS - 1) * 1000,
    "topic.metadata.propagation.max.ms": BROKER_TIMEOUT_SECONDS * 500,
}


class KafkaBackend(OneByOne):
    """Publish staged jobs to topics of Kafka. Consumers run them with ``on_message``.

    The queue of a staged job is the name of a topic. The configuration of the producer is
    ``settings.KAFKA``. The producer is idempotent and waits for all in-sync replicas.
    """

    runs_functions = True
    uses_database = False
    uses_inbox = True
    #: A consumer does not retry: a failed job is handed over again after waits that double. Ten
    #: hand-overs take 8.5 hours.
    follow_up_seconds: float | None = 30
    #: The configuration of librdkafka; None is ``settings.KAFKA``.
    config: Mapping[str, Any] | None = None

    def __init__(self) -> None:
        self._thread = threading.local()

    def key_of(self, job: StagedJob) -> str:
        """Return the key of the message, which chooses the partition."""
        return str(job.id)

    def hand_over(
        self, queue: str, jobs: Sequence[StagedJob]
    ) -> Mapping[UUID, HandOverResult | None]:
        """Publish new jobs together, and those that were handed over before one by one."""
        new = [job for job in jobs if not (job.hand_overs or job.last_error)]
        self._thread.sent = sent = self._publish(queue, new) if new else {}
        if len(sent) == len(jobs) and not any(sent.values()):
            return {}
        return super().hand_over(queue, jobs)

    def hand_over_one(self, queue: str, job: StagedJob) -> None:
        """Publish one message, if it was not published with others.

        Raises BrokerUnavailable if Kafka cannot be reached or does not confirm the message.
        Raises LookupError if Kafka has no such topic.
        Raises KafkaException if Kafka does not permit the message, for example because of its size.
        """
        sent = self._thread.sent if job.id in self._thread.sent else self._publish(queue, [job])
        if (error := sent[job.id]) is not None:
            raise error

    def _publish(self, queue: str, jobs: Sequence[StagedJob]) -> dict[UUID, Exception | None]:
        """Publish the jobs that fit into the buffer of the producer, and wait for their
        confirmations. Return an error or None for each of these jobs."""
        sent: dict[UUID, Exception | None] = {}

        def confirm(job_id: UUID, error: KafkaError | None, message: object) -> None:
            sent[job_id] = None if error is None else self._exception(queue, error)

        unconfirmed = BrokerUnavailable(
            f"Kafka did not confirm a message within {BROKER_TIMEOUT_SECONDS} s."
        )
        vars(self._thread).pop("error", None)
        producer = self._producer()
        for job in jobs:
            message, key, confirmed = message_of(job), self.key_of(job), partial(confirm, job.id)
            header: Any = {"job_id": str(job.id)}
            sent[job.id] = unconfirmed
            try:
                producer.produce(queue, message.value, key, headers=header, on_delivery=confirmed)
            except KafkaException as error:
                confirmed(error.args[0], None)
            except BufferError:
                del sent[job.id]
                break
        producer.flush(BROKER_TIMEOUT_SECONDS)
        if any(isinstance(error, BrokerUnavailable) for error in sent.values()):
            self._disconnect()
        return sent

    def _exception(self, queue: str, error: KafkaError) -> Exception:
        if error.code() in _NO_TOPIC:
            return LookupError(
                f"Kafka has no topic {queue!r} ({error.str()}). Create it and start a consumer for"
                " it. Or stage these jobs on another queue."
            )
        if error.code() in _INVALID:
            return KafkaException(error)
        cause = getattr(self._thread, "error", error)
        return BrokerUnavailable(f"Kafka takes no jobs at the moment: {cause.str()}")

    def _producer(self) -> Producer:
        """Return this thread's producer."""
        thread: Any = self._thread
        if not hasattr(thread, "producer"):
            config = Hidden(dict(self.config or getattr(settings, "KAFKA", None) or {}))
            if not config.value.get("bootstrap.servers"):
                raise BrokerUnavailable(
                    'KafkaBackend needs the address of a broker: KAFKA = {"bootstrap.servers":'
                    ' "host:9092"} in the settings.'
                )
            told = {"error_cb": partial(setattr, thread, "error")}
            try:
                thread.producer = Producer(config.value | _SAFE | told)
            except KafkaException as error:
                raise BrokerUnavailable(f"KAFKA in the settings is invalid: {error}") from error
        producer: Producer = thread.producer
        return producer

    def _disconnect(self) -> None:
        """Forget this thread's producer, and the messages that it still has."""
        vars(self._thread).pop("producer").purge()
        vars(self._thread).pop("error", None)


def on_message(consumer: Any, message: Any) -> None:
    """Run the job of a message once, and commit its offset. The consumer has
    ``"enable.auto.commit": False``.

    On the commit of the offset the effects of the job are committed. If the job raises, they are
    rolled back, the error is logged, and the offset is committed all the same, so that the
    partition goes on. The enqueuer hands the job over again. The same applies to a job that another
    consumer is running, and to a message that is not of KafkaBackend.
    Raises KafkaException if ``message`` is an error.
    """
    if message.error() is not None:
        raise KafkaException(message.error())
    place = f"{message.topic()}-{message.partition()}-{message.offset()}"
    try:
        run_message(Hidden(message.value()))
    except MessageInProgress:
        logger.info("another consumer runs the job of the message %s of Kafka", place)
    except (Exception, CancelledError):
        logger.exception("the job of the message %s of Kafka failed", place)
    try:
        consumer.commit(message=message, asynchronous=False)
    except KafkaException as error:
        # Another consumer has the partition now. Its delivery of a job that took effect does
        # nothing.
        logger.warning("the offset of the message %s cannot be committed: %s", place, error)
