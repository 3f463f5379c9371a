"""The enqueuer: moves staged jobs to their broker, at least once and with the same id.

A batch is one transaction: lock the rows, hand them over, delete those that were taken. After a crash the same ids are handed
over again. Rows are deleted by id, never by range, because a lower id may commit later than a higher one.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

from django.db import connections, router
from django.db.models import Count, F, Max, Q, QuerySet
from django.db.models.deletion import Collector
from django.db.models.functions import Now

from idempotency._hand_over import hand_over
from idempotency._store import replication
from idempotency._store.transactions import durable_transaction
from idempotency._text import error_text, storable
from idempotency.backends import (
    BATCH_SECONDS,
    BROKER_TIMEOUT_SECONDS,
    MAX_ATTEMPTS,
    NAME_MAX_ATTEMPTS,
    BrokerUnavailable,
    NoEffect,
    NotOffered,
    OfferAgain,
    Results,
    TookEffect,
)
from idempotency.exceptions import JobNotAllowed
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")

#: The condition of jobs that are due.
_DUE = Q(failed_at__isnull=True, run_at__lte=Now())

#: The wait after the first refusal. It doubles with each refusal, up to an hour; ten refusals take 1.4 hours.
BACKOFF_SECONDS = 10
#: The idle time limit of the transaction of a batch. A lower limit would end the transaction while the batch waits for a
#: broker.
IDLE_SECONDS = 4 * BATCH_SECONDS

#: The time for which a queue is left out after its broker could not be reached: the longest pause of a loop after a failed
#: pass. The pass then tries the queue again, because a pass may last much longer than the outage.
UNREACHABLE_SECONDS = 10


@dataclass(frozen=True, slots=True)
class EnqueuePass:
    """The counts of one pass: jobs that were handed over, that were refused and will be retried, and that failed."""

    handed_over: int = 0
    refused: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Backlog:
    """The waiting jobs: the age of the oldest due job in seconds (0.0 without one), and the numbers of due and failed jobs."""

    oldest_seconds: float
    depth: int
    failed: int


@dataclass(slots=True)
class _Pass:
    """The state of a pass: its counts, the marks of the queues whose broker could not be reached, and what it has logged."""

    counts: Counter[str] = field(default_factory=Counter)
    unreachable: dict[str, BrokerUnavailable] = field(default_factory=dict)
    #: Queues that used up the time of a batch. The others have their turn first.
    had_turn: set[str] = field(default_factory=set)
    _until: dict[str, float] = field(default_factory=dict)
    _changed: bool = False
    _logged: set[tuple[str, str]] = field(default_factory=set)

    def mark(self, queue: str, error: BrokerUnavailable) -> None:
        self.unreachable[queue] = error
        self._until[queue] = time.monotonic() + UNREACHABLE_SECONDS
        self._changed = True

    def left_out(self) -> list[str]:
        """Remove the expired marks and return the queues of the others. After a batch that set a mark, none is removed:
        otherwise many slow brokers could take all the time in turn, and a pass without other jobs might not end."""
        if not self._changed:
            now = time.monotonic()
            self.unreachable = {queue: error for queue, error in self.unreachable.items() if self._until[queue] > now}
        self._changed = False
        return list(self.unreachable)

    def log_marks(self) -> None:
        for queue, error in self.unreachable.items():
            text = "queue %r is left out for %d s, and the pass continues: %s"
            self.warn_once("queue", queue, text, queue, UNREACHABLE_SECONDS, error)

    def warn_once(self, kind: str, about: str, text: str, *values: object) -> None:
        if (kind, about) not in self._logged:
            self._logged.add((kind, about))
            logger.warning(text, *values)


def backlog(*, using: str | None = None) -> Backlog:
    """Measure the waiting jobs by the clock of the database, for metrics and health checks. Nothing is written.

    The age of a job counts from its ``run_at``. If this age exceeds the time of a few passes, either no enqueuer runs, or a
    broker is unavailable.
    """
    counts = StagedJob.objects.using(using or router.db_for_write(StagedJob)).aggregate(
        oldest=Max(Now() - F("run_at"), filter=_DUE),
        depth=Count("pk", filter=_DUE),
        failed=Count("pk", filter=Q(failed_at__isnull=False)),
    )
    return Backlog(max(0.0, (counts["oldest"] or timedelta()).total_seconds()), counts["depth"], counts["failed"])


def enqueue_once(
    *, batch_size: int = 1000, dry_run: bool = False, using: str | None = None, stop: Callable[[], bool] = lambda: False
) -> EnqueuePass:
    """Hand over all jobs that are due, each batch in its own transaction. Several enqueuers may run concurrently.

    A job that the broker took is deleted. A refused job stays with its error, and is due again after a wait that grows. After
    MAX_ATTEMPTS refusals it has failed.

    - ``batch_size``: the number of jobs of one transaction.
    - ``dry_run``: only count the jobs that are due.
    - ``stop``: called before each batch; True ends the pass.

    A queue whose broker could not be reached is left out for UNREACHABLE_SECONDS, then offered again in the same pass.
    Raises BrokerUnavailable at the end of the pass if a queue is still left out then. The jobs of the other queues were handed
    over before.
    Raises NotReplicated if the standbys do not confirm the jobs of a batch, which stay as they are (CONFIRM_REPLICATED).
    """
    alias = using or router.db_for_write(StagedJob)
    if dry_run:
        return EnqueuePass(handed_over=_due(alias).count())
    state = _Pass()
    while not stop() and _move_batch(alias, batch_size, state):
        pass
    if state.unreachable:
        queues = "; ".join(f"queue {queue!r}: {error}" for queue, error in state.unreachable.items())
        raise BrokerUnavailable(
            f"{state.counts['handed_over']} jobs were handed over; no attempt was counted for the others. {queues}"
        )
    return EnqueuePass(**state.counts)


def _due(alias: str) -> QuerySet[StagedJob]:
    return StagedJob.objects.using(alias).filter(_DUE)


def _move_batch(alias: str, batch_size: int, state: _Pass) -> bool:
    # A serialization failure after the hand-over would repeat it, so the level is fixed.
    with durable_transaction("read committed", using=alias):
        _hold_transaction(alias)
        waiting = _due(alias).exclude(queue__in=state.left_out()).order_by("run_at", "pk").select_for_update(skip_locked=True)
        jobs = list(waiting.exclude(queue__in=state.had_turn)[:batch_size])
        if not jobs and state.had_turn:
            state.had_turn.clear()
            jobs = list(waiting[:batch_size])
        if not jobs:
            return False
        state.log_marks()  # If no job is left, the exception at the end of the pass reports them.
        replication.confirm(alias)
        by_queue: dict[str, list[StagedJob]] = defaultdict(list)
        for job in jobs:
            by_queue[job.queue].append(job)
        results: Results = {}
        deadline = time.monotonic() + BATCH_SECONDS
        for queue, of_queue in by_queue.items():
            results |= hand_over(queue, of_queue, deadline)
            connections[alias].validate_no_broken_transaction()  # The next pass would repeat the hand-overs of other queues.
            if time.monotonic() > deadline:
                state.had_turn.add(queue)
                break  # Jobs without a result stay due, for the next batch.
        else:
            state.had_turn.clear()
        _record(alias, [job for job in jobs if job.pk in results], results, state)
    return True


def _record(alias: str, jobs: Sequence[StagedJob], results: Results, state: _Pass) -> None:
    done: list[UUID] = []
    later: dict[float, list[UUID]] = defaultdict(list)
    for job in jobs:
        match results[job.pk]:
            case None:
                done.append(job.pk)
                state.counts["handed_over"] += 1
            case TookEffect():
                done.append(job.pk)
            case OfferAgain(seconds):
                later[seconds].append(job.pk)
                state.counts["handed_over"] += 1
            case NotOffered():
                pass  # It is still due.
            case BrokerUnavailable() as error:
                state.mark(job.queue, error)
            case error:
                state.counts[_record_refusal(alias, job, error, state)] += 1
    _delete(alias, done)
    for seconds, ids in later.items():
        StagedJob.objects.using(alias).filter(pk__in=ids).update(
            hand_overs=F("hand_overs") + 1, refusals=0, last_error="", run_at=Now() + timedelta(seconds=seconds)
        )


def _delete(alias: str, ids: list[UUID]) -> None:
    """Delete the jobs with these ids, with the cascades of other models."""
    jobs = StagedJob.objects.using(alias).filter(pk__in=ids)
    if connections[alias].vendor != "postgresql" or not Collector(using=alias).can_fast_delete(jobs):
        jobs.delete()
        return
    with connections[alias].cursor() as cursor:  # One array is much faster than a thousand parameters.
        cursor.execute(f'DELETE FROM "{StagedJob._meta.db_table}" WHERE id = ANY(%s)', [ids])  # noqa: S608  # nosec B608


def _hold_transaction(alias: str) -> None:
    """Set the time limits of the transaction; on SQLite, take the write lock."""
    connection = connections[alias]
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT set_config('idle_in_transaction_session_timeout', %s, true), set_config('lock_timeout', %s, true)",
                [f"{IDLE_SECONDS}s", f"{BROKER_TIMEOUT_SECONDS}s"],
            )
    else:
        # An UPDATE without rows locks the file. Other enqueuers read the jobs after this transaction has deleted its own.
        StagedJob.objects.using(alias).filter(job_name="").update(refusals=F("refusals"))


def _record_refusal(alias: str, job: StagedJob, error: BaseException, state: _Pass) -> str:
    """Write a refusal. Return its count: "refused" if the job will be retried, else "failed"."""
    text = storable(error_text(error))
    row = StagedJob.objects.using(alias).filter(pk=job.pk)
    refusals = _refusals(job, error)
    most = NAME_MAX_ATTEMPTS if isinstance(error, JobNotAllowed) else MAX_ATTEMPTS
    if refusals >= most or isinstance(error, NoEffect):
        row.update(refusals=refusals, last_error=text, failed_at=Now())
        logger.error("staged job %s (%s) has failed: %s", job.pk, job.job_name, text)
        return "failed"
    wait = timedelta(seconds=min(BACKOFF_SECONDS * 2 ** (refusals - 1), 3600))
    row.update(refusals=refusals, last_error=text, run_at=Now() + wait)
    if refusals == 1:  # The job leaves the backlog for hours or days. A bad deploy may cause the same error for many jobs.
        about = f"{job.job_name}: {text.partition(chr(10))[0]}"
        warning = "staged job %s (%s) was refused, and is offered again in %d s: %s"
        state.warn_once("refused", about, warning, job.pk, job.job_name, wait.total_seconds(), text)
    return "refused"


def _refusals(job: StagedJob, error: BaseException) -> int:
    if not isinstance(error, JobNotAllowed | NoEffect) and job.last_error.startswith(f"{JobNotAllowed.__name__}:"):
        return 1  # The refusals before had a higher limit.
    return job.refusals if isinstance(error, NoEffect) else job.refusals + 1
