"""RabbitMQ in ``test_rabbitmq.py``: the backends and the consumers, with pika and with Celery."""

import os
import sys
from typing import Any

from celery import Celery
from django.conf import settings

from idempotency.contrib.celery import CeleryBackend, OnceTask
from idempotency.contrib.rabbitmq import RabbitMQBackend
from tests.kit.examples import file_of
from tests.processes.service import JOB, TakesTime, leave_entry

settings.RABBITMQ_URL = os.environ["TEST_RABBITMQ_URL"]
app = Celery("killed", broker=settings.RABBITMQ_URL, set_as_current=True)
app.conf.update(
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    task_default_queue_type="quorum",
    worker_detect_quorum_queues=True,
)
app.task(leave_entry, name=JOB, base=OnceTask)


class Backend(TakesTime, RabbitMQBackend):
    """A job that was lost goes out again soon."""

    follow_up_seconds = 5


class CeleryOnRabbitMQ(TakesTime, CeleryBackend):
    """The backend of Celery."""


if __name__ == "__main__":
    if sys.argv[1:] == ["celery"]:
        quiet = ["--loglevel=WARNING", "--without-gossip", "--without-mingle"]
        app.worker_main(["worker", "--concurrency=1", *quiet])
    guide: dict[str, Any] = {}
    path = "shop/management/commands/consume_rabbitmq.py"
    exec(file_of("jobs-on-a-broker.md", path), guide)
    guide["Command"]().handle(queue="killed")
