"""Backends: the interface between the enqueuer and a queue, and a base class for queues that take one job at a time."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias
from uuid import UUID

from django.utils.module_loading import import_string

from idempotency._async import awaited
from idempotency.exceptions import IdempotencyError
from idempotency.jobs import backend_path, refuse_generator
from idempotency.models import StagedJob

#: A job has failed after this number of refusals, or of hand-overs without an effect.
MAX_ATTEMPTS = 10
#: The limit for a job refused with JobNotAllowed. These refusals take three days, so that a Monday deploy can add the function.
NAME_MAX_ATTEMPTS = 81
#: A batch hands over no job after this time, so that its transaction does not stay open.
BATCH_SECONDS = 30
BROKER_TIMEOUT_SECONDS = 10


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
    """The broker took the job but may lose it. The job stays staged, and is due again after ``seconds``. The number must
    be positive, because otherwise one pass would hand the job over again and again."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"OfferAgain takes a positive number of seconds, not {self.seconds!r}.")


@dataclass(frozen=True, slots=True)
class TookEffect:
    """The job was handed over before and took effect. Its row is deleted, and not counted again."""


#: The result of a hand-over, if the broker did not simply take the job. An exception means a refusal.
HandOverResult: TypeAlias = BaseException | OfferAgain | TookEffect
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
        """Hand the jobs over. The enqueuer passes one job at a time, so an exception concerns only that job."""
        results: dict[UUID, HandOverResult] = {}
        for job in jobs:
            if self.follow_up_seconds and job.hand_overs >= MAX_ATTEMPTS:
                raise NoEffect
            refuse_generator(f"The backend of the queue {queue!r}", awaited(self.hand_over_one(queue, job)))
            if self.follow_up_seconds:
                results[job.pk] = OfferAgain(self.follow_up_seconds * 2**job.hand_overs)
        return results

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


def backend_of(queue: str) -> Backend | None:
    """Return the backend of a queue, or None if ``IDEMPOTENCY["ENQUEUERS"]`` names none."""
    path = backend_path(queue)
    return None if path is None else _built(path)


@lru_cache(maxsize=32)
def _built(path: str) -> Backend:
    named = import_string(path)
    backend: Backend = named() if isinstance(named, type) else CallableBackend(named)
    return backend
