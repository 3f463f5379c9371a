"""RQ in ``test_processes_killed.py``: its backend and its worker."""

import math
from typing import Any

from rq import Retry, SimpleWorker
from rq.utils import now

from idempotency.contrib.rq import RQBackend
from tests.processes.service import TakesTime


class Backend(TakesTime, RQBackend):
    """Jobs are tried again without a wait, for which a scheduler would be needed."""

    retry = Retry(max=100)


class SoleWorker(SimpleWorker):
    """The only worker, which does not fork: so it takes up at once what the one before it had in
    hand when it was killed.

    RQ does this after a lease of some minutes, because another worker may be at it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        # The TTL less 15 seconds is how long it waits for a job before it looks whether maintenance
        # is due.
        super().__init__(*args, **options | {"maintenance_interval": 1, "worker_ttl": 16})

    def clean_registries(self) -> None:
        """Queue again what was taken and not ended."""
        for queue in self.queues:
            while self.connection.lmove(queue.intermediate_queue.key, queue.key, "RIGHT", "LEFT"):
                pass
            queue.started_job_registry.cleanup(timestamp=math.inf)
        self.last_cleaned_at = now()
