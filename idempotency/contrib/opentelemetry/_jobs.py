"""The spans of the enqueuer and of jobs, and the trace that a staged job stores."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db.models.signals import pre_save

from idempotency import _job_run
from idempotency.contrib.opentelemetry._spans import (
    Span,
    harmless,
    in_trace,
    same_trace,
    traceparent,
)
from idempotency.models import StagedJob

_Function = Callable[..., Any]

_original = _job_run.job_run
#: The modules that have ``job_run``, if they are in use.
_WORKERS = (
    "idempotency._job_run",
    *map("idempotency.contrib.{}".format, ("rq", "celery", "tasks", "_messages")),
)


def enqueue(original: _Function) -> _Function:
    def hand_over(batch: Any, state: Any) -> None:
        links = dict.fromkeys(job.traceparent for job in batch.jobs)
        with Span("idempotency.enqueue", {"jobs": len(batch.jobs)}, links=links):
            original(batch, state)

    return hand_over


def hand_over_one(original: _Function) -> _Function:
    """Hand a job over, at its first hand-over in the trace of the job instead of the batch: an
    instrumentor of the queue sends the context of the code that hands a job over."""

    def hand_over(self: Any, queue: str, job: StagedJob) -> None:
        with in_trace(None if job.hand_overs else job.traceparent):
            original(self, queue, job)

    return hand_over


def _job(original: _Function) -> _Function:
    @contextmanager
    def job_run(
        name: str, job_id: str, using: str | None, trace: list[Any] | None = None
    ) -> Iterator[bool]:
        attributes = {"job": name, "job.id": job_id}
        with (
            Span("idempotency.job", attributes, **(_place_of_job(trace) or {})),
            original(name, job_id, using, trace) as first,
        ):
            yield first

    return job_run


@harmless
def _place_of_job(trace: list[Any] | None) -> dict[str, Any]:
    """Return the parent or the links of the span of a job. Its first attempt is a child of the span
    that has staged the job, or of a span of the queue in the same trace. A later attempt only links
    to the span that has staged the job."""
    staged, hand_overs = trace or (None, 0)
    if hand_overs or _retries():
        return {"links": [staged]}
    return {} if staged is None or same_trace(staged) else {"parent": staged}


def _retries() -> int:
    """Return the number of earlier attempts at the job that a worker of RQ or Celery runs."""
    if (rq := sys.modules.get("rq")) is not None and (job := rq.get_current_job()) is not None:
        return int(job.number_of_retries or 0)
    if (celery := sys.modules.get("celery")) is not None and (task := celery.current_task):
        redelivered = (task.request.delivery_info or {}).get("redelivered")
        return int(task.request.retries or bool(redelivered))
    return 0


def _fill(sender: Any, instance: StagedJob, **options: Any) -> None:
    if instance._state.adding:
        instance.traceparent = instance.traceparent or traceparent()


def install() -> None:
    """Trace jobs, and fill the column of staged jobs."""
    _set_job_run(_job(_original))
    pre_save.connect(_fill, sender=StagedJob, dispatch_uid=__name__)


def remove() -> None:
    """Undo ``install()``."""
    _set_job_run(_original)
    pre_save.disconnect(sender=StagedJob, dispatch_uid=__name__)


def _set_job_run(function: _Function) -> None:
    for module in _WORKERS:
        if module in sys.modules:
            vars(sys.modules[module])["job_run"] = function
