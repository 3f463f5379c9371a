"""Backends: the interface between the enqueuer and a queue, and a base class for queues that take one job at a time."""

import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from uuid import UUID

from django.db import InterfaceError, OperationalError, connections, transaction
from django.utils.module_loading import import_string

from idempotency._async import awaited
from idempotency._boundary import drop_broken_connections
from idempotency.exceptions import IdempotencyError
from idempotency.inbox import STAGED_JOBS, took_effect
from idempotency.jobs import backend_path, refuse_generator
from idempotency.models import StagedJob

#: A job has failed after this number of refusals, or of hand-overs without an effect.
MAX_ATTEMPTS = 10
#: The limit for a job refused with JobNotAllowed. These refusals take three days, so that a Monday deploy can add the function.
NAME_MAX_ATTEMPTS = 81
#: A batch hands over no job after this time, so that its transaction does not stay open.
BATCH_SECONDS = 30
BROKER_TIMEOUT_SECONDS = 10
_TEN_YEARS = 315_576_000
#: The backends of this process by their paths.
_built: dict[str, "Backend"] = {}


class BrokerUnavailable(IdempotencyError):
    """The broker cannot be reached. No job was lost, and no attempt was counted. Start the broker or correct its address; the
    next pass continues."""


class NoEffect(IdempotencyError):
    """The job reached its hand-over limit without taking effect. Check the workers and the error of the job there, then run
    ``manage.py staged_jobs retry``."""


class HandOverOnCommit(IdempotencyError):
    """The hand-over registered a callback with transaction.on_commit(). The callback would run after the staged row is
    deleted, so a failure would lose the job. Send at once: use django-rq with commit_mode="auto", and Celery without
    delay_on_commit()."""


@dataclass(frozen=True, slots=True)
class OfferAgain:
    """The broker took the job but may lose it. The job stays staged, and is due again after ``seconds``, an int or float from
    one second to ten years. After less than a second, one pass would hand the job over again and again."""

    seconds: float

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, int | float) or not 1 <= self.seconds <= _TEN_YEARS:
            raise ValueError(f"OfferAgain takes a number of seconds from 1 to {_TEN_YEARS}, not {self.seconds!r}.")


@dataclass(frozen=True, slots=True)
class TookEffect:
    """The job was handed over before and took effect. Its row is deleted, and not counted again."""


@dataclass(frozen=True, slots=True)
class NotOffered:
    """The job was not offered to the broker, because the time of the batch was up. It stays due, for the next batch."""


#: The result of a hand-over, if the broker did not simply take the job. An exception means a refusal.
HandOverResult: TypeAlias = BaseException | OfferAgain | TookEffect | NotOffered
#: Results by job id. None: the broker took the job.
Results: TypeAlias = dict[UUID, HandOverResult | None]


class Backend(Protocol):
    """A destination of staged jobs, named by a dotted path in ``IDEMPOTENCY["ENQUEUERS"]`` and built without arguments.

    A class with ``runs_functions = True`` declares that its workers call ``call_job``. Then ``stage_job`` and the enqueuer
    refuse functions outside JOB_MODULES.

    A class may have a method ``refuse_name(name)``, which raises for a name that the backend would refuse. With this method,
    ``manage.py check`` reports such names in the code.
    """

    def hand_over(
        self, queue: str, jobs: Sequence[StagedJob]
    ) -> Mapping[UUID, HandOverResult] | Awaitable[Mapping[UUID, HandOverResult]]:
        """Give ``jobs`` to the broker. Return a mapping from job ids to results, without the jobs that the broker simply took.

        - Without a result, the broker has the job, and the row is deleted.
        - ``OfferAgain``: the broker has the job, and the row stays until the job took effect.
        - ``TookEffect``: the job was handed over before and took effect. The row is deleted.
        - ``NotOffered``: the time was up before this job. The job stays due. At least one job of a call must be offered.
        - ``BrokerUnavailable``: the broker did not process the job. No refusal is counted.
        - Any other exception: the job is refused.

        If the method returns a value of another kind, all jobs count as refused. The method may be ``async def``. Raises
        BrokerUnavailable when the broker takes nothing. After any other exception, the enqueuer hands the jobs over one by
        one.

        The method must return before the enqueuer's transaction times out. Each call to the broker needs a timeout of at most
        BROKER_TIMEOUT_SECONDS; none may begin after BATCH_SECONDS. The method must send at once: a callback of
        ``transaction.on_commit`` makes the hand-over fail with HandOverOnCommit.
        """
        ...


class OneByOne:
    """The base class of a backend whose broker takes one job at a time."""

    #: For a queue that may lose a job when a worker dies. The job stays staged until the inbox has it, and is handed
    #: over again after this time, then after twice that time, and so on. None: the queue is reliable.
    follow_up_seconds: float | None = None
    #: False if a hand-over does not use a Django database; it then needs no savepoint.
    uses_database = True

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Hand the jobs over one after the other. After BATCH_SECONDS the remaining jobs are not offered. If
        ``hand_over_one()`` raises an exception other than BrokerUnavailable, that job counts as refused."""
        results = self._effects(jobs)
        waiting = [job for job in jobs if job.pk not in results]
        deadline = time.monotonic() + BATCH_SECONDS
        for position, job in enumerate(waiting):
            if position and time.monotonic() > deadline:  # The first job is always offered, so that each batch makes progress.
                return results | dict.fromkeys((left.pk for left in waiting[position:]), NotOffered())
            try:
                again = self._offered_again(job)  # Before the hand-over, because it may raise.
                # The queue may be in this database. An error there must not break the transaction of the enqueuer.
                with hand_over_savepoint(job._state.db) if self.uses_database else nullcontext():
                    self._hand_over_within_boundary(queue, job)
                if again is not None:
                    results[job.pk] = again
            except BrokerUnavailable as error:  # The jobs before this one were sent; keep their results.
                return results | dict.fromkeys((left.pk for left in waiting[position:]), error)
            except (Exception, CancelledError) as error:
                results[job.pk] = error
        return results

    def _hand_over_within_boundary(self, queue: str, job: StagedJob) -> None:
        """Hand one job over, and check the connections to other databases before the next one."""
        try:
            refuse_generator(f"The backend of the queue {queue!r}", awaited(self.hand_over_one(queue, job)))
        except BaseException:
            drop_broken_connections()
            raise
        if aliases := drop_broken_connections():
            raise RuntimeError(
                f"The hand-over left a transaction open on {', '.join(map(repr, aliases))}. It was rolled back. Commit it in "
                "the hand-over, for example with transaction.atomic()."
            )

    def _offered_again(self, job: StagedJob) -> OfferAgain | None:
        if not self.follow_up_seconds:
            return None
        if job.hand_overs >= MAX_ATTEMPTS:
            raise NoEffect
        return OfferAgain(min(self.follow_up_seconds * 2**job.hand_overs, _TEN_YEARS))

    def _effects(self, jobs: Sequence[StagedJob]) -> dict[UUID, HandOverResult]:
        # A retried job has no hand-overs, but keeps its last error.
        again = [str(job.pk) for job in jobs if self.follow_up_seconds and (job.hand_overs or job.last_error)]
        try:
            return {UUID(done): TookEffect() for done in took_effect(STAGED_JOBS, again, using=jobs[0]._state.db)}
        except (OperationalError, InterfaceError) as error:
            raise BrokerUnavailable(f"The inbox cannot be read: {error}") from error

    def hand_over_one(self, queue: str, job: StagedJob) -> object:
        """Give one job to the broker; a coroutine is awaited.

        Raises BrokerUnavailable if the broker cannot be reached. Any other exception refuses the job.
        """
        raise NotImplementedError


class CallableBackend(OneByOne):
    """The backend of a dotted path to a function: ``function(job)`` takes the job or raises."""

    def __init__(self, function: Callable[[StagedJob], object]) -> None:
        self._function = function

    def hand_over_one(self, queue: str, job: StagedJob) -> object:
        return self._function(job)


@contextmanager
def hand_over_savepoint(alias: str | None) -> Iterator[None]:
    """Open a savepoint for a hand-over. Its rollback also drops the on_commit callbacks of this database.

    Raises HandOverOnCommit if the block registered an on_commit callback on any database.
    """
    with transaction.atomic(using=alias):
        before = _callbacks()
        yield
        if _callbacks() > before:
            raise HandOverOnCommit


def _callbacks() -> int:
    """Return the number of on_commit callbacks, except those of this app, on which no job depends."""
    waiting = (entry[1] for connection in connections.all(initialized_only=True) for entry in connection.run_on_commit)
    return sum(not str(getattr(callback, "__module__", "")).startswith("idempotency.") for callback in waiting)


def backend_of(queue: str, *, using: str | None = None) -> Backend | None:
    """Return the backend of a queue, or None if ``IDEMPOTENCY["ENQUEUERS"]`` names none. It is built once.

    ``using`` is the database of an open transaction. It gets a savepoint, because a query of the module or of the class may
    fail.
    """
    path = backend_path(queue)
    if path is None:
        return None
    if path not in _built:
        with nullcontext() if using is None else transaction.atomic(using=using):
            named = import_string(path)
            _built[path] = named() if isinstance(named, type) else CallableBackend(named)
    return _built[path]
