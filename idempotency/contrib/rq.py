"""Staged jobs to RQ, through django-rq's configuration (``RQ_QUEUES``).

Run the workers with ``rqworker --with-scheduler``: a job that failed waits before its next try, and the scheduler wakes it.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from uuid import UUID

from django_rq import settings as django_rq_settings
from django_rq.connection_utils import get_connection
from django_rq.queues import get_queue, get_result_ttl
from redis import exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.retry import Retry as RedisRetry
from rq import Queue, Retry

from idempotency.backends import BROKER_TIMEOUT_SECONDS, BrokerUnavailable
from idempotency.exceptions import MessageInProgress
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.jobs import JobArgs, call_job, shard_of
from idempotency.models import StagedJob

#: One hand-over stays far below the time the database grants to the enqueuer's transaction; the next pass tries again.
_BOUNDS = {"socket_connect_timeout": 5, "socket_timeout": BROKER_TIMEOUT_SECONDS, "retry": RedisRetry(NoBackoff(), 0)}

#: What no other job would fare better with: down, loading, full, read-only, or without permission.
_TAKES_NOTHING = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.OutOfMemoryError,
    redis_errors.ReadOnlyError,
    redis_errors.NoPermissionError,
    redis_errors.ClusterDownError,
)
#: What has no class there: the disk is full, or too few replicas follow.
_WORDS = ("MISCONF", "NOREPLICAS")

#: A delivery that met another one has waited for it already, so it comes back at once, and as often as it takes.
_COME_BACK = Retry(max=1_000_000)


class RQBackend:
    """Hand staged jobs to RQ: their ids become the job ids, and the worker runs each through the inbox."""

    runs_functions = True
    #: When a job raises, or its worker dies: a dozen more tries, within 2.3 hours.
    retry = Retry(max=12, interval=[1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 2400, 3600])

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, Exception]:
        """Enqueue ``jobs`` in one MULTI/EXEC: all or none. Raises BrokerUnavailable when Redis takes nothing at the moment."""
        rq_queue, result_ttl = _queue(queue), get_result_ttl(queue)
        shard = [alias] if (alias := shard_of(jobs[0])) else []
        calls = [
            Queue.prepare_data(
                run_once,
                args=[job.job_name, job.job_args, str(job.pk), *shard],
                job_id=str(job.pk),
                description=f"{job.job_name} (staged)",
                result_ttl=result_ttl,
                retry=self.retry,
            )
            for job in jobs
        ]
        try:
            # RQ's own method: django-rq's enqueue() would wait for COMMIT, which comes after the staged rows were deleted.
            rq_queue.enqueue_many(calls)
        except redis_errors.RedisError as error:
            if isinstance(error, _TAKES_NOTHING) or str(error).rpartition("caused error: ")[2].startswith(_WORDS):
                raise BrokerUnavailable(f"Redis takes no jobs at the moment: {error}") from error
            raise
        return {}


@lru_cache(maxsize=32)
def _queue(name: str) -> Queue:
    if name not in django_rq_settings.QUEUES:
        raise LookupError(f"RQ_QUEUES has no queue {name!r}: add it there, or stage such jobs on another queue.")
    connection = get_connection(name)
    connection.connection_pool.connection_kwargs.update(_BOUNDS)
    return get_queue(name, connection=connection)


class _AskedToComeBack(Exception):
    """Rolls back the run of a job that returned a Retry: it has not taken effect yet."""


def run_once(job_name: str, job_args: JobArgs, job_id: str, using: str | None = None) -> Any:
    """Run a job in the worker through the inbox: a second hand-over of it does nothing; return what it returns.

    While the first one is still at work, RQ is told to bring this one back. When the job raises, or returns a Retry, nothing of
    it is kept, and RQ tries it again.
    """
    try:
        with process_once(STAGED_JOBS, job_id, using=using) as first:
            result = call_job(job_name, job_args) if first else None
            if isinstance(result, Retry):
                raise _AskedToComeBack(result)
    except _AskedToComeBack as asked:
        return asked.args[0]
    except MessageInProgress:
        return _COME_BACK
    return result
