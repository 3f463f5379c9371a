"""The enqueuer: moves staged jobs to their broker, at least once and with the same id.

A batch is one transaction: lock the rows, hand them over, delete those that were taken. A crash in between hands the same ids
over again and loses none. Rows are deleted by their ids, never "up to the last": a lower id may commit later than a higher one.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from django.db import connections, router
from django.db.models import Case, Count, F, Max, Q, QuerySet, When
from django.db.models.deletion import Collector
from django.db.models.functions import Now

from idempotency.backends import (
    BATCH_SECONDS,
    BROKER_TIMEOUT_SECONDS,
    MAX_ATTEMPTS,
    NAME_MAX_ATTEMPTS,
    Backend,
    BrokerUnavailable,
    NoEffect,
    OfferAgain,
    TookEffect,
    backend_of,
    hand_over_savepoint,
)
from idempotency.contexts import awaited
from idempotency.exceptions import JobNotAllowed
from idempotency.jobs import not_allowed
from idempotency.keys import printable
from idempotency.models import StagedJob
from idempotency.transactions import durable_transaction

logger = logging.getLogger("idempotency")

#: The wait after the first refusal; it doubles with each, up to an hour. Ten refusals take 1.4 hours.
BACKOFF_SECONDS = 10
#: While a batch waits for a broker, the database must not end its transaction, or the same jobs would go out again and again.
IDLE_SECONDS = 4 * BATCH_SECONDS


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
    counts = StagedJob.objects.using(using or router.db_for_write(StagedJob)).aggregate(
        oldest=Max(Now() - F("run_at"), filter=due),
        depth=Count("pk", filter=due),
        failed=Count("pk", filter=Q(failed_at__isnull=False)),
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
    # Whatever the connection's own level: a failure to serialize would come after the hand-over, and repeat it.
    with durable_transaction("read committed", using=alias):
        _hold_transaction(alias)
        waiting = _due(alias).exclude(queue__in=list(unreachable)).order_by("run_at", "pk")
        jobs = list(waiting.select_for_update(skip_locked=True)[:batch_size])
        if not jobs:
            return False
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
        _delete(alias, done)
        for seconds, ids in later.items():
            StagedJob.objects.using(alias).filter(pk__in=ids).update(
                # Refusals before it were another matter: what is counted from here on are hand-overs.
                attempts=Case(When(last_error="", then=F("attempts") + 1), default=1),
                last_error="",
                run_at=Now() + timedelta(seconds=seconds),
            )
    return True


def _delete(alias: str, ids: list[UUID]) -> None:
    """Delete the jobs with these ids, and do with the rows that point at them what their models say."""
    jobs = StagedJob.objects.using(alias).filter(pk__in=ids)
    if connections[alias].vendor != "postgresql" or not Collector(using=alias).can_fast_delete(jobs):
        jobs.delete()
        return
    with connections[alias].cursor() as cursor:  # One array: a thousand parameters cost as much as handing over does.
        cursor.execute(f'DELETE FROM "{StagedJob._meta.db_table}" WHERE id = ANY(%s)', [ids])  # noqa: S608  # nosec B608


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
    try:
        if (backend := backend_of(queue)) is None:
            raise LookupError(f"IDEMPOTENCY['ENQUEUERS'] names no backend for the queue {queue!r}, and none for '*'.")
    except BrokerUnavailable:
        raise
    except Exception as error:  # What is raised here must not undo what other queues took.
        yield jobs, dict.fromkeys((job.pk for job in jobs), error)
        return
    if getattr(backend, "runs_functions", False) and (unknown := not_allowed(jobs)):
        yield [job for job in jobs if job.pk in unknown], unknown
        if not (jobs := [job for job in jobs if job.pk not in unknown]):
            return
    try:
        refusals = _refusals(backend, queue, jobs)
        yield jobs, refusals
        return
    except BrokerUnavailable:
        raise
    except Exception as error:
        logger.info("queue %r refused a batch of %d jobs, which are handed over one by one: %s", queue, len(jobs), error)
    for job in jobs:
        try:
            refusals = _refusals(backend, queue, [job])
        except BrokerUnavailable:
            raise
        except Exception as error:
            refusals = {job.pk: error}
        yield [job], refusals
        if time.monotonic() > deadline:
            return


def _refusals(backend: Backend, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, Exception]:
    """Let the backend hand the jobs over, and return those that it refused; all of them when it does not say which."""
    with hand_over_savepoint(jobs[0]._state.db):
        refusals = awaited(backend.hand_over(queue, jobs))
    ids = {job.pk for job in jobs}
    if isinstance(refusals, Mapping) and refusals.keys() <= ids:
        return refusals
    # Not one by one: it may have sent them.
    said = TypeError(f"hand_over() of the backend of {queue!r} must return a dict of job ids and errors, not {refusals!r:.100}")
    return dict.fromkeys(ids, said)


def _record_refusal(alias: str, job: StagedJob, error: Exception) -> str:
    """Write the refusal down; return the name of its count: the job is due again later ("refused"), or "failed"."""
    text = printable(f"{type(error).__name__}: {error}")
    row = StagedJob.objects.using(alias).filter(pk=job.pk)
    refusals = (job.attempts if job.last_error else 0) + 1  # Hand-overs are counted in the same column.
    most = NAME_MAX_ATTEMPTS if isinstance(error, JobNotAllowed) else MAX_ATTEMPTS
    if refusals >= most or isinstance(error, NoEffect):
        row.update(attempts=max(refusals, job.attempts), last_error=text, failed_at=Now())
        logger.error("staged job %s (%s) is given up: %s", job.pk, job.job_name, text)
        return "failed"
    wait = timedelta(seconds=min(BACKOFF_SECONDS * 2 ** (refusals - 1), 3600))
    row.update(attempts=refusals, last_error=text, run_at=Now() + wait)
    return "refused"
