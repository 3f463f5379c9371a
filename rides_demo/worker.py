"""The demo's RQ worker: takes up within seconds what a worker that was killed had in hand.

RQ does so as well, when a lease of 90 seconds has run out and at its next maintenance, ten minutes apart, because another
worker may still be at it. The supervisor runs one worker, and starts it when nothing is left of the one before. Should a job
run twice all the same, the inbox lets it take effect once.
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
#: RQ waits for a job for 15 seconds less than this, then looks whether maintenance is due.
WORKER_TTL_SECONDS = MAINTENANCE_SECONDS + 15


class OnlyScheduler(RQScheduler):
    """Wakes the jobs that wait for their next try."""

    def work(self) -> None:
        """Run until stopped; when Redis has gone, end in a word: the worker starts it again."""
        try:
            super().work()
        except (RedisConnectionError, RedisTimeoutError) as error:
            self.log.warning("the scheduler has lost Redis: %s", error)


class OnlyWorker(Worker):
    """The only worker of its queues."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"maintenance_interval": MAINTENANCE_SECONDS, "worker_ttl": WORKER_TTL_SECONDS})

    def clean_registries(self) -> None:
        """Queue again what is marked as in hand: this runs between two jobs of the only worker, so nothing is."""
        for queue in self.queues:
            # Taken from the queue, and the worker died, or the answer of Redis was lost, before that was written down.
            while self.connection.lmove(queue.intermediate_queue.key, queue.key, "RIGHT", "LEFT"):
                pass
            # Begun and not ended: to be tried again at once, whatever is left of its lease.
            queue.started_job_registry.cleanup(timestamp=math.inf)
            clean_registries(queue)
        self.last_cleaned_at = now()

    def _start_scheduler(self, *args: Any, **options: Any) -> None:
        """Start it under a fixed name: so it owns the lock that one that was killed has left for a minute."""
        self.scheduler = OnlyScheduler(self.queues, connection=self.connection, logging_level=self.log.level, name="rides-demo")
        self.scheduler.acquire_locks(auto_start=True)
