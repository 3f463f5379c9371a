"""The queues of the suite in ``test_backends.py``: RQ, Celery, Django Tasks, each with real worker
processes."""

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import redis
from django.conf import settings
from django_tasks_db.models import DBTaskResult

from idempotency import _hand_over, backends, enqueuer
from idempotency.contrib import celery_delivery
from idempotency.contrib import rq as rq_backend
from idempotency.models import StagedJob
from tests.kit.celery_app import app, broker_url
from tests.kit.commands import start
from tests.kit.database import held_transaction, lock_table
from tests.kit.waiting import eventually

#: The duration of a pass over a line that is held back. A pass over an open line takes as long as
#: Redis syncs its disk.
IMPATIENCE_SECONDS = 2

_WORKER = """
import django; django.setup()
from idempotency import inbox; inbox.WAIT_SECONDS = 1
"""


class SlowLine:
    """A TCP proxy of the Redis of the tests, which can hold back the replies of Redis."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.listener.getsockname()[1]}/0"
        self.open = threading.Event()
        self.open.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        target = urlsplit(settings.REDIS_URL)
        if target.scheme == "unix":
            server = socket.socket(socket.AF_UNIX)
            server.connect(unquote(target.path))
        else:
            server = socket.create_connection((target.hostname, target.port or 6379))
        with client, server, suppress(OSError):
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    if not (received := ready.recv(65536)):
                        return
                    if ready is server:
                        assert self.open.wait(60)
                    (client if ready is server else server).sendall(received)


class Broker:
    """One kind of queue, on the database and the Redis of the test."""

    backend: str
    worker: str
    #: The values of a staged job that the backend refuses, and a part of the error message.
    poison: tuple[dict[str, Any], str]

    def __init__(self, redis: Any) -> None:
        self.redis = redis

    #: Whether a job remains staged until it took effect.
    follows_up = True

    def waiting(self) -> int:
        """Return the number of messages that a worker could take now."""
        raise NotImplementedError

    def lose(self) -> None:
        """Lose the messages, as if a worker died while it took them."""
        raise NotImplementedError

    def idle(self) -> bool:
        """Return whether no message waits, and no worker processes one."""
        raise NotImplementedError

    @contextmanager
    def through(self, url: str) -> Iterator[None]:
        """Let the enqueuer connect to Redis only at ``url``, with timeouts of
        ``IMPATIENCE_SECONDS``."""
        raise NotImplementedError

    @contextmanager
    def working(self) -> Iterator[None]:
        """Keep a worker running in the block. A worker that dies is replaced, as by a process
        manager."""
        ended = threading.Event()

        def supervise() -> None:
            while not ended.is_set():
                with start(python=_WORKER + self.worker) as process:
                    while process.poll() is None and not ended.wait(0.05):
                        pass
                    process.terminate()
                    process.communicate(timeout=60)

        supervisor = threading.Thread(target=supervise)
        supervisor.start()
        try:
            yield
        finally:
            ended.set()
            supervisor.join()

    def work(self, until: Callable[[], Any]) -> None:
        """Run a worker and the enqueuer until ``until`` is true and no work is left, at most two
        minutes."""

        def done() -> bool:
            enqueuer.enqueue_once()
            return until() and self.idle() and not StagedJob.objects.exists()

        with self.working():
            eventually(done, 120)


class Rq(Broker):
    """RQ."""

    backend = "idempotency.contrib.rq.RQBackend"
    worker = (
        "from django.core.management import call_command; call_command('rqworker', 'default',"
        " '--with-scheduler')"
    )
    follows_up = False
    poison = ({"queue": "nowhere"}, "RQ_QUEUES has no queue 'nowhere'")

    def waiting(self) -> int:
        return self.redis.llen("rq:queue:default")

    def idle(self) -> bool:
        return not self.waiting() and not self.redis.zcard("rq:wip:default")

    @contextmanager
    def through(self, url: str) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(settings.RQ_QUEUES, "default", {"URL": url})
            for name in ("socket_timeout", "socket_connect_timeout"):
                patch.setitem(rq_backend._BOUNDS, name, IMPATIENCE_SECONDS)
            rq_backend._queue.cache_clear()
            yield
        rq_backend._queue.cache_clear()


class Celery(Broker):
    """Celery, with Redis as its broker."""

    backend = "idempotency.contrib.celery.CeleryBackend"
    worker = (
        "from tests.kit.celery_app import app\napp.worker_main(['worker', '--pool=prefork',"
        " '--concurrency=1', '--loglevel=CRITICAL', '--without-gossip', '--without-mingle',"
        " '--without-heartbeat'])"
    )
    poison = ({"job_name": "shop.jobs.unknown"}, "No Celery task has the name 'shop.jobs.unknown'")

    def waiting(self) -> int:
        return self.redis.llen("celery")

    def lose(self) -> None:
        self.redis.delete("celery")

    def idle(self) -> bool:
        return not self.waiting() and not self.redis.hlen("unacked")

    @contextmanager
    def through(self, url: str) -> Iterator[None]:
        assert app.conf["broker_url"]  # Celery reads its configuration at the first use.
        _hand_over._built.clear()
        with pytest.MonkeyPatch.context() as patch:
            # Without this setting, writes go to ``broker_url``, which another test may change.
            patch.setitem(app.conf.changes, "broker_write_url", broker_url(url))
            for name in ("socket_timeout", "socket_connect_timeout"):
                patch.setitem(celery_delivery.BOUNDS["redis"], name, IMPATIENCE_SECONDS)
            yield
        _hand_over._built.clear()


class Tasks(Broker):
    """Django Tasks, in the database of the app."""

    backend = "idempotency.contrib.tasks.TasksBackend"
    worker = (
        "from django.core.management import call_command\n"
        "call_command('db_worker', '--interval', '0.1', '--no-startup-delay', verbosity=0)"
    )
    poison = ({"queue": "nowhere"}, "Queue 'nowhere' is not valid for backend")

    def waiting(self) -> int:
        return DBTaskResult.objects.filter(status="READY").count()

    def lose(self) -> None:
        DBTaskResult.objects.update(status="RUNNING")

    def idle(self) -> bool:
        return not self.waiting()

    @contextmanager
    def through(self, url: str) -> Iterator[None]:
        """Only set the timeout: these tasks do not use Redis. ``tasks_table_locked`` blocks their
        table."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backends, "BROKER_TIMEOUT_SECONDS", IMPATIENCE_SECONDS)
            yield


@contextmanager
def tasks_table_locked() -> Iterator[None]:
    """Lock the table of Django Tasks against all other sessions during the block."""
    with held_transaction(lambda: lock_table(DBTaskResult._meta.db_table)):
        yield


KINDS = [Rq, Celery, Tasks]


def queued(broker: "redis.Redis", queue: str = "default") -> list[str]:
    """Return the ids of the jobs in a queue of RQ."""
    return [job.decode() for job in broker.lrange(f"rq:queue:{queue}", 0, -1)]
