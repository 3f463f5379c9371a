"""The jobs of the demo on Kafka."""

from confluent_kafka import Consumer
from django.conf import settings

from idempotency.contrib.kafka import KafkaBackend, on_message
from rides_demo.brokers import FOLLOW_UP_SECONDS, QUEUE

OPTIONS = {
    "group.id": "jobs",
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
    # A killed consumer holds its partitions for so long.
    "session.timeout.ms": 6000,
}


class Backend(KafkaBackend):
    follow_up_seconds = FOLLOW_UP_SECONDS


def consume() -> None:
    """Run the jobs."""
    consumer = Consumer(settings.KAFKA | OPTIONS)
    consumer.subscribe([QUEUE])
    while True:
        message = consumer.poll(1)
        if message is not None:
            on_message(consumer, message)
