"""The tasks of ``test_celery.py``, in an app that keeps results."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from celery import Celery
from django.conf import settings
from django.db import connection, transaction

from idempotency.contrib.celery import SHARD_HEADER, OnceTask
from tests.kit.celery_app import broker_url
from tests.kit.jobs import record, yielding

app = Celery(
    "once",
    broker=broker_url(settings.REDIS_URL),
    backend=broker_url(settings.REDIS_URL),
    set_as_current=False,
)
app.conf.update(worker_hijack_root_logger=False, broker_connection_retry_on_startup=True)


def first_time(mark: str) -> bool:
    """Whether there was no file ``mark`` yet; now there is."""
    if Path(mark).exists():
        return False
    Path(mark).touch()
    return True


@app.task(base=OnceTask, bind=True)
async def asynchronous(self: Any, user: int, mark: str) -> str:
    """Ask for another try the first time, raise the second time; the effect is written before
    that."""
    await sync_to_async(record)(user, f"try {self.request.retries}")
    if first_time(mark):
        raise self.retry(countdown=0)
    if first_time(f"{mark} 2"):
        raise RuntimeError("on purpose")
    return "done"


@app.task(base=OnceTask, autoretry_for=[RuntimeError], default_retry_delay=0)
def tree(user: int, mark: str, depth: int) -> None:
    """Work through a tree, as a function that calls itself does, also through another task; fail at
    its end the first time."""
    record(user, f"node {depth}")
    if depth > 1:
        tree(user, mark, depth - 1)
    elif depth:
        branch(user, mark)
    elif first_time(mark):
        raise RuntimeError("on purpose")


@app.task(base=OnceTask)
def branch(user: int, mark: str) -> None:
    """Call the task that called this one."""
    tree(user, mark, 0)


@app.task(base=OnceTask, bind=True)
def part(self: Any, user: int, mark: str) -> None:
    """Ask for another try the first time."""
    record(user)
    if first_time(mark):
        raise self.retry(countdown=0)


@app.task(base=OnceTask)
def whole(user: int, mark: str) -> None:
    """Call another task directly."""
    part(user, mark)


@app.task(base=OnceTask)
def charge(user: int, mark: str) -> str:
    """Die right after COMMIT the first time."""
    record(user, "charged")
    if first_time(mark):
        transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
    return "ch_1"


@app.task(base=OnceTask)
def book(charge_ids: str | list[str], user: int) -> None:
    """Use what ``charge`` returned."""
    record(user, f"booked {charge_ids}")


@app.task
def refund(*args: Any, user: int) -> None:
    """Undo a charge that failed."""
    record(user, "refunded")


@app.task(base=OnceTask)
def slow(user: int, mark: str) -> None:
    """Hang the first time."""
    record(user)
    if first_time(mark):
        threading.Event().wait()


def lose_database() -> None:
    """End the session of this process."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


@app.task(base=OnceTask, max_retries=1)
def unlucky(user: int, mark: str) -> None:
    """Lose the database the first time, and raise the second time."""
    record(user)
    if first_time(mark):
        lose_database()
    if first_time(f"{mark} 2"):
        raise RuntimeError("on purpose")


@app.task(base=OnceTask, bind=True)
def of_shard(self: Any, user: int, mark: str, headers: dict[str, str]) -> None:
    """Retry the first time, with headers of its own. The effect is the database of the inbox."""
    record(user, str(self.request.get(SHARD_HEADER)))
    if first_time(mark):
        raise self.retry(countdown=0, headers=headers) if headers else RuntimeError("on purpose")


@app.task(base=OnceTask, autoretry_for=[RuntimeError], default_retry_delay=0, max_retries=1)
def hopeless(user: int, mark: str) -> None:
    """Lose the database the first time, and raise each other time."""
    with Path(f"{mark} runs").open("a") as runs:
        runs.write("x")
    if first_time(mark):
        lose_database()
    raise RuntimeError("on purpose")


app.task(slow.run, base=OnceTask, name="slow_by_nature", time_limit=1)
does_nothing = app.task(yielding, base=OnceTask, max_retries=0)
app.task(slow.run, base=OnceTask, name="on_its_own", reject_on_worker_lost=False)
