"""A server of the protocol of SQS on loopback: moto, which keeps its queues in memory."""

import json
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

import boto3

from rides_demo.processes.ports import free_port
from rides_demo.processes.process import Process


class SQS(Process):
    """A server whose queues are lost when it ends. ``variables`` lead boto3 to it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.variables = {
            "AWS_ENDPOINT_URL_SQS": f"http://127.0.0.1:{self.port}",
            "AWS_DEFAULT_REGION": "eu-central-1",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        super().__init__("moto", command, output=folder / "moto.log")

    def is_ready(self) -> bool:
        """Return whether the server accepts connections."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def client(self) -> Any:
        """Return a client of the server."""
        names = {
            "endpoint_url": "AWS_ENDPOINT_URL_SQS",
            "region_name": "AWS_DEFAULT_REGION",
            "aws_access_key_id": "AWS_ACCESS_KEY_ID",
            "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY",
        }
        return boto3.client("sqs", **{key: self.variables[name] for key, name in names.items()})

    def check_credentials(self, *, checked: bool = True) -> None:
        """Refuse the credentials of ``variables`` from now on, or accept any."""
        after = b"0" if checked else b"inf"
        url = f"http://127.0.0.1:{self.port}/moto-api/reset-auth"
        urlopen(Request(url, after, {"Content-Type": "text/plain"})).close()

    def queue(self, suffix: str = "", *, name: str = "", **attributes: str) -> tuple[str, str]:
        """Make a queue; return its name and its URL."""
        name = name or f"queue-{uuid4()}{suffix}"
        fifo = {"FifoQueue": "true"} if suffix else {}
        made = self.client().create_queue(QueueName=name, Attributes=fifo | attributes)
        return name, made["QueueUrl"]

    def redrive_to(self, url: str, deliveries: int) -> str:
        """Return the redrive policy of a queue whose dead letter queue has the URL ``url``."""
        asked = self.client().get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
        arn = asked["Attributes"]["QueueArn"]
        return json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": deliveries})
