"""Jobs and backends that the tests of the enqueuer name by their dotted path."""

import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import connection

from idempotency.backends import BrokerUnavailable, HandOverResult
from idempotency.contrib.rq import RQBackend
from idempotency.models import StagedJob
from rides_demo.models import AuditRecord


def record(user: int, label: str = "ran") -> None:
    """Leave a row, so that runs can be counted: nothing keeps a second one out."""
    AuditRecord.objects.create(action=label, data={}, origin_ip="127.0.0.1", resource_type="job", resource_id=0, user_id=user)


def anything(**args: Any) -> None:
    """Do nothing: for tests in which no worker runs."""


def poison(**args: Any) -> None:
    """Do nothing: the backends of this module refuse it by its name."""


def record_and_fail(user: int) -> None:
    """Leave a row in a transaction that does not commit."""
    record(user)
    raise RuntimeError("on purpose")


def record_after_a_failure(user: int, mark: str) -> None:
    """Raise the first time, when there is no file ``mark`` yet."""
    record(user)
    if not Path(mark).exists():
        Path(mark).touch()
        raise RuntimeError("on purpose")


async def record_after_a_failure_in_a_coroutine(user: int, mark: str) -> None:
    """Raise the first time, as ``record_after_a_failure`` does."""
    await sync_to_async(record_after_a_failure)(user, mark)


def yielding(user: int) -> Iterator[None]:
    """Do nothing: a call of a generator function runs no line of it."""
    yield record(user)


async def yielding_in_a_coroutine(user: int) -> AsyncIterator[None]:
    """Do nothing, as ``yielding`` does."""
    yield record(user)


def record_after_a_kill(user: int, mark: str) -> None:
    """Kill the process that runs it the first time, when there is no file ``mark`` yet."""
    record(user)
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def record_after_a_lost_connection(user: int, mark: str) -> None:
    """Lose the connection to the database the first time, as when it restarts, when there is no file ``mark`` yet."""
    record(user)
    if not Path(mark).exists():
        Path(mark).touch()
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


def take(job: StagedJob) -> None:
    """Take a staged job, as a queue of the project's own would, unless it is named ``poison``."""
    if job.job_name.endswith("poison"):
        raise ValueError("it cannot be serialised")
    record(*job.job_args)


def nobody_takes(job: StagedJob) -> None:
    """Take no job, as a queue that is down."""
    raise BrokerUnavailable("nobody is there")


async def take_in_a_coroutine(job: StagedJob) -> None:
    """Take a staged job as ``take`` does."""
    await sync_to_async(take)(job)


def take_yielding(job: StagedJob) -> Iterator[None]:
    """Take nothing: a call of a generator function runs no line of it."""
    yield take(job)


class CoroutineBackend:
    """A queue of the project's own that takes jobs in a coroutine."""

    async def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Take each job, as ``take`` does."""
        for job in jobs:
            await take_in_a_coroutine(job)
        return {}


class ForgetfulBackend:
    """A queue of the project's own that does not say which jobs it refused."""

    said: Any = None

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Any:
        """Take each job, as ``take`` does."""
        for job in jobs:
            take(job)
        return self.said


class MistakenBackend(ForgetfulBackend):
    """A queue of the project's own that names what it refused by something else than ids."""

    said: ClassVar = {"017f22e2": ValueError("refused")}


class UnbuiltBackend:
    """A broker whose backend connects when it is built, and cannot."""

    def __init__(self) -> None:
        raise ConnectionRefusedError("nobody listens there")


class PickyBackend(RQBackend):
    """A broker that takes no batch in which a job is named ``poison``."""

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Refuse the whole batch, as a serializer does."""
        if any(job.job_name.endswith("poison") for job in jobs):
            raise ValueError("it cannot be serialised\0\udc80")  # No database takes either.
        return super().hand_over(queue, jobs)


class SlowBackend(RQBackend):
    """A broker that takes its time, longer than the database lets a transaction idle."""

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Hand over, and answer late."""
        results = super().hand_over(queue, jobs)
        threading.Event().wait(1.5)
        return results


class StallingBackend(RQBackend):
    """A broker that takes the jobs and then never lets the enqueuer go on."""

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Hand over, and wait to be killed."""
        super().hand_over(queue, jobs)
        signal.pause()
        return {}
