"""The hand-over of the jobs of one queue to its backend: whatever the backend does, each job has at most one result.

A backend is code of the project. It may raise any error, return a wrong value or take too long. The transaction of the enqueuer
must survive this, because it also holds the jobs of other queues. SystemExit during a hand-over is not caught, because a signal
handler of the caller may have raised it: the batch is then rolled back, as after a crash. During an import it is taken for an
error of the module.
"""

import logging
import time
from asyncio import CancelledError
from collections.abc import Mapping, Sequence

from django.db import connections

from idempotency._async import FAILURES, awaited
from idempotency._boundary import boundary
from idempotency._text import error_text
from idempotency.backends import Backend, BrokerUnavailable, NotOffered, Results, backend_of, hand_over_savepoint
from idempotency.jobs import not_allowed
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")


def hand_over(queue: str, jobs: Sequence[StagedJob], deadline: float) -> Results:
    """Hand over the jobs of one queue: all at once, or one by one if the backend raised an error for all of them. Errors are
    returned as results, because an exception would roll back the hand-overs of other queues. Jobs that were not offered
    before the deadline have no result."""
    with boundary():
        return _hand_over(queue, jobs, deadline)


def _hand_over(queue: str, jobs: Sequence[StagedJob], deadline: float) -> Results:
    try:
        if (backend := backend_of(queue, using=jobs[0]._state.db)) is None:
            raise LookupError(f"IDEMPOTENCY['ENQUEUERS'] names no backend for the queue {queue!r}, and none for '*'.")
    except FAILURES as error:
        return dict.fromkeys((job.pk for job in jobs), error)
    results: Results = {**not_allowed(jobs)} if getattr(backend, "runs_functions", False) else {}
    if not (jobs := [job for job in jobs if job.pk not in results]):
        return results
    try:
        return results | _offer(backend, queue, jobs)
    except (Exception, CancelledError) as error:
        if _transaction_is_broken(jobs):
            raise
        logger.info(
            "queue %r refused a batch of %d jobs, which are handed over one by one: %s", queue, len(jobs), error_text(error)
        )
    for job in jobs:
        try:
            results |= _offer(backend, queue, [job])
        except (Exception, CancelledError) as error:
            if _transaction_is_broken(jobs):
                raise
            results[job.pk] = error
        if isinstance(results[job.pk], BrokerUnavailable) or time.monotonic() > deadline:
            break
    return results


def _transaction_is_broken(jobs: Sequence[StagedJob]) -> bool:
    """Return whether the transaction of the enqueuer can only be rolled back, for example after a lost connection. The next
    pass then repeats each hand-over of this one."""
    return connections[str(jobs[0]._state.db)].needs_rollback


def _offer(backend: Backend, queue: str, jobs: Sequence[StagedJob]) -> Results:
    """Hand the jobs to the backend; return a result for each. Raises the other errors of the backend."""
    ids = [job.pk for job in jobs]
    try:
        with hand_over_savepoint(jobs[0]._state.db):
            returned = awaited(backend.hand_over(queue, jobs))
    except BrokerUnavailable as error:
        return dict.fromkeys(ids, error)
    if isinstance(returned, Mapping) and returned.keys() <= set(ids):
        results: Results = {pk: returned.get(pk) for pk in ids}
        if all(isinstance(result, NotOffered) for result in results.values()):
            # The pass would read the same jobs again without end.
            return dict.fromkeys(ids, BrokerUnavailable(f"The backend offered none of {len(jobs)} jobs to the broker."))
        return results
    # No second hand-over: the backend may have sent them.
    wrong = TypeError(f"hand_over() of the backend of {queue!r} must return a dict by job ids, not {returned!r:.100}")
    return dict.fromkeys(ids, wrong)
