"""The hand-over of the jobs of one queue to its backend: whatever the backend does, each job has at
most one result.

A backend is code of the project. It may raise any error, return a wrong value or take too long. The
transaction of the enqueuer must survive this, because it also holds the jobs of other queues.
SystemExit during a hand-over is not caught, because a signal handler of the caller may have raised
it: the batch is then rolled back, as after a crash. During an import it is taken for an error of
the module.
"""

import logging
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import log2
from typing import Any

from django.db import Error, InterfaceError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError
from django.utils.module_loading import import_string

from idempotency import backends
from idempotency._async import FAILURES, awaited, in_own_context
from idempotency._batch import Batch, Claim, claim
from idempotency._boundary import (
    TransactionBroken,
    boundary,
    refuse_open_transaction,
    transaction_is_broken,
)
from idempotency._engine.caught_errors import ROLLED_BACK, can_only_roll_back
from idempotency._text import error_text
from idempotency.backends import (
    Backend,
    BrokerUnavailable,
    HandOverResult,
    NotOffered,
    OfferAgain,
    OfferedSingly,
    Results,
    TookEffect,
)
from idempotency.inbox import jobs_done
from idempotency.jobs import backend_path, not_allowed
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")

#: The wait before a job of a group is handed over again, if its backend has no
#: ``follow_up_seconds``. It doubles with each hand-over; ten hand-overs take a week.
GROUP_FOLLOW_UP_SECONDS = 600
#: The inbox is checked for the effect of a job of a group after 1 s, 2 s, 4 s and so on, and then
#: after each such time.
LONGEST_CHECK_SECONDS = 30
#: The backends of this process by their paths.
_built: dict[str, Backend] = {}


def backend_of(queue: str, *, using: str) -> Backend | None:
    """Return the backend of a queue, or None if ``IDEMPOTENCY["ENQUEUERS"]`` names none. It is
    built once.

    ``using`` is the database of an open transaction. It gets a savepoint, because a query of the
    module or of the class may fail.
    """
    path = backend_path(queue)
    if path is None:
        return None
    if path not in _built:
        with transaction.atomic(using=using):
            named = import_string(path)
            _built[path] = named() if isinstance(named, type) else CallableBackend(named)
    return _built[path]


class CallableBackend(backends.OneByOne):
    """The backend of a dotted path to a function: ``function(job)`` takes the job or raises."""

    def __init__(self, function: Callable[[StagedJob], object]) -> None:
        self._function = function
        self.lease_seconds = getattr(function, "lease_seconds", None)

    def hand_over_one(self, queue: str, job: StagedJob) -> object:
        return self._function(job)


@in_own_context
def hand_over(queue: str, jobs: Sequence[StagedJob], batch: Batch) -> None:
    """Hand over the jobs of one queue, and add their results to the batch: all at once, or one by
    one if the backend raised an error for all of them. Errors are results, because an exception
    would roll back the hand-overs of other queues. If the backend has ``lease_seconds``, the jobs
    are only claimed.

    Raises TransactionBroken if the transaction is broken. The results that hold nevertheless are in
    ``batch.lasting`` then.
    """
    backends.deadline.set(batch.deadline)  # It is lost with the context of this call.
    with boundary():
        try:
            if (backend := backend_of(queue, using=batch.alias)) is None:
                raise LookupError(
                    f"IDEMPOTENCY['ENQUEUERS'] names no backend for the queue {queue!r}, and none"
                    " for '*'."
                )
            follow_ups = _follow_ups(backend, jobs)
        except FAILURES as error:
            batch.results |= dict.fromkeys((job.pk for job in jobs), error)
            return
        for check in (_before, _not_allowed):
            if results := check(backend, jobs):
                batch.results |= results
                jobs = [job for job in jobs if job.id not in results]
        if jobs and (seconds := getattr(backend, "lease_seconds", None)) is not None:
            claim(batch, queue, jobs, seconds)
        elif jobs:
            _hand_over_to(backend, queue, jobs, batch, follow_ups)


@in_own_context
def hand_over_claim(held: Claim) -> None:
    """Hand over the jobs of a claim, while no transaction is open. The results that are known are
    in ``held.lasting``."""
    backends.deadline.set(held.deadline)
    with boundary():
        backend = backend_of(held.queue, using=held.alias)
        if backend is None or held.time_is_up():
            return
        try:
            _hand_over_to(backend, held.queue, held.jobs, held, _follow_ups(backend, held.jobs))
        except TransactionBroken as broken:
            # The connection was lost. Each time, one job is refused: see write_after_rollback().
            unknown = [job.pk for job in held.jobs if job.pk not in held.lasting]
            if unknown and not held.culprit_is_known:
                held.lasting[unknown[0]] = backends.Refusal(broken.__cause__ or broken)


def _hand_over_to(
    backend: Backend, queue: str, jobs: Sequence[StagedJob], batch: Batch, follow_ups: Results
) -> None:
    batch.offered += jobs
    lasting = isinstance(batch, Claim) or not getattr(backend, "uses_database", True)
    try:
        results = _until_effect(follow_ups, _results(backend, queue, jobs))
    except TransactionBroken as broken:
        broken.results = _until_effect(follow_ups, broken.results)
        _keep(broken, batch, lasting)
        raise
    batch.results |= results
    if lasting:
        batch.lasting |= results


def _before(backend: Backend, jobs: Sequence[StagedJob]) -> Results:
    """Return the results of those jobs that are not handed over now: they took effect, are out of
    attempts, or belong to a group and their follow-up is later."""
    if not _may_lose(backend):
        jobs = [job for job in jobs if job.group]
    try:
        results: Results = dict.fromkeys(jobs_done(jobs), TookEffect())
    except (OperationalError, InterfaceError) as error:
        # No job is the cause, so no job is refused.
        unread = BrokerUnavailable(f"The inbox cannot be read: {error}")
        return dict.fromkeys((job.pk for job in jobs), unread)
    for job in jobs:
        if results and job.id in results:
            continue
        if job.handed_over_at is not None:  # Only jobs of groups have this time.
            passed = (job.run_at - job.handed_over_at).total_seconds()
            if passed < _follow_up_seconds(backend) * 2 ** (job.hand_overs - 1):
                wait = 2 ** int(log2(max(1, passed)))
                results[job.id] = NotOffered(min(wait, LONGEST_CHECK_SECONDS))
                continue
        if job.hand_overs >= backends.MAX_ATTEMPTS:
            results[job.id] = backends.NoEffect()
    return results


def _not_allowed(backend: Backend, jobs: Sequence[StagedJob]) -> Results:
    by_name = getattr(backend, "runs_functions", False)
    return {**not_allowed([job for job in jobs if by_name or job.operation])}


def _may_lose(backend: Backend) -> bool:
    return bool(getattr(backend, "follow_up_seconds", None))


def _follow_up_seconds(backend: Backend) -> float:
    return getattr(backend, "follow_up_seconds", None) or GROUP_FOLLOW_UP_SECONDS


def _follow_ups(backend: Backend, jobs: Sequence[StagedJob]) -> Results:
    """Return the results of those jobs that stay staged when the broker has taken them: it may lose
    them, or they belong to a group and the inbox tells when they took effect. For other jobs of
    groups the hand-over counts as the effect."""
    if not _may_lose(backend):
        uses_inbox = getattr(backend, "uses_inbox", False)
        jobs = [job for job in jobs if job.group and uses_inbox]
    seconds = _follow_up_seconds(backend)
    again = {
        hand_overs: OfferAgain(min(seconds * 2**hand_overs, backends.TEN_YEARS))
        for hand_overs in {job.hand_overs for job in jobs}
    }
    return {job.id: again[job.hand_overs] for job in jobs}


def _until_effect(follow_ups: Results, results: Results) -> Results:
    return {pk: follow_ups.get(pk) if result is None else result for pk, result in results.items()}


def _keep(broken: TransactionBroken, batch: Batch, lasting: bool) -> None:
    if lasting:
        batch.lasting |= broken.results
    job, cause = broken.job, broken.__cause__
    if job is not None and job.pk not in batch.lasting and cause is not None:
        batch.lasting[job.pk] = backends.Refusal(cause)
        batch.culprit_is_known = True


def _results(backend: Backend, queue: str, jobs: Sequence[StagedJob]) -> Results:
    def offer_one(job: StagedJob) -> HandOverResult | None:
        return _offer(backend, queue, [job])[job.pk]

    unavailable = 0
    try:
        results = _offer(backend, queue, jobs)
        is_final = len(jobs) == 1 or isinstance(results, OfferedSingly)
        if is_final or not _all(BrokerUnavailable, results):
            return results
        unavailable = 1  # The cause may be one of the jobs.
    except TransactionBroken:
        raise
    except (Exception, CancelledError) as error:
        if len(jobs) == 1:
            return {jobs[0].pk: error}
        text = "queue %r refused a batch of %d jobs, which are handed over one by one: %s"
        with suppress(Exception):  # The handler of a log must not change the results.
            logger.info(text, queue, len(jobs), error_text(error))
    return backends.offer_singly(jobs, offer_one, unavailable=unavailable)


def _offer(backend: Backend, queue: str, jobs: Sequence[StagedJob]) -> Results:
    """Hand the jobs to the backend; return a result for each. Raises the other errors of the
    backend."""
    results: Results = {}
    try:
        with backends.hand_over_savepoint(jobs[0]._state.db):
            results = _checked(queue, jobs, awaited(backend.hand_over(queue, jobs)))
            uses_database = getattr(backend, "uses_database", True)
            needs_writes = uses_database and any(map(_counts_as_done, results.values()))
            if needs_writes:
                refuse_open_transaction()
            if can_only_roll_back(jobs[0]._state.db):
                if needs_writes:
                    results = {}
                    raise TransactionManagementError(ROLLED_BACK)
                if connections[str(jobs[0]._state.db)].in_atomic_block:
                    # No result depends on the writes, so Django rolls them back without an error.
                    transaction.set_rollback(True, using=jobs[0]._state.db)
        connections[str(jobs[0]._state.db)].validate_no_broken_transaction()
    except TransactionBroken:
        raise
    except (Exception, CancelledError) as error:
        if transaction_is_broken(jobs[0]._state.db, error):
            # The backend has returned if the error is that of the savepoint.
            known = results if isinstance(error, Error) else {}
            raise TransactionBroken(jobs[0] if len(jobs) == 1 else None, known) from error
        if isinstance(error, BrokerUnavailable):
            return dict.fromkeys((job.pk for job in jobs), error)
        raise
    return results


def _checked(queue: str, jobs: Sequence[StagedJob], returned: Any) -> Results:
    results: Results = dict.fromkeys(job.id for job in jobs)
    if not isinstance(returned, Mapping) or len(results | dict(returned)) > len(jobs):
        # No second hand-over: the backend may have sent them.
        wanted = f"hand_over() of the backend of {queue!r} must return a dict by ids of these jobs"
        wrong = TypeError(f"{wanted}, not this {type(returned).__name__}")
        return dict.fromkeys(results, wrong)
    results |= returned
    if _all(backends.NotOffered, results):
        # The pass would read the same jobs again without end.
        text = f"The backend offered none of {len(jobs)} jobs to the broker."
        return dict.fromkeys(results, BrokerUnavailable(text))
    if isinstance(returned, OfferedSingly):
        return OfferedSingly(results)
    is_taking = False
    for pk, result in reversed(results.items()):
        is_taking = is_taking or result is None
        if is_taking and isinstance(result, BrokerUnavailable):
            results[pk] = backends.Refusal(result)
    return results


def _counts_as_done(result: HandOverResult | None) -> bool:
    return result is None or isinstance(result, OfferAgain | TookEffect)


def _all(kind: type, results: Results) -> bool:
    return all(isinstance(result, kind) for result in results.values())
