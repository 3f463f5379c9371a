"""The RQ worker of the demo: it requeues the jobs of a killed worker within seconds.

Standard RQ waits for the end of a lease of 90 seconds, because another worker may still run the
job. It then requeues the job at its next maintenance run; these runs are ten minutes apart. The
supervisor runs only one worker, and starts it after the previous worker has ended. A job that runs
twice takes effect once: its receipt is unique.
"""

import math
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq import Worker
from rq.registry import clean_registries
from rq.scheduler import RQScheduler
from rq.utils import now

MAINTENANCE_SECONDS = 2
#: RQ waits for a job for this time minus 15 seconds, then checks whether maintenance is due.
WORKER_TTL_SECONDS = MAINTENANCE_SECONDS + 15


class OnlyScheduler(RQScheduler):
    """The scheduler of delayed retries."""

    def work(self) -> None:
        """Run until stopped.

        If Redis fails, log one line and end; the worker starts the scheduler again.
        """
        try:
            super().work()
        except (RedisConnectionError, RedisTimeoutError) as error:
            self.log.warning("the scheduler cannot reach Redis: %s", error)


class OnlyWorker(Worker):
    """The only worker of its queues."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(
            *args,
            **options
            | {
                "maintenance_interval": MAINTENANCE_SECONDS,
                "worker_ttl": WORKER_TTL_SECONDS,
            },
        )

    def clean_registries(self) -> None:
        """Requeue each job that is marked as started.

        This worker is the only one, and it is between two jobs, so no job is running.
        """
        for queue in self.queues:
            # These jobs left the queue, but the worker died, or lost the reply of Redis, before it
            # marked them as started.
            while self.connection.lmove(queue.intermediate_queue.key, queue.key, "RIGHT", "LEFT"):
                pass
            # These jobs were started and did not end: retry them now, before their lease expires.
            queue.started_job_registry.cleanup(timestamp=math.inf)
            clean_registries(queue)
        self.last_cleaned_at = now()

    def _start_scheduler(self, *args: Any, **options: Any) -> None:
        """Start the scheduler with a fixed name, so that it takes over the lock of a killed
        scheduler."""
        self.scheduler = OnlyScheduler(
            self.queues, connection=self.connection, logging_level=self.log.level, name="rides-demo"
        )
        self.scheduler.acquire_locks(auto_start=True)
