"""Backends: the interface between the enqueuer and a queue, and a base class for queues that take
one job at a time."""

import random
import time
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias
from uuid import UUID

from django.db import transaction

from idempotency._async import awaited, in_own_context
from idempotency._boundary import (
    TransactionBroken,
    callbacks,
    drop_broken_connections,
    refuse_open_transaction,
    transaction_is_broken,
)
from idempotency._engine.caught_errors import refuse_rollback
from idempotency._text import error_text
from idempotency.exceptions import IdempotencyError
from idempotency.jobs import refuse_generator
from idempotency.models import StagedJob

#: A job has failed after this number of refusals, or of hand-overs without an effect.
MAX_ATTEMPTS = 10
#: A batch hands over no job after this time, so that its transaction does not stay open.
BATCH_SECONDS = 30
BROKER_TIMEOUT_SECONDS = 10
#: The broker is unavailable after this number of jobs in a row that it did not take; after two, if
#: they took BROKER_TIMEOUT_SECONDS.
MOST_UNAVAILABLE = 10
TEN_YEARS = 315_576_000
#: The end of the current batch, as a value of time.monotonic().
deadline: ContextVar[float] = ContextVar("idempotency_deadline", default=float("inf"))


class BrokerUnavailable(IdempotencyError):
    """The broker cannot be reached. No job was lost, and no attempt was counted. Start the broker
    or correct its address; the next pass continues."""


class NotDeleted(IdempotencyError):
    """The broker has the job, but its row cannot be deleted. The job is not handed over again.
    Correct the cause. If the job has failed, then run ``manage.py staged_jobs retry``, which
    deletes the row. After ``purge``, a worker would skip the job.
    """

    @classmethod
    def by(cls, error: BaseException) -> "NotDeleted":
        """Return the exception with the text of the error that prevents the deletion."""
        return cls(f"{cls()} The error: {error_text(error)}")


class NoEffect(IdempotencyError):
    """The job reached its hand-over limit without taking effect. Check the workers and the error of
    the job there, then run ``manage.py staged_jobs retry``."""


class HandOverOnCommit(IdempotencyError):
    """The hand-over registered a callback with transaction.on_commit(). The callback would run
    after the staged row is deleted, so a failure would lose the job. Send at once: use django-rq
    with commit_mode="auto", and Celery without delay_on_commit()."""


@dataclass(frozen=True, slots=True)
class OfferAgain:
    """The broker took the job but may lose it. The job stays staged, and is due again after
    ``seconds``, an int or float from one second to ten years. With a shorter time, one pass would
    hand the job over again and again."""

    seconds: float

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, int | float) or not 1 <= self.seconds <= TEN_YEARS:
            range_ = f"a number of seconds from 1 to {TEN_YEARS}"
            raise ValueError(f"OfferAgain takes {range_}, not {self.seconds!r}.")


@dataclass(frozen=True, slots=True)
class TookEffect:
    """The job was handed over before and took effect. Its row is deleted, and not counted again."""


@dataclass(frozen=True, slots=True)
class NotOffered:
    """The job was not offered to the broker. It is due again at once if the time of the batch was
    up; or after ``seconds`` if it is in a group, was sent before, and has not taken effect."""

    seconds: float = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The job was refused with an error that would otherwise not count, such as
    BrokerUnavailable."""

    error: BaseException


#: The result of a hand-over, if the broker did not simply take the job. An exception means a
#: refusal.
HandOverResult: TypeAlias = BaseException | OfferAgain | TookEffect | NotOffered | Refusal
#: Results by job id. None: the broker took the job.
Results: TypeAlias = dict[UUID, HandOverResult | None]


class Backend(Protocol):
    """A destination of staged jobs, named by a dotted path in ``IDEMPOTENCY["ENQUEUERS"]`` and
    built without arguments.

    A class with ``runs_functions = True`` declares that its workers call ``call_job``. Then
    ``stage_job`` and the enqueuer refuse functions outside JOB_MODULES.

    A class with ``uses_database = False`` declares that its hand-over writes to no Django database.
    If the transaction of the enqueuer is lost after the hand-over, the results of such a class are
    kept. For any other class, the jobs are handed over again.

    A class with ``follow_up_seconds``, a number, declares that the queue may lose a job, for
    example when a worker dies. The job stays staged until the inbox has it, and is handed over
    again after this time, then after twice that time, and so on.

    A class with ``uses_inbox = True`` declares that its workers run jobs in ``process_once``. A job
    of a group then waits until the inbox has the job before it. With False, it waits until the
    broker has that job.

    A class or function with ``lease_seconds`` declares that its hand-over is slow. The enqueuer
    holds the jobs by a lease of this time, and has no open transaction during the hand-over. Set
    the time to at least twice that of a call.
    """

    def hand_over(
        self, queue: str, jobs: Sequence[StagedJob]
    ) -> Mapping[UUID, HandOverResult | None] | Awaitable[Mapping[UUID, HandOverResult | None]]:
        """Give ``jobs`` to the broker. Return a mapping from job ids to results.

        - None, or no result: the broker has the job, and the row is deleted.
        - ``OfferAgain``: the broker has the job, and the row stays until the job took effect.
        - ``TookEffect``: the job was handed over before and took effect. The row is deleted.
        - ``NotOffered``: the time was up before this job. The job stays due. At least one job of a
          call must be offered.
        - ``BrokerUnavailable``: the broker did not process the job. This counts as a refusal if the
          broker took a later one of ``jobs``, and otherwise not at all.
        - Any other exception: the job is refused.

        If the method returns a value of another kind, all jobs count as refused. The method may be
        ``async def``. Raises BrokerUnavailable when the broker takes nothing. After any exception,
        the enqueuer hands the jobs over one by one.

        The method must return before the enqueuer's transaction times out. Each call to the broker
        needs a timeout of at most BROKER_TIMEOUT_SECONDS; none may begin when ``seconds_left()`` is
        negative. The method must send at once: a callback of ``transaction.on_commit`` makes the
        hand-over fail with HandOverOnCommit.
        """
        ...


class OfferedSingly(dict[UUID, "HandOverResult | None"]):
    """The results of jobs that were offered one by one. The enqueuer need not offer them again to
    find a job that the broker refuses with BrokerUnavailable."""


def seconds_left() -> float:
    """Return the seconds for which the current batch may begin hand-overs; a negative number after
    that time.

    A batch lasts BATCH_SECONDS, or half of a lower time limit that the database sets for
    transactions.
    """
    return deadline.get() - time.monotonic()


def offer_singly(
    jobs: Sequence[StagedJob],
    offer: Callable[[StagedJob], HandOverResult | None],
    *,
    unavailable: int = 0,
) -> Results:
    """Offer one job after the other, in order. Return the results. An exception that ``offer``
    raises is the result of its job.

    If the broker is unavailable for a job, the next job is chosen at random. If the broker takes
    that job, the first one counts as refused. Otherwise the broker soon counts as unavailable, and
    the other jobs are not offered. ``unavailable`` is the number of earlier hand-overs for which
    the broker was unavailable.
    Raises TransactionBroken if the transaction of the enqueuer is broken.
    """
    results: Results = {}
    failed: dict[UUID, Refusal] = {}
    waiting, taken, since = list(jobs), False, time.monotonic()
    while waiting and (not results or seconds_left() >= 0):
        job = waiting.pop(random.randrange(len(waiting)) if failed or unavailable else 0)  # nosec B311  # no secret
        result = _result_of(offer, job, results)
        results[job.id] = result
        if isinstance(result, BrokerUnavailable):
            failed[job.id] = Refusal(result)
            row = len(failed) + unavailable
            was_slow = time.monotonic() - since >= BROKER_TIMEOUT_SECONDS
            if row >= MOST_UNAVAILABLE or (row > 1 and was_slow):
                return results | dict.fromkeys((left.pk for left in waiting), result)
        elif result is None or isinstance(result, OfferAgain):
            results |= failed
            failed, unavailable, taken, since = {}, 0, True, time.monotonic()
    if taken:
        results |= failed
    return results | dict.fromkeys((left.pk for left in waiting), NotOffered())


def _result_of(
    offer: Callable[[StagedJob], HandOverResult | None], job: StagedJob, results: Results
) -> HandOverResult | None:
    try:
        return offer(job)
    except TransactionBroken as broken:
        broken.results = results | broken.results
        raise
    except BrokerUnavailable as error:
        return error
    except (Exception, CancelledError) as error:
        if transaction_is_broken(job._state.db, error):
            raise TransactionBroken(job, results) from error
        return error


class OneByOne:
    """The base class of a backend whose broker takes one job at a time."""

    follow_up_seconds: float | None = None
    #: False if a hand-over does not use a Django database; it then needs no savepoint.
    uses_database = True

    def hand_over(
        self, queue: str, jobs: Sequence[StagedJob]
    ) -> Mapping[UUID, HandOverResult | None]:
        """Hand the jobs over one after the other, as long as ``seconds_left()`` permits. An
        exception of ``hand_over_one()`` refuses its job; BrokerUnavailable does so only if the
        broker takes another job."""
        return OfferedSingly(offer_singly(jobs, partial(self._offer, queue)))

    def _offer(self, queue: str, job: StagedJob) -> None:
        if not self.uses_database:
            self._hand_over(queue, job)
            return
        try:
            self._offer_in_savepoint(queue, job)
        except BrokerUnavailable as error:
            if transaction_is_broken(job._state.db, error):  # even outside the savepoint
                raise TransactionBroken(job, {}) from error
            raise

    def _offer_in_savepoint(self, queue: str, job: StagedJob) -> None:
        # The queue may be in this database. An error there must not break the transaction of the
        # enqueuer. The connections to other databases are checked before the next job.
        with hand_over_savepoint(job._state.db):
            try:
                self._hand_over(queue, job)
            except BaseException:
                drop_broken_connections()
                raise
            refuse_open_transaction()
            refuse_rollback(job._state.db)

    @in_own_context
    def _hand_over(self, queue: str, job: StagedJob) -> None:
        returned = awaited(self.hand_over_one(queue, job))
        refuse_generator(f"The backend of the queue {queue!r}", returned)

    def hand_over_one(self, queue: str, job: StagedJob) -> object:
        """Give one job to the broker; a coroutine is awaited.

        Raises BrokerUnavailable if the broker cannot be reached. Any other exception refuses the
        job.
        """
        raise NotImplementedError


@contextmanager
def hand_over_savepoint(alias: str | None) -> Iterator[None]:
    """Open a savepoint for a hand-over, if a transaction is open. Its rollback also drops the
    on_commit callbacks of this database.

    Raises HandOverOnCommit if the block registered an on_commit callback on any database.
    """
    is_open = transaction.get_connection(alias).in_atomic_block
    with transaction.atomic(using=alias) if is_open else nullcontext():
        before = callbacks()
        yield
        if callbacks() > before:
            raise HandOverOnCommit
