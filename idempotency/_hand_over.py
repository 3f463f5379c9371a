"""The hand-over of the jobs of one queue to its backend: whatever the backend does, each job has at most one result.

A backend is code of a shop. It may raise, return nonsense or take too long. The transaction of the enqueuer must survive this,
because it also holds the jobs of other queues.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from uuid import UUID

from django.db import InterfaceError, OperationalError, connections, transaction

from idempotency._async import FAILURES, awaited
from idempotency._text import error_text
from idempotency.backends import Backend, BrokerUnavailable, HandOverOnCommit, OneByOne, Results, TookEffect, backend_of
from idempotency.inbox import STAGED_JOBS, took_effect
from idempotency.jobs import not_allowed
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")


def hand_over(queue: str, jobs: Sequence[StagedJob], deadline: float) -> Results:
    """Hand over the jobs of one queue: all at once, or one by one if the backend takes them so, or raised an error for all of
    them. Errors are returned as results, because an exception would roll back the hand-overs of other queues. Jobs that were
    not offered before the deadline have no result; one is offered in any case, so that each batch makes progress."""
    try:
        if (backend := backend_of(queue)) is None:
            raise LookupError(f"IDEMPOTENCY['ENQUEUERS'] names no backend for the queue {queue!r}, and none for '*'.")
    except FAILURES as error:
        return dict.fromkeys((job.pk for job in jobs), error)
    results: Results = {**not_allowed(jobs)} if getattr(backend, "runs_functions", False) else {}
    if not (jobs := [job for job in jobs if job.pk not in results]):
        return results
    if isinstance(backend, OneByOne):
        results |= _effects(backend, jobs)
    else:
        try:
            return results | _offer(backend, queue, jobs)
        except FAILURES as error:
            text = "queue %r refused a batch of %d jobs, which are handed over one by one: %s"
            logger.info(text, queue, len(jobs), error_text(error))
    for job in jobs:
        if job.pk in results:
            continue
        try:
            results |= _offer(backend, queue, [job])
        except FAILURES as error:
            results[job.pk] = error
        if isinstance(results[job.pk], BrokerUnavailable) or time.monotonic() > deadline:
            break
    return results


def _effects(backend: OneByOne, jobs: Sequence[StagedJob]) -> Results:
    """Return results for those jobs that took effect after an earlier hand-over; for all jobs if the inbox cannot be read."""
    # A retried job has no hand-overs, but keeps its last error.
    again = [str(job.pk) for job in jobs if backend.follow_up_seconds and (job.hand_overs or job.last_error)]
    if not again:
        return {}
    alias = jobs[0]._state.db
    try:
        with transaction.atomic(using=alias):
            return {UUID(done): TookEffect() for done in took_effect(STAGED_JOBS, again, using=alias)}
    except (OperationalError, InterfaceError) as error:
        return dict.fromkeys((job.pk for job in jobs), BrokerUnavailable(f"The inbox cannot be read: {error}"))


def _offer(backend: Backend, queue: str, jobs: Sequence[StagedJob]) -> Results:
    """Hand the jobs to the backend; return a result for each. Raises the other errors of the backend."""
    ids = [job.pk for job in jobs]
    # The queue may be in this database. An error there must not break the transaction of the enqueuer.
    savepoint = _savepoint(jobs[0]._state.db) if getattr(backend, "uses_database", True) else nullcontext()
    try:
        with savepoint:
            returned = awaited(backend.hand_over(queue, jobs))
    except BrokerUnavailable as error:
        return dict.fromkeys(ids, error)
    if isinstance(returned, Mapping) and returned.keys() <= set(ids):
        return {pk: returned.get(pk) for pk in ids}
    # No second hand-over: the backend may have sent them.
    wrong = TypeError(f"hand_over() of the backend of {queue!r} must return a dict by job ids, not {returned!r:.100}")
    return dict.fromkeys(ids, wrong)


@contextmanager
def _savepoint(alias: str | None) -> Iterator[None]:
    """Open a savepoint, whose rollback also drops the on_commit callbacks of this database. Raises HandOverOnCommit if the
    block registered a callback on any database."""
    with transaction.atomic(using=alias):
        before = _callbacks()
        yield
        if _callbacks() > before:
            raise HandOverOnCommit


def _callbacks() -> int:
    """Return the number of on_commit callbacks, except those of this app, on which no job depends."""
    waiting = (entry[1] for connection in connections.all(initialized_only=True) for entry in connection.run_on_commit)
    return sum(not str(getattr(callback, "__module__", "")).startswith("idempotency.") for callback in waiting)
