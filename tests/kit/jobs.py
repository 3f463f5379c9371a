"""Jobs and backends that the tests of the enqueuer refer to by dotted path."""

import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import connection, transaction
from rq import Retry

from idempotency.backends import BrokerUnavailable, HandOverResult
from idempotency.contrib.rq import RQBackend
from idempotency.models import StagedJob
from rides_demo.models import AuditRecord


def record(user: int, label: str = "ran") -> None:
    """Insert a row, so that tests can count the runs; no constraint prevents a second row."""
    AuditRecord.objects.create(
        action=label,
        data={},
        origin_ip="127.0.0.1",
        resource_type="job",
        resource_id=0,
        user_id=user,
    )


def anything(**args: Any) -> None:
    """Do nothing: for tests in which no worker runs."""


def poison(**args: Any) -> None:
    """Do nothing: backends of this module refuse this job by its name."""


def record_and_fail(user: int) -> None:
    """Insert a row, then raise, so that the transaction does not commit."""
    record(user)
    raise RuntimeError("on purpose")


def record_after_a_retry(user: int, mark: str) -> Retry | None:
    """Insert a row. In the first run, in which the file ``mark`` does not exist yet, ask RQ for one
    further run instead."""
    record(user)
    if Path(mark).exists():
        return None
    Path(mark).touch()
    return Retry(max=1)


def record_after_a_failure(user: int, mark: str) -> None:
    """Insert a row. Raise in the first run, in which the file ``mark`` does not exist yet."""
    record(user)
    if not Path(mark).exists():
        Path(mark).touch()
        raise RuntimeError("on purpose")


async def record_after_a_failure_in_a_coroutine(user: int, mark: str) -> None:
    """Raise in the first run, like ``record_after_a_failure``."""
    await sync_to_async(record_after_a_failure)(user, mark)


def yielding(user: int) -> Iterator[None]:
    """Do nothing: a call of a generator function does not run its body."""
    yield record(user)


async def yielding_in_a_coroutine(user: int) -> AsyncIterator[None]:
    """Do nothing, like ``yielding``."""
    yield record(user)


def record_after_a_kill(user: int, mark: str) -> None:
    """Insert a row. Kill this process in the first run, in which the file ``mark`` does not exist
    yet."""
    record(user)
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def record_after_a_lost_connection(user: int, mark: str) -> None:
    """Insert a row. Lose the database connection in the first run, in which the file ``mark`` does
    not exist yet."""
    record(user)
    if not Path(mark).exists():
        Path(mark).touch()
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


def record_with_hooks(user: int, mark: str) -> None:
    """Insert a row. After COMMIT, one hook raises, and the next one creates the file ``mark``."""
    record(user)
    transaction.on_commit(fail_in_hook)
    transaction.on_commit(Path(mark).touch)


def fail_in_hook() -> None:
    raise OSError("the mail server is away")


def take(job: StagedJob) -> None:
    """Accept a staged job, like a project's own queue; raise ValueError if the job is named
    ``poison``."""
    if job.job_name.endswith("poison"):
        raise ValueError("it cannot be serialised")
    record(*job.job_args)


def nobody_takes(job: StagedJob) -> None:
    """Accept no job, like a queue that is down."""
    raise BrokerUnavailable("nobody is there")


async def take_in_a_coroutine(job: StagedJob) -> None:
    """Accept a staged job, like ``take``."""
    await sync_to_async(take)(job)


def take_yielding(job: StagedJob) -> Iterator[None]:
    """Accept nothing: a call of a generator function does not run its body."""
    yield take(job)


class CoroutineBackend:
    """A project's own queue that accepts jobs in a coroutine."""

    async def hand_over(
        self, queue: str, jobs: Sequence[StagedJob]
    ) -> Mapping[UUID, HandOverResult]:
        """Take each job, as ``take`` does."""
        for job in jobs:
            await take_in_a_coroutine(job)
        return {}


class ForgetfulBackend:
    """A project's own queue that does not return which jobs it refused."""

    said: Any = None

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Any:
        """Take each job, as ``take`` does."""
        for job in jobs:
            take(job)
        return self.said


class MistakenBackend(ForgetfulBackend):
    """A project's own queue that returns refused jobs under keys that are not their ids."""

    said: ClassVar = {"017f22e2": ValueError("refused")}


class UnbuiltBackend:
    """A backend whose constructor connects to its broker, and fails."""

    def __init__(self) -> None:
        raise ConnectionRefusedError("nobody listens there")


class BackendOfATable:
    """A backend whose constructor reads a table that no migration has created yet."""

    def __init__(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT * FROM brokers_of_tomorrow")


class PickyBackend(RQBackend):
    """A backend that refuses each batch in which a job is named ``poison``."""

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Refuse the whole batch, like a serializer."""
        if any(job.job_name.endswith("poison") for job in jobs):
            # No database stores either character.
            raise ValueError("it cannot be serialised\0\udc80")
        return super().hand_over(queue, jobs)


class SlowBackend(RQBackend):
    """A backend that takes longer than the idle limit of transactions in the database."""

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Hand over, and return late."""
        results = super().hand_over(queue, jobs)
        threading.Event().wait(1.5)
        return results


class StallingBackend(RQBackend):
    """A backend that hands over the jobs and never returns."""

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Hand over, and wait until the process is killed."""
        super().hand_over(queue, jobs)
        signal.pause()
        return {}
