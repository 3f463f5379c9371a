"""The jobs of the demo on RabbitMQ."""

import pika  # type: ignore[import-untyped]
from django.conf import settings

from idempotency.contrib.rabbitmq import RabbitMQBackend, on_message
from rides_demo.brokers import FOLLOW_UP_SECONDS, QUEUE


class Backend(RabbitMQBackend):
    follow_up_seconds = FOLLOW_UP_SECONDS


def consume() -> None:
    """Run the jobs."""
    channel = pika.BlockingConnection(pika.URLParameters(settings.RABBITMQ_URL)).channel()
    # Not a quorum queue: RabbitMQ 3.10 elects no leader for a new one after a kill.
    channel.queue_declare(QUEUE, durable=True)
    channel.basic_qos(prefetch_count=10)
    channel.basic_consume(QUEUE, on_message)
    channel.start_consuming()
