"""The queues of ``test_processes_killed.py``: how their worker is started, and what is left in
them."""

import sys
from abc import ABC, abstractmethod
from typing import Any

from django_tasks_db.models import DBTaskResult


def _django(command: str) -> list[str]:
    return [sys.executable, "-m", "django", *command.split()]


class Queue(ABC):
    """One kind of queue; ``connection`` is to the Redis that it uses, if it does."""

    backend: str
    worker: list[str]
    #: The names of the workers that a test of several workers starts.
    workers: tuple[str, ...] = ("worker", "second worker")

    @staticmethod
    @abstractmethod
    def left(connection: Any) -> int:
        """Return how many messages wait or are in hand, on whatever list, for later too."""

    @staticmethod
    @abstractmethod
    def given_up(connection: Any) -> int:
        """Return how many messages the queue keeps as failed."""


class Rq(Queue):
    """RQ."""

    backend = "tests.processes.queue_rq.Backend"
    worker = _django(
        "rqworker default --worker-class tests.processes.queue_rq.SoleWorker --verbosity 1"
    )
    workers = ("worker",)

    @staticmethod
    def left(connection: Any) -> int:
        lists = ("rq:queue:default", "rq:queue:default:intermediate")
        return sum(map(connection.llen, lists)) + int(connection.zcard("rq:wip:default"))

    @staticmethod
    def given_up(connection: Any) -> int:
        return int(connection.zcard("rq:failed:default"))


class Celery(Queue):
    """Celery, with Redis as its broker."""

    backend = "tests.processes.queue_celery.Backend"
    worker = [
        sys.executable,
        "-c",
        (
            "import django; django.setup()\nfrom tests.processes.queue_celery import"
            " app\napp.worker_main('worker --concurrency=1 --loglevel=WARNING --without-gossip"
            " --without-mingle'.split())"
        ),
    ]

    @staticmethod
    def left(connection: Any) -> int:
        return int(connection.llen("celery") + connection.hlen("unacked"))

    @staticmethod
    def given_up(connection: Any) -> int:
        return 0  # It keeps none: what it gives up on is missing.


class Tasks(Queue):
    """Django Tasks, in the database of the app."""

    backend = "tests.processes.queue_tasks.Backend"
    worker = _django("db_worker --interval 0.1 --no-startup-delay --verbosity 0")

    @staticmethod
    def left(connection: Any) -> int:
        return DBTaskResult.objects.filter(status="READY").count()

    @staticmethod
    def given_up(connection: Any) -> int:
        return 0  # A failed result is one of several tries.


QUEUES = [Rq, Celery, Tasks]
