"""Staged jobs for RQ, through the configuration of django-rq (``RQ_QUEUES``).

Run the workers with ``rqworker --with-scheduler``, because the scheduler runs the retries of failed
jobs.
"""

import logging
import time
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
from redis.sentinel import SentinelConnectionPool
from rq import Queue, Retry, get_current_job

from idempotency._async import in_own_context
from idempotency._hidden import Hidden
from idempotency._job_run import is_uncounted, job_run
from idempotency.backends import BROKER_TIMEOUT_SECONDS, BrokerUnavailable, HandOverResult
from idempotency.exceptions import InProgress, MessageInProgress, Unfinished
from idempotency.jobs import JobArgs, call_job, shard_of, trace_of
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")

#: Short timeouts without retries: the transaction of the enqueuer has a time limit, and the next
#: pass retries.
_BOUNDS = {
    "socket_connect_timeout": 5,
    "socket_timeout": BROKER_TIMEOUT_SECONDS,
    "retry": RedisRetry(NoBackoff(), 0),
}

#: The errors that every job would get: Redis is down, loading, full or read-only, or denies
#: permission.
_TAKES_NOTHING = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.OutOfMemoryError,
    redis_errors.ReadOnlyError,
    redis_errors.NoPermissionError,
    redis_errors.ClusterDownError,
)
#: The beginnings of messages whose errors have no class: the disk is full, or too few replicas are
#: connected.
_WORDS = ("MISCONF", "NOREPLICAS")

#: Practically unlimited.
_MANY = 1_000_000
#: The longest wait of a job between two runs while the database is unavailable.
_LONGEST_WAIT_SECONDS = 300
#: The pause of a worker after such a run, if the retries of the job have no waits.
_PAUSE_SECONDS = 1
#: The name of the number of runs without a database, in the data of a job of RQ.
_OUTAGES = "idempotency_outages"

#: The options of a job that calls an operation: ``@job("default", **RETRIES)``. If the job raises,
#: or its worker dies, it is retried twelve times within 2.3 hours.
RETRIES: dict[str, Any] = {
    "retry": Retry(max=12, interval=[1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 2400, 3600])
}


class RQBackend:
    """Hand staged jobs to RQ with their ids. The worker runs each job through the inbox."""

    runs_functions = True
    uses_database = False
    uses_inbox = True
    retry: Retry = RETRIES["retry"]
    #: For Redis with Sentinel, set a number: a failover loses jobs that the replica does not have.
    follow_up_seconds: float | None = None

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Enqueue ``jobs`` in one MULTI/EXEC: all or none.

        Raises BrokerUnavailable if Redis accepts no job.
        Raises ValueError if Redis answers, but closes the connection when it receives these jobs.
        """
        rq_queue = _queue(queue)
        try:
            # This method is RQ's: enqueue() of django-rq would wait for the COMMIT, which also
            # deletes the staged rows.
            rq_queue.enqueue_many(self._calls(queue, jobs))
        except redis_errors.RedisError as error:
            if isinstance(error, _TAKES_NOTHING) or str(error).rpartition("caused error: ")[
                2
            ].startswith(_WORDS):
                # The client of Sentinel replaces the error of a demoted primary.
                was_demoted = isinstance(error.__context__, redis_errors.ReadOnlyError)
                is_cut = isinstance(error, redis_errors.ConnectionError) and not was_demoted
                if is_cut and _answers(rq_queue):
                    raise ValueError(
                        f"Redis at {_address(rq_queue)} answers, but closed the connection during"
                        " the hand-over. If the job is larger than its client-query-buffer-limit,"
                        f" stage less data or raise the limit. The error: {error}"
                    ) from error
                raise BrokerUnavailable(
                    f"Redis at {_address(rq_queue)} accepts no jobs: {error}"
                ) from error
            raise
        return {}

    def _calls(self, queue: str, jobs: Sequence[StagedJob]) -> list[Any]:
        result_ttl, shard = get_result_ttl(queue), list(filter(None, [shard_of(jobs[0])]))
        return [
            Queue.prepare_data(
                run_once,
                args=[job.job_name, job.job_args, str(job.id), *shard],
                kwargs={"trace": trace} if (trace := trace_of(job)) else None,
                job_id=str(job.id),
                description=f"{job.label} (staged)",
                result_ttl=result_ttl,
                retry=self.retry,
            )
            for job in jobs
        ]


@lru_cache(maxsize=32)
def _queue(name: str) -> Queue:
    if name not in django_rq_settings.QUEUES:
        raise LookupError(
            f"The setting RQ_QUEUES has no queue {name!r}. Add it, run a worker for it (manage.py"
            f" rqworker {name}), and restart the enqueuer. Or stage these jobs on another queue."
        )
    connection = get_connection(name)
    pools = [pool := connection.connection_pool]
    if isinstance(pool, SentinelConnectionPool):
        pools += [each.connection_pool for each in pool.sentinel_manager.sentinels]
    for each in pools:
        each.connection_kwargs.update(_BOUNDS)
    return get_queue(name, connection=connection)


def _answers(queue: Queue) -> bool:
    """Return whether Redis answers on a new connection."""
    try:
        return bool(queue.connection.ping())
    except redis_errors.RedisError:
        return False


def _address(queue: Queue) -> str:
    """Return the address of a queue's Redis, without user and password."""
    pool = queue.connection.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        return f"the Sentinel service {pool.service_name!r}"
    place = {"host": "localhost", "port": 6379, "db": 0} | pool.connection_kwargs
    return f"{place.get('path') or '{host}:{port}'.format(**place)}, database {place['db'] or 0}"


class _AskedToComeBack(Exception):
    """Raised to roll back the run of a job that returned a Retry."""


@in_own_context
def run_once(
    job_name: str,
    job_args: JobArgs,
    job_id: str,
    using: str | None = None,
    trace: list[Any] | None = None,
) -> Any:
    """Run a job through the inbox and return its result; a second hand-over does nothing.

    If the job raises or returns a Retry, it is rolled back, and RQ retries it. While another
    delivery runs, while the database is unavailable, or while an operation is not finished, RQ
    retries the job without counting a try.
    """
    given = Hidden(job_args)
    del job_args
    try:
        with job_run(job_name, job_id, using, trace) as first:
            result = call_job(job_name, given.value, using=using) if first else None
            if isinstance(result, Retry):
                raise _AskedToComeBack(result)
    except _AskedToComeBack as asked:
        return asked.args[0]
    except MessageInProgress:
        return _uncounted(outage=False)
    except Exception as error:
        if not is_uncounted(error, using):
            raise
        unfinished = isinstance(error, InProgress | Unfinished)
        reason = "an operation is not finished" if unfinished else "the database is unavailable"
        logger.warning(
            "%s for the job %s (%s), which is retried: %s", reason, job_id, job_name, error
        )
        return _uncounted(outage=True)
    return result


def _uncounted(*, outage: bool) -> Retry:
    """Return a retry that does not count as a try of the job. It is immediate; after an outage it
    has the waits of the job's own retries. If the job has no such waits, RQ may have no scheduler,
    so the worker pauses instead."""
    job, wait = get_current_job(), 0
    if job is not None:
        job.number_of_retries = (job.number_of_retries or 0) - 1  # RQ adds one, and saves the job.
    if outage:
        if job is not None and job.retry_intervals:
            before = job.meta[_OUTAGES] = job.meta.get(_OUTAGES, -1) + 1
            wait = min(
                job.retry_intervals[min(before, len(job.retry_intervals) - 1)],
                _LONGEST_WAIT_SECONDS,
            )
        if not wait:
            time.sleep(_PAUSE_SECONDS)
    return Retry(max=_MANY, interval=wait)
