"""A server of Kafka's protocol, with topics and consumers for tests."""

from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic

from rides_demo.processes.brokers import Tansu


class Kafka(Tansu):
    """The broker of the demo, which makes topics and consumers."""

    def topic(self) -> str:
        """Make a topic with one partition, and return its name."""
        name = f"topic-{uuid4()}"
        admin = AdminClient({"bootstrap.servers": self.url})
        admin.create_topics([NewTopic(name, 1, 1)])[name].result()
        return name

    def consumer(self, topic: str, **changes: Any) -> Consumer:
        """Return a consumer of the topic. All consumers of a topic are one group."""
        short = {"session.timeout.ms": 6000, "max.poll.interval.ms": 6000}
        consumer = Consumer(
            {"bootstrap.servers": self.url, "group.id": topic, "enable.auto.commit": False}
            | {"auto.offset.reset": "earliest"}
            | short
            | changes
        )
        consumer.subscribe([topic])
        return consumer
