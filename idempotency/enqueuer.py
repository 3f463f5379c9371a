"""The enqueuer: moves staged jobs to their broker, at least once and with the same id.

A batch is one transaction: lock the rows, hand them over, delete those that were taken. For a
backend with ``lease_seconds`` it is two: one claims the rows, and after the hand-over the other one
deletes them. After a crash the same ids are handed over again. Rows are deleted by id, never by
range, because a lower id may commit later than a higher one.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from django.db import router
from django.db.models import Count, F, Max, Q
from django.db.models.functions import Now

from idempotency._batch import DUE, Batch, Claim, due, first_statement, read, seconds_of_batch
from idempotency._engine import replication
from idempotency._engine.transactions import durable_transaction
from idempotency._groups import IN_TURN
from idempotency._hand_over import hand_over, hand_over_claim
from idempotency._outcomes import Log, was_handed_over, write
from idempotency._unwritten import (
    unwritten,
    write_after_rollback,
    write_claim,
    write_left,
    write_locked,
)
from idempotency.backends import BrokerUnavailable, TookEffect
from idempotency.exceptions import NotReplicated
from idempotency.models import StagedJob

#: The time for which a queue is left out after its broker could not be reached: the longest pause
#: of a loop after a failed pass. The pass then tries the queue again, because a pass may last much
#: longer than the outage.
UNREACHABLE_SECONDS = 10

#: By database: the number of jobs of the next batch, after a batch that failed or took too long.
_sizes: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class EnqueuePass:
    """The counts of one pass: jobs that were handed over, that were refused and will be retried,
    and that failed."""

    handed_over: int = 0
    refused: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Backlog:
    """The waiting jobs: the age of the oldest due job in seconds (0.0 without one), and the numbers
    of due and failed jobs."""

    oldest_seconds: float
    due_jobs: int
    failed_jobs: int


@dataclass(slots=True)
class _Pass:
    """The state of a pass: its counts, the marks of the queues whose broker could not be reached,
    and what it has logged."""

    counts: Counter[str] = field(default_factory=Counter)
    unreachable: dict[str, BrokerUnavailable] = field(default_factory=dict)
    #: Queues that used up the time of a batch. The others have their turn first.
    had_turn: set[str] = field(default_factory=set)
    log: Log = field(default_factory=Log)
    _until: dict[str, float] = field(default_factory=dict)
    _changed: bool = False

    def mark(self, queue: str, error: BrokerUnavailable) -> None:
        self.unreachable[queue] = error
        self._until[queue] = time.monotonic() + UNREACHABLE_SECONDS
        self._changed = True

    def left_out(self) -> list[str]:
        """Remove the expired marks, and return the marked queues. After a batch that set a mark, no
        mark is removed. Otherwise many slow brokers could take all the time in turn, and a pass
        without other jobs might not end."""
        if not self._changed:
            now = time.monotonic()
            self.unreachable = {
                queue: error
                for queue, error in self.unreachable.items()
                if self._until[queue] > now
            }
        self._changed = False
        return list(self.unreachable)

    def log_marks(self) -> None:
        for queue, error in self.unreachable.items():
            text = "queue %r is left out for %d s, and the pass continues: %s"
            self.log.add("queue", queue, text, queue, UNREACHABLE_SECONDS, error)


def backlog(*, using: str | None = None) -> Backlog:
    """Measure the waiting jobs by the clock of the database, for metrics and health checks. Nothing
    is written.

    The age of a job counts from its ``run_at``. If this age exceeds the time of a few passes,
    either no enqueuer runs, or a broker is unavailable.
    """
    counts = StagedJob.objects.using(using or router.db_for_write(StagedJob)).aggregate(
        oldest=Max(Now() - F("run_at"), filter=DUE & IN_TURN),
        due=Count("pk", filter=DUE & IN_TURN),
        failed=Count("pk", filter=Q(failed_at__isnull=False)),
    )
    return Backlog(
        max(0.0, (counts["oldest"] or timedelta()).total_seconds()),
        counts["due"],
        counts["failed"],
    )


def enqueue_once(
    *,
    batch_size: int = 1000,
    dry_run: bool = False,
    using: str | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> EnqueuePass:
    """Hand over all jobs that are due, each batch in its own transaction. Several enqueuers may run
    concurrently.

    A job that the broker took is deleted. A refused job stays with its error, and is due again
    after a wait that grows. After MAX_ATTEMPTS refusals it has failed.

    - ``batch_size``: the number of jobs of one transaction. After a transaction that failed or took
      too long, the number is lower for a while.
    - ``dry_run``: only count the jobs that are due.
    - ``stop``: called before each batch; True ends the pass.

    A queue whose broker could not be reached is left out for UNREACHABLE_SECONDS, then offered
    again in the same pass.
    Raises BrokerUnavailable at the end of the pass if a queue is still left out then. The jobs of
    the other queues were handed over before.
    Raises NotReplicated if the standbys do not confirm the jobs of a batch, which stay as they are
    (CONFIRM_REPLICATED).
    """
    alias = using or router.db_for_write(StagedJob)
    if dry_run:
        return EnqueuePass(handed_over=due(alias).count())
    state = _Pass()
    while not stop() and _move_batch(alias, batch_size, state):
        pass
    state.counts += write_locked(alias, state.log)
    if state.unreachable:
        queues = "; ".join(
            f"queue {queue!r}: {error}" for queue, error in state.unreachable.items()
        )
        raise BrokerUnavailable(
            f"{state.counts['handed_over']} jobs were handed over; no attempt was counted for the"
            f" others. {queues}"
        )
    return EnqueuePass(**state.counts)


def _move_batch(alias: str, batch_size: int, state: _Pass) -> bool:
    """Move one batch. Return whether there was a job to move."""
    state.counts += write_left(alias, state.log)
    size = min(batch_size, _sizes.get(alias, batch_size))
    batch, first, begun = Batch(alias), first_statement(), time.monotonic()
    try:
        # A serialization failure after the hand-over would repeat it, so the level is fixed.
        with durable_transaction("read committed", using=alias, first=first):
            batch.deadline = begun + seconds_of_batch(alias, first)
            _read(batch, size, state)
            if not batch.jobs:
                return False
            # If no job is left, the exception at the end of the pass reports them.
            state.log_marks()
            replication.confirm(alias)
            _hand_over(batch, state)
            written = _write(batch, state.log)
    except NotReplicated:
        raise
    except Exception as error:
        _sizes[alias], batch.claim = max(1, (batch.locked or size) // 2), None
        if not batch.offered:
            raise
        written = write_after_rollback(batch, error, state.log)
    else:
        handed_over = len(batch.results)
        whole = handed_over + batch.left_to_claims == batch.locked
        _sizes[alias] = 2 * (size if whole else max(1, handed_over))
    finally:
        state.log.write()
    state.counts += written
    if batch.claim is not None:
        _move_claim(batch.claim, state)
    return True


def _write(batch: Batch, log: Log) -> Counter[str]:
    begun = time.monotonic()
    outcomes = [(job, batch.results[job.id]) for job in batch.jobs if job.id in batch.results]
    written = write(batch.alias, outcomes, batch.deadline, log)
    if batch.claim is not None:
        batch.claim.begin(begun)
    return written


def _move_claim(claim: Claim, state: _Pass) -> None:
    """Hand over the jobs of a claim, with no transaction open. Other queues have the next turn."""
    state.had_turn.add(claim.queue)
    hand_over_claim(claim)
    _mark_unavailable(claim.queue, claim.lasting.values(), state)
    state.counts += write_claim(claim, state.log)


def _read(batch: Batch, size: int, state: _Pass) -> None:
    waiting = due(batch.alias).exclude(queue__in=state.left_out())
    if handed_over := unwritten(batch.alias):
        waiting = waiting.exclude(pk__in=handed_over)
    read(batch, waiting.exclude(queue__in=state.had_turn), size)
    if not batch.jobs and state.had_turn:
        state.had_turn.clear()
        read(batch, waiting, size)


def _hand_over(batch: Batch, state: _Pass) -> None:
    """Hand the jobs over, queue by queue, until the time of the batch is up. Jobs without a result
    stay due."""
    by_queue: dict[str, list[StagedJob]] = defaultdict(list)
    for job in batch.jobs:
        if was_handed_over(job):
            batch.offered.append(job)
            batch.results[job.id] = batch.lasting[job.id] = TookEffect()
        else:
            by_queue[job.queue].append(job)
    for queue, jobs in by_queue.items():
        hand_over(queue, jobs, batch)
        _mark_unavailable(queue, (batch.results.get(job.id) for job in jobs), state)
        if batch.time_is_up():
            state.had_turn.add(queue)
            return
    if batch.claim is None:
        state.had_turn.clear()


def _mark_unavailable(queue: str, results: Iterable[object], state: _Pass) -> None:
    if unavailable := [result for result in results if isinstance(result, BrokerUnavailable)]:
        state.mark(queue, unavailable[0])
