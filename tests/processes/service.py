"""What the processes of ``test_processes_killed.py`` run: a view and a job. Each run leaves a
row."""

import threading
from collections.abc import Mapping, Sequence
from uuid import UUID

from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path

from idempotency.backends import HandOverResult
from idempotency.decorators import idempotent
from idempotency.exceptions import KeyStuck
from idempotency.jobs import stage_job
from idempotency.models import StagedJob
from idempotency.phases import atomic_phase
from tests.models import Entry

JOB = "tests.processes.service.leave_entry"
NEXT_JOB = "tests.processes.service.leave_next"
#: Every so many requests is one that only a person can settle.
HOPELESS = 50


def take_time() -> None:
    """Be at work for a while, so that a kill finds something to interrupt."""
    threading.Event().wait(0.06)


def leave_entry(name: str) -> None:
    """Leave a row, so that runs can be counted: nothing keeps a second one out."""
    Entry.objects.create(name=name)


def leave_next(group: int, number: int) -> None:
    """Leave a row with the number of the jobs of the group that took effect before."""
    before = Entry.objects.filter(name__startswith=f"group {group}:").count()
    leave_entry(f"group {group}: {number} after {before}")


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


class TakesTime:
    """Put before a backend: it takes some time over a batch, before and after the broker has it."""

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Hand over, and answer late."""
        take_time()
        results: Mapping[UUID, HandOverResult] = super().hand_over(queue, jobs)  # type: ignore[misc]
        take_time()
        return results
