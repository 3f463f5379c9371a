"""Kafka in ``test_kafka.py``: the backend, and the consumer of the guide."""

import os
from typing import Any

from django.conf import settings

from idempotency.contrib.kafka import KafkaBackend
from tests.kit.examples import file_of
from tests.processes.service import TakesTime

settings.KAFKA = {"bootstrap.servers": os.environ["TEST_KAFKA"]}


class Backend(TakesTime, KafkaBackend):
    """A job whose message is lost goes out again soon."""

    follow_up_seconds = 5


if __name__ == "__main__":
    guide: dict[str, Any] = {}
    exec(file_of("jobs-on-a-broker.md", "shop/management/commands/consume_kafka.py"), guide)
    # A killed consumer holds its partitions for so long.
    settings.KAFKA["session.timeout.ms"] = 6000
    guide["Command"]().handle(topic="killed")
