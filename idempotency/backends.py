"""Where staged jobs go: what a queue has to be for the enqueuer, and the base of those that take one job at a time."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Protocol
from uuid import UUID

from django.db import InterfaceError, OperationalError, connections, transaction
from django.utils.module_loading import import_string

from idempotency.contexts import awaited
from idempotency.exceptions import IdempotencyError
from idempotency.inbox import STAGED_JOBS, took_effect
from idempotency.jobs import backend_path, refuse_generator
from idempotency.models import StagedJob

#: After so many refusals a job is given up on, with its error, for a person to look at.
MAX_ATTEMPTS = 10
#: A job refused with JobNotAllowed waits three days for a deploy that knows its name: from Friday to Monday.
NAME_MAX_ATTEMPTS = 81
#: A batch stops handing over after this long and commits what went out, so that its transaction does not stay open.
BATCH_SECONDS = 30
#: A broker that is slower than this is down.
BROKER_TIMEOUT_SECONDS = 10


class BrokerUnavailable(IdempotencyError):
    """The broker cannot be reached. No job was lost and no attempt burnt: start the broker, or correct its address, and
    the next pass goes on."""


class OfferAgain(IdempotencyError):
    """The broker took the job but may lose it: the row stays, and is offered again after ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"offered again after {seconds:g} s")
        self.seconds = seconds


class TookEffect(IdempotencyError):
    """The job that was offered again is done: its row is deleted, and it is not counted again."""


class NoEffect(IdempotencyError):
    """The job was handed over as often as a job is, and never took effect. Look at the workers and at what it raises there,
    then ``manage.py staged_jobs retry``."""


class HandOverOnCommit(IdempotencyError):
    """The hand-over registered a callback with transaction.on_commit(), which runs after the staged row is deleted: a failure
    there would lose the job. Hand over at once: django-rq with commit_mode="auto", Celery without delay_on_commit()."""


class Backend(Protocol):
    """Where the jobs of a queue go: what a dotted path in ``IDEMPOTENCY["ENQUEUERS"]`` names. Built once, without arguments.

    A class with ``runs_functions = True`` says that its workers call ``call_job``: then ``stage_job`` and the enqueuer refuse
    the name of a function that is not in JOB_MODULES.
    """

    def hand_over(
        self, queue: str, jobs: Sequence[StagedJob]
    ) -> Mapping[UUID, Exception] | Awaitable[Mapping[UUID, Exception]]:
        """Give ``jobs`` to the broker and return the refused ones by their id; the others are its own from here on.

        An answer of another kind refuses them all. It may be ``async def``.
        A job refused with BrokerUnavailable was not looked at: it burns no attempt. One with OfferAgain was taken and stays
        staged; when it comes here again and took effect meanwhile, it is answered with TookEffect. Raises BrokerUnavailable
        when nothing can be taken. Any other error makes the enqueuer try the jobs one by one. It must return within the
        timeouts of the database: no call without a timeout of BROKER_TIMEOUT_SECONDS or less, and no more after BATCH_SECONDS.
        It must send at once: a callback of ``transaction.on_commit`` makes the hand-over fail with HandOverOnCommit.
        """
        ...


class OneByOne:
    """The base of a backend whose broker takes one job at a time."""

    #: For a queue that loses a job when a worker dies at the wrong moment: the job stays staged until the inbox has it, and is
    #: handed over again after so long, then after double the time, and so on. None: the queue keeps what it took.
    follow_up_seconds: float | None = None
    #: False when handing over touches no database. It then needs no savepoint.
    uses_database = True

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, Exception]:
        """Hand over one job after the other, for BATCH_SECONDS at most; what one raises refuses that one alone."""
        refusals: dict[UUID, Exception] = dict.fromkeys(self._done(jobs), TookEffect())
        deadline = time.monotonic() + BATCH_SECONDS
        waiting = [job for job in jobs if job.pk not in refusals]
        for position, job in enumerate(waiting):
            try:
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(f"The broker took {position} of {len(jobs)} jobs in {BATCH_SECONDS} s.")
                taken_before = 0 if job.last_error else job.attempts  # Refusals are counted in the same column.
                if self.follow_up_seconds and taken_before >= MAX_ATTEMPTS:
                    raise NoEffect
                # A queue may live in this very database: what is refused there must not break the enqueuer's transaction.
                with hand_over_savepoint(job._state.db) if self.uses_database else nullcontext():
                    refuse_generator(f"What takes the jobs of {queue!r}", awaited(self.hand_over_one(queue, job)))
                if self.follow_up_seconds:
                    refusals[job.pk] = OfferAgain(self.follow_up_seconds * 2**taken_before)
            except BrokerUnavailable as error:  # Those before it are the broker's: they must not go out again.
                return refusals | dict.fromkeys((left.pk for left in waiting[position:]), error)
            except Exception as error:
                refusals[job.pk] = error
        return refusals

    def _done(self, jobs: Sequence[StagedJob]) -> list[UUID]:
        offered = [str(job.pk) for job in jobs if self.follow_up_seconds and (job.attempts or job.last_error)]
        try:
            return [UUID(done) for done in took_effect(STAGED_JOBS, offered, using=jobs[0]._state.db)]
        except (OperationalError, InterfaceError) as error:
            raise BrokerUnavailable(f"Whether jobs took effect cannot be read at the moment: {error}") from error

    def hand_over_one(self, queue: str, job: StagedJob) -> object:
        """Give one job to the broker; raise what it is refused with, or BrokerUnavailable. A coroutine is awaited."""
        raise NotImplementedError


class CallableBackend(OneByOne):
    """What a dotted path to a function becomes: ``function(job)`` takes the job, or raises."""

    def __init__(self, function: Callable[[StagedJob], object]) -> None:
        self._function = function

    def hand_over_one(self, queue: str, job: StagedJob) -> object:
        """Call the function."""
        return self._function(job)


@contextmanager
def hand_over_savepoint(alias: str | None) -> Iterator[None]:
    """Open a savepoint for a hand-over. Raises HandOverOnCommit when the block registered a callback for the COMMIT of any
    database; the rollback to the savepoint drops the callbacks of this one."""
    with transaction.atomic(using=alias):
        before = _callbacks()
        yield
        if _callbacks() > before:
            raise HandOverOnCommit


def _callbacks() -> int:
    """Return how many callbacks wait for a COMMIT, without those of this app, on which no job depends."""
    waiting = (entry[1] for connection in connections.all(initialized_only=True) for entry in connection.run_on_commit)
    return sum(not str(getattr(callback, "__module__", "")).startswith("idempotency.") for callback in waiting)


def backend_of(queue: str) -> Backend | None:
    """Return the backend that ``IDEMPOTENCY["ENQUEUERS"]`` names for a queue, or None when it names none."""
    path = backend_path(queue)
    return None if path is None else _built(path)


@lru_cache(maxsize=32)
def _built(path: str) -> Backend:
    named = import_string(path)
    backend: Backend = named() if isinstance(named, type) else CallableBackend(named)
    return backend
