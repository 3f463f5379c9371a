"""One round: traffic, an event, the recovery, and the comparison of the records of clients,
database and provider."""

import random
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

from idempotency.models import IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.monitoring.heartbeats import COMPLETER, ENQUEUER, LOOPS, REAPER
from tests.factories import IdempotencyKeyFactory
from tests.failover.clients import AGAIN, PATIENCE_SECONDS, Clients
from tests.failover.events import Event, watch
from tests.failover.lab import Lab
from tests.failover.service import JOB
from tests.kit.ageing import ago
from tests.kit.threads import background
from tests.kit.waiting import eventually
from tests.models import Entry

#: The stored form of the scope of ``service.everybody``.
SCOPE = "scope=everybody"
#: The time for which the traffic continues after the event.
AFTERWARDS_SECONDS = 0.5
#: The longest allowed time until each loop works again, and the time after which the round stops
#: waiting.
LOOPS_SECONDS, LOOPS_LIMIT_SECONDS = 15.0, 45.0
LOOK_SECONDS = 0.1


@dataclass
class Round:
    """The results of one round. ``faults`` are failures in every configuration."""

    acknowledged: int
    lost: int
    doubled: int
    changed: int
    server_errors: int
    first_answer_seconds: float
    loops_seconds: float
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = (
            f"{self.acknowledged} acknowledged, {self.lost} lost, {self.doubled} doubled,"
            f" {self.changed} changed"
        )
        times = (
            f"first answer after {self.first_answer_seconds:.1f} s, loops back after"
            f" {self.loops_seconds:.1f} s"
        )
        return "; ".join([counts, times, *self.faults])


def play(lab: Lab, event: Event, drawn: random.Random) -> Round:
    """Run an event under traffic. On return both nodes replicate again, and no key is in flight."""
    before = lab.pair.primary
    with Clients(lab.web.port) as clients:
        watch(drawn.uniform(0.8, 1.6))
        event.happen(lab)
        over = time.monotonic()
        watch(AFTERWARDS_SECONDS)
        clients.begin_nothing_new()
        name = _stage_work(lab)
        with background(lambda: _done_at(lab, name)) as done_at:
            if lab.pair.primary is not before:
                lab.pair.rebuild()
            since = time.monotonic() if lab.configuration.confirmed else over
    loops = {loop: max(0.0, done - since) for loop, done in done_at.result().items()}
    return _compared(lab, clients, over, loops)


def _stage_work(lab: Lab) -> str:
    """Create work for each loop; return the name of the work."""
    name = f"probe-{uuid.uuid4().hex}"
    times = {"created_at": ago(hours=1), "last_run_at": ago(minutes=30)}
    with lab.database():
        StagedJob.objects.create(job_name=JOB, job_args={"client_key": name})
        IdempotencyKeyFactory(scope=SCOPE, idempotency_key=name, request_path="/phased/", **times)
        ProcessedMessage.objects.create(source="probe", message_id=name, processed_at=ago(days=31))
    return name


def _done_at(lab: Lab, name: str) -> dict[str, float]:
    """Return the time at which each loop had done its work, infinity if it did not."""
    done: dict[str, float] = {}
    ends = time.monotonic() + LOOPS_LIMIT_SECONDS
    with lab.database():
        while len(done) < len(LOOPS) and time.monotonic() < ends:
            lab.require_running()
            left = _work_left(name)
            done |= {
                loop: time.monotonic() for loop in LOOPS if loop not in left and loop not in done
            }
            watch(LOOK_SECONDS)
    return {loop: done.get(loop, float("inf")) for loop in LOOPS}


def _work_left(name: str) -> set[str]:
    """Return the loops whose work is not done."""
    left = {
        ENQUEUER: StagedJob.objects.filter(job_args={"client_key": name}),
        COMPLETER: IdempotencyKey.objects.unfinished().filter(idempotency_key=name),
        REAPER: ProcessedMessage.objects.filter(source="probe", message_id=name),
    }
    return {loop for loop, rows in left.items() if rows.exists()}


def _compared(lab: Lab, clients: Clients, over: float, loops: dict[str, float]) -> Round:
    """Compare the acknowledged requests with the database, and with the responses to retries; count
    the effects."""
    first = clients.first_answer(over)
    with lab.database():
        kept = {*_entries()} & {
            *IdempotencyKey.objects.finished().values_list("idempotency_key", flat=True)
        }
    again = clients.answers_again()
    with lab.database():
        eventually(lambda: not StagedJob.objects.exists())
        effects = [_entries(), lab.provider.effects("charge")]
    acknowledged = clients.acknowledged
    still_there = acknowledged.keys() & kept
    return Round(
        acknowledged=len(acknowledged),
        lost=len(acknowledged) - len(still_there),
        doubled=sum(any(of[key] > 1 for of in effects) for key in acknowledged),
        changed=sum(
            (again[key].status, again[key].body) != (201, was.body)
            for key, was in acknowledged.items()
        ),
        server_errors=clients.server_errors,
        first_answer_seconds=float("inf") if first is None else first - over,
        loops_seconds=max(loops.values()),
        faults=_faults(clients, still_there, lab.provider.effects("receipt"), loops),
    )


def _faults(
    clients: Clients, kept: set[str], receipts: Counter[str], loops: dict[str, float]
) -> list[str]:
    statuses = clients.statuses
    unexpected = {
        status: count for status, count in statuses.items() if status not in (201, *AGAIN)
    }
    phased = [key for key in kept if clients.acknowledged[key].path == "/phased/"]
    counts = {
        f"answers that no client expects, by status: {unexpected}": len(unexpected),
        "answers 503 without Retry-After": clients.without_retry_after,
        f"keys without an answer after {PATIENCE_SECONDS:g} s": sum(
            last in AGAIN for last in clients.unanswered.values()
        ),
        "acknowledged requests whose job had no effect": sum(not receipts[key] for key in phased),
        "events that no client noticed": int(not statuses[503] and not statuses[None]),
    }
    late = [
        f"{loop} was not back after {LOOPS_SECONDS:g} s"
        for loop, seconds in loops.items()
        if seconds > LOOPS_SECONDS
    ]
    return [f"{count} {what}" for what, count in counts.items() if count] + late


def _entries() -> Counter[str]:
    return Counter(Entry.objects.values_list("name", flat=True))
