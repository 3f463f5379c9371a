"""The enqueuer: moves staged jobs to their broker, at least once and with the same id.

A batch is one transaction: lock the rows, hand them over, delete those that were taken. A crash in between hands the same ids
over again and loses none. Rows are deleted by their ids, never "up to the last": a lower id may commit later than a higher one.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Protocol
from uuid import UUID

from django.db import InterfaceError, OperationalError, connections, router, transaction
from django.db.models import Count, DurationField, ExpressionWrapper, F, Max, Q, QuerySet
from django.db.models.functions import Now
from django.utils.module_loading import import_string

from idempotency import conf
from idempotency.exceptions import IdempotencyError
from idempotency.inbox import STAGED_JOBS, took_effect
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")

#: After so many refusals a job is given up on, with its error, for a person to look at.
MAX_ATTEMPTS = 10
#: The wait after the first refusal; it doubles with each, up to an hour. All ten together are a good two hours.
BACKOFF_SECONDS = 10
#: A batch stops handing over after this long and commits what went out, so that its transaction does not stay open.
BATCH_SECONDS = 30
#: While a batch waits for a broker, the database must not end its transaction, or the same jobs would go out again and again.
IDLE_SECONDS = 4 * BATCH_SECONDS
#: A broker that is slower than this is down. Below all the limits above.
BROKER_TIMEOUT_SECONDS = 10
MAX_ERROR_LENGTH = 2000


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


class Backend(Protocol):
    """Where the jobs of a queue go: what a dotted path in ``IDEMPOTENCY["ENQUEUERS"]`` names. Built once, without arguments."""

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, Exception]:
        """Give ``jobs`` to the broker and return the refused ones by their id; the others are its own from here on.

        A job refused with BrokerUnavailable was not looked at: it burns no attempt. One with OfferAgain was taken and stays
        staged; when it comes here again and took effect meanwhile, it is answered with TookEffect. Raises BrokerUnavailable
        when nothing can be taken. Any other error makes the enqueuer try the jobs one by one. It must return within the
        timeouts of the database: no call without a timeout of BROKER_TIMEOUT_SECONDS or less, and no more after BATCH_SECONDS.
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
                if self.follow_up_seconds and job.attempts >= MAX_ATTEMPTS:
                    raise NoEffect
                # A queue may live in this very database: what is refused there must not break the enqueuer's transaction.
                with transaction.atomic(using=job._state.db) if self.uses_database else nullcontext():
                    self.hand_over_one(queue, job)
                if self.follow_up_seconds:
                    refusals[job.pk] = OfferAgain(self.follow_up_seconds * 2**job.attempts)
            except BrokerUnavailable as error:  # Those before it are the broker's: they must not go out again.
                return refusals | dict.fromkeys((left.pk for left in waiting[position:]), error)
            except Exception as error:
                refusals[job.pk] = error
        return refusals

    def _done(self, jobs: Sequence[StagedJob]) -> list[UUID]:
        offered = [str(job.pk) for job in jobs if self.follow_up_seconds and job.attempts]
        try:
            return [UUID(done) for done in took_effect(STAGED_JOBS, offered)]
        except (OperationalError, InterfaceError) as error:
            raise BrokerUnavailable(f"Whether jobs took effect cannot be read at the moment: {error}") from error

    def hand_over_one(self, queue: str, job: StagedJob) -> None:
        """Give one job to the broker; raise what it is refused with, or BrokerUnavailable."""
        raise NotImplementedError


class CallableBackend(OneByOne):
    """What a dotted path to a function becomes: ``function(job)`` takes the job, or raises."""

    def __init__(self, function: Callable[[StagedJob], object]) -> None:
        self._function = function

    def hand_over_one(self, queue: str, job: StagedJob) -> None:
        """Call the function."""
        self._function(job)


@dataclass(frozen=True, slots=True)
class EnqueuePass:
    """What one pass did: jobs that the broker took, that it refused and will be offered again, and that were given up on."""

    handed_over: int = 0
    refused: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits: the age of the oldest job that is due in seconds, 0.0 without one; how many are due, how many have failed."""

    oldest_seconds: float
    depth: int
    failed: int


def backlog(*, using: str | None = None) -> Backlog:
    """Measure what waits for the enqueuer, by the database's clock; nothing is written. For metrics and health checks.

    A job that is due is counted from its ``run_at``: an age above a few passes means that no enqueuer runs, or that a broker
    takes nothing.
    """
    due = Q(failed_at__isnull=True, run_at__lte=Now())
    age = ExpressionWrapper(Now() - F("run_at"), output_field=DurationField())
    counts = StagedJob.objects.using(using or router.db_for_write(StagedJob)).aggregate(
        oldest=Max(age, filter=due), depth=Count("pk", filter=due), failed=Count("pk", filter=Q(failed_at__isnull=False))
    )
    return Backlog(max(0.0, (counts["oldest"] or timedelta()).total_seconds()), counts["depth"], counts["failed"])


def enqueue_once(
    *, batch_size: int = 1000, dry_run: bool = False, using: str | None = None, stop: Callable[[], bool] = lambda: False
) -> EnqueuePass:
    """Hand over all jobs that are due, batch by batch, each in a transaction of its own; several may run at once.

    A job that the broker took is deleted; a refused one stays, with its error, and is due again after a wait that grows; after
    MAX_ATTEMPTS it is failed. ``stop`` is asked before each batch. ``dry_run`` only counts the jobs that are due.

    Raises BrokerUnavailable when a broker could not be reached, after the jobs of the other queues were handed over.
    """
    alias = using or router.db_for_write(StagedJob)
    if dry_run:
        return EnqueuePass(handed_over=_due(alias).count())
    counts: Counter[str] = Counter()
    unreachable: dict[str, BrokerUnavailable] = {}
    while not stop() and _move_batch(alias, batch_size, counts, unreachable):
        pass
    if unreachable:
        queues = "; ".join(f"queue {queue!r}: {error}" for queue, error in unreachable.items())
        raise BrokerUnavailable(f"{counts['handed_over']} jobs were handed over, no attempt was burnt for the others. {queues}")
    return EnqueuePass(**counts)


def _due(alias: str) -> QuerySet[StagedJob]:
    return StagedJob.objects.using(alias).filter(failed_at__isnull=True, run_at__lte=Now())


def _move_batch(alias: str, batch_size: int, counts: Counter[str], unreachable: dict[str, BrokerUnavailable]) -> bool:
    """Move one batch and commit; return whether there was one."""
    with transaction.atomic(using=alias, durable=True):
        _hold_transaction(alias)
        waiting = _due(alias).exclude(queue__in=list(unreachable)).order_by("run_at", "pk")
        jobs = list(waiting.select_for_update(skip_locked=True)[:batch_size])
        by_queue: dict[str, list[StagedJob]] = defaultdict(list)
        for job in jobs:
            by_queue[job.queue].append(job)
        done: list[UUID] = []
        later: dict[float, list[UUID]] = defaultdict(list)
        deadline = time.monotonic() + BATCH_SECONDS
        for queue, of_queue in by_queue.items():
            try:
                for part, refusals in _hand_over(queue, of_queue, deadline):
                    for job in part:
                        match refusals.get(job.pk):
                            case None:
                                done.append(job.pk)
                                counts["handed_over"] += 1
                            case TookEffect():
                                done.append(job.pk)
                            case OfferAgain(seconds=seconds):
                                later[seconds].append(job.pk)
                                counts["handed_over"] += 1
                            case BrokerUnavailable() as error:
                                unreachable[queue] = error
                            case error:
                                counts[_record_refusal(alias, job, error)] += 1
            except BrokerUnavailable as error:
                unreachable[queue] = error
            if time.monotonic() > deadline:
                break  # What is left stays where it is, for the next batch.
        StagedJob.objects.using(alias).filter(pk__in=done).delete()
        for seconds, ids in later.items():
            wait = timedelta(seconds=seconds)
            StagedJob.objects.using(alias).filter(pk__in=ids).update(attempts=F("attempts") + 1, run_at=Now() + wait)
    return bool(jobs)


def _hold_transaction(alias: str) -> None:
    """Keep the database from ending this transaction while it waits for a broker; on SQLite, be the one that writes."""
    connection = connections[alias]
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT set_config('idle_in_transaction_session_timeout', %s, true), set_config('lock_timeout', %s, true)",
                [f"{IDLE_SECONDS}s", f"{BROKER_TIMEOUT_SECONDS}s"],
            )
    else:  # No row is locked there: an UPDATE of nothing takes the file, so that others read after this one's DELETE.
        StagedJob.objects.using(alias).filter(job_name="").update(attempts=F("attempts"))


def _hand_over(
    queue: str, jobs: Sequence[StagedJob], deadline: float
) -> Iterator[tuple[Sequence[StagedJob], Mapping[UUID, Exception]]]:
    """Yield jobs with the refused ones among them: all together, or one by one when one of them spoils the batch."""
    path = conf.get().ENQUEUERS.get(queue) or conf.get().ENQUEUERS.get("*")
    if path is None:
        problem = LookupError(f"IDEMPOTENCY['ENQUEUERS'] names no backend for the queue {queue!r}, and none for '*'.")
        yield jobs, dict.fromkeys((job.pk for job in jobs), problem)
        return
    backend = _backend(path)
    try:
        with transaction.atomic(using=jobs[0]._state.db):
            refusals = backend.hand_over(queue, jobs)
        yield jobs, refusals
        return
    except BrokerUnavailable:
        raise
    except Exception as error:
        logger.info("queue %r refused a batch of %d jobs, which are handed over one by one: %s", queue, len(jobs), error)
    for job in jobs:
        try:
            with transaction.atomic(using=job._state.db):
                refusals = backend.hand_over(queue, [job])
        except BrokerUnavailable:
            raise
        except Exception as error:
            refusals = {job.pk: error}
        yield [job], refusals
        if time.monotonic() > deadline:
            return


@lru_cache(maxsize=32)
def _backend(path: str) -> Backend:
    named = import_string(path)
    backend: Backend = named() if isinstance(named, type) else CallableBackend(named)
    return backend


def _record_refusal(alias: str, job: StagedJob, error: Exception) -> str:
    """Write the refusal down; return the name of its count: the job is due again later ("refused"), or "failed"."""
    text = f"{type(error).__name__}: {error}".replace("\0", "")[:MAX_ERROR_LENGTH]
    row = StagedJob.objects.using(alias).filter(pk=job.pk)
    if job.attempts + 1 >= MAX_ATTEMPTS:
        row.update(attempts=F("attempts") + 1, last_error=text, failed_at=Now())
        logger.error("staged job %s (%s) is given up after %d refusals: %s", job.pk, job.job_name, MAX_ATTEMPTS, text)
        return "failed"
    wait = timedelta(seconds=min(BACKOFF_SECONDS * 2**job.attempts, 3600))
    row.update(attempts=F("attempts") + 1, last_error=text, run_at=Now() + wait)
    return "refused"
