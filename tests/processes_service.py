"""What the processes of ``test_processes_killed.py`` run: a view, a job, a broker and a worker. Each run leaves a row."""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path
from rq import Retry, SimpleWorker
from rq.utils import now

from idempotency.contrib.rq import RQBackend
from idempotency.decorators import idempotent
from idempotency.exceptions import KeyStuck
from idempotency.jobs import stage_job
from idempotency.models import StagedJob
from idempotency.phases import atomic_phase
from tests.models import Entry

JOB = "tests.processes_service.leave_entry"
#: Every so many requests is one that only a person can settle.
HOPELESS = 50


def take_time() -> None:
    """Be at work for a while, so that a kill finds something to interrupt."""
    threading.Event().wait(0.06)


def leave_entry(name: str) -> None:
    """Leave a row, so that runs can be counted: nothing keeps a second one out."""
    Entry.objects.create(name=name)


@idempotent(recovery_points=["half_done"])
def two_phases(request: HttpRequest, number: int) -> HttpResponseBase:
    """Leave a row in each phase, and stage a job that leaves the third."""
    key = request.idempotency_key
    for recovery_point in key.phases():
        take_time()
        if recovery_point == "started":
            with atomic_phase(key) as phase:
                leave_entry(f"first phase of {number}")
                phase.set_recovery_point("half_done")
        elif number % HOPELESS == 0:
            raise KeyStuck("Nobody knows how to go on.")
        else:
            with atomic_phase(key) as phase:
                leave_entry(f"second phase of {number}")
                stage_job(JOB, {"name": f"job of {number}"})
                phase.set_response(JsonResponse({"number": number}, status=201))
    return key.response()


urlpatterns = [path("two-phases/<int:number>", two_phases)]


class AtOnceAgain(RQBackend):
    """Take some time over a batch; jobs are tried again without a wait, for which a scheduler would be needed."""

    retry = Retry(max=100)

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, Exception]:
        """Hand over, and answer late."""
        take_time()
        refusals = super().hand_over(queue, jobs)
        take_time()
        return refusals


class SoleWorker(SimpleWorker):
    """The only worker, which does not fork: so it takes up at once what the one before it had in hand when it was killed.

    RQ does this after a lease of some minutes, because another worker may be at it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        # The TTL less 15 seconds is how long it waits for a job before it looks whether maintenance is due.
        super().__init__(*args, **options | {"maintenance_interval": 1, "worker_ttl": 16})

    def clean_registries(self) -> None:
        """Queue again what was taken and not ended."""
        for queue in self.queues:
            while self.connection.lmove(queue.intermediate_queue.key, queue.key, "RIGHT", "LEFT"):
                pass
            queue.started_job_registry.cleanup(timestamp=math.inf)
        self.last_cleaned_at = now()
