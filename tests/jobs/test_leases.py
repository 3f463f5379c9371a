"""Backends with ``lease_seconds``: no transaction is open during their hand-overs, and a process
whose lease has ended changes no row."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, connections, transaction
from django.db.models.functions import Now
from pytest_django import Settings

from idempotency import _batch, _unwritten
from idempotency.backends import BrokerUnavailable, seconds_left
from idempotency.enqueuer import EnqueuePass, backlog, enqueue_once
from idempotency.jobs import stage_job
from idempotency.models import StagedJob
from tests.kit.ageing import ago
from tests.kit.outages import cut_this_connection
from tests.kit.threads import Gate, elsewhere, in_background
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)

TENANT = ContextVar("tenant", default="none")
#: The names of the jobs that the service got, and what it does with a job, by name.
sent: list[str] = []
acts: dict[str, Callable[[], object]] = {}


def send(job: StagedJob) -> None:
    """Send a job to a slow service."""
    name = job.job_args["name"]
    sent.append(name)
    acts.get(name, lambda: None)()


send.lease_seconds = 60  # type: ignore[attr-defined]


def take(job: StagedJob) -> None:
    """Take a job at once."""
    sent.append(job.job_args["name"])


@pytest.fixture(autouse=True)
def _service(settings: Settings) -> Iterator[None]:
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.send", "fast": f"{__name__}.take"}}
    sent.clear()
    yield
    acts.clear()


def stage(*names: str, queue: str = "slow", group: str | None = None) -> None:
    for name in names:
        with transaction.atomic():
            stage_job("shop.jobs.book", {"name": name}, queue=queue, group=group)


def refuse() -> None:
    raise ValueError("on purpose")


def left() -> dict[str, tuple[int, bool]]:
    """Return for each staged job its number of refusals, and whether it has failed."""
    rows = StagedJob.objects.values_list("job_args__name", "refusals", "failed_at")
    return {name: (refusals, failed_at is not None) for name, refusals, failed_at in rows}


def test_no_transaction_is_open_during_a_hand_over_and_no_other_process_gets_its_job() -> None:
    found: list[object] = []

    def look() -> None:
        Entry.objects.create(name="a write of the function")
        found.append(connection.in_atomic_block)
        found.append(elsewhere(lambda: (enqueue_once(), backlog().due_jobs, left())))
        found.append(elsewhere(Entry.objects.count))

    acts["a"] = look
    stage("a")
    assert enqueue_once() == EnqueuePass(handed_over=1)
    assert found == [False, (EnqueuePass(), 0, {"a": (0, False)}), 1]
    assert (sent, left()) == (["a"], {})


def test_other_queues_are_handed_over_before() -> None:
    found: list[object] = []
    acts["a"] = lambda: found.append(elsewhere(left))
    stage("a")
    stage("b", "c", queue="fast")
    assert enqueue_once() == EnqueuePass(handed_over=3)
    assert (sorted(sent[:2]), sent[2:]) == (["b", "c"], ["a"])
    assert found == [{"a": (0, False)}]


def end_lease() -> None:
    """End the lease, as after a pause of the process; another process gets the job."""
    StagedJob.objects.filter(run_at__gt=Now()).update(run_at=ago(seconds=1))
    found.append(elsewhere(enqueue_once))


found: list[EnqueuePass] = []


@pytest.mark.parametrize("refused_by", ["the late one", "the other", "neither"])
def test_a_process_whose_lease_has_ended_neither_changes_nor_counts_its_job(
    refused_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    found.clear()

    def first() -> None:
        acts["a"] = refuse if refused_by == "the other" else lambda: None
        end_lease()
        if refused_by == "the late one":
            refuse()

    acts["a"] = first
    stage("a")
    assert enqueue_once() == EnqueuePass()
    of_other = EnqueuePass(refused=1) if refused_by == "the other" else EnqueuePass(handed_over=1)
    assert (found, sent) == ([of_other], ["a", "a"])
    assert left() == ({"a": (1, False)} if refused_by == "the other" else {})
    assert "1 results of hand-overs are not written" in caplog.text


def test_a_late_process_does_not_delete_the_job_that_another_one_holds() -> None:
    def second() -> None:
        acts["a"] = lambda: None
        StagedJob.objects.update(run_at=Now() + timedelta(seconds=60, microseconds=1))

    acts["a"] = second
    stage("a")
    assert enqueue_once() == EnqueuePass()
    assert left() == {"a": (0, False)}


def test_a_job_that_was_not_offered_in_time_is_due_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_batch, "TURN_SECONDS", -1)
    stage("a", "b")
    StagedJob.objects.update(run_at=ago(hours=2))
    before = dict(StagedJob.objects.values_list("pk", "run_at"))
    calls = iter([False, True])
    assert enqueue_once(stop=lambda: next(calls)) == EnqueuePass()
    assert (sent, dict(StagedJob.objects.values_list("pk", "run_at"))) == ([], before)


def test_a_claim_takes_only_as_many_jobs_as_fit_into_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most of a long backlog stays free for other processes, and in the figures."""
    names = [f"job {number}" for number in range(40)]
    stage(*names)
    acts.update(dict.fromkeys(names, lambda: waiting.append(elsewhere(lambda: backlog().due_jobs))))
    waiting: list[int] = []
    assert enqueue_once() == EnqueuePass(handed_over=40)
    assert (sorted(sent), waiting[0]) == (sorted(names), 40 - _batch.FIRST_CLAIM)


def test_an_outage_of_the_service_leaves_jobs_due_as_before() -> None:
    def away() -> None:
        raise BrokerUnavailable("the service is away")

    stage("a", "b")
    acts.update(a=away, b=away)
    StagedJob.objects.update(run_at=ago(hours=2))
    before = dict(StagedJob.objects.values_list("pk", "run_at"))
    with pytest.raises(BrokerUnavailable):
        enqueue_once()
    assert dict(StagedJob.objects.values_list("pk", "run_at")) == before
    assert backlog().oldest_seconds > 7000
    assert left() == {"a": (0, False), "b": (0, False)}


def test_a_job_whose_call_always_times_out_does_not_block_its_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The turn ends after one job, and the service is unavailable only for the first one."""

    def time_out() -> None:
        time.sleep(0.3)
        raise BrokerUnavailable("timed out")

    monkeypatch.setattr(_batch, "TURN_SECONDS", 0.2)
    stage("bad", "a", "b")
    acts["bad"] = time_out
    for _ in range(30):
        with suppress(BrokerUnavailable):
            enqueue_once()
        if left().keys() == {"bad"}:
            return
    pytest.fail(f"The queue is blocked: {sent}.")


@pytest.mark.parametrize("last_turn", ["had results", "had none"])
def test_a_job_that_is_offered_alone_counts_as_refused_only_if_the_service_was_available_before(
    last_turn: str,
) -> None:
    def away() -> None:
        raise BrokerUnavailable("the service is away")

    stage("a", queue="slow")
    acts["a"] = away
    _batch.claim_sizes["default", "slow"] = 1 if last_turn == "had results" else 0
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            enqueue_once()
        StagedJob.objects.update(run_at=ago(seconds=1))
    assert left() == {"a": (int(last_turn == "had results"), False)}


class Bulk:
    """A backend that sends all jobs of a claim in one call, which takes longer than a turn."""

    lease_seconds = 60

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, None]:
        sizes.append(len(jobs))
        time.sleep(0.3)
        return {}


sizes: list[int] = []


@pytest.mark.parametrize(
    ("turn_seconds", "last_turn", "jobs", "claims"),
    [(0.2, 0, 18, [10, 5, 2, 1]), (0.2, 1, 3, [1, 1, 1]), (5, 0, 40, [10, 20, 10])],
)
def test_claims_do_not_grow_beyond_a_turn(
    turn_seconds: float,
    last_turn: int,
    jobs: int,
    claims: list[int],
    monkeypatch: pytest.MonkeyPatch,
    settings: Settings,
) -> None:
    """Otherwise a call would last longer than the lease in the end."""
    sizes.clear()
    _batch.claim_sizes["default", "slow"] = last_turn
    monkeypatch.setattr(_batch, "TURN_SECONDS", turn_seconds)
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.Bulk"}}
    stage(*(f"job {number}" for number in range(jobs)), queue="slow")
    assert enqueue_once() == EnqueuePass(handed_over=jobs)
    assert sizes == claims


def test_a_long_backlog_of_a_slow_queue_does_not_make_the_batches_of_others_small() -> None:
    stage(*(f"slow {number}" for number in range(60)))
    stage(*(f"fast {number}" for number in range(60)), queue="fast")
    assert enqueue_once(batch_size=50) == EnqueuePass(handed_over=120)
    assert [name[:4] for name in sent[:60]] == ["slow"] * 10 + ["fast"] * 50


def test_each_queue_has_its_turn() -> None:
    for name in ("a", "b", "c"):
        stage(*(f"{name}{number}" for number in range(20)), queue=name)
    assert enqueue_once() == EnqueuePass(handed_over=60)
    assert [name[0] for name in sent] == list(2 * ("a" * 10 + "b" * 10 + "c" * 10))


def test_a_job_that_is_held_by_a_lease_holds_its_group() -> None:
    found: list[object] = []
    acts["a1"] = lambda: found.append(elsewhere(enqueue_once))
    stage("a1", "a2", group="account:7")
    assert enqueue_once() == EnqueuePass(handed_over=2)
    assert (sent, found) == (["a1", "a2"], [EnqueuePass()])


@contextmanager
def locked_by_another() -> Iterator[Callable[[], None]]:
    """Let another transaction lock the row of the job when it is sent. Yield a function that ends
    this transaction."""

    def lock() -> None:
        with transaction.atomic():
            assert list(StagedJob.objects.select_for_update())
            gate.wait_here()

    def begin() -> None:
        holders.append(in_background(lock))
        gate.wait_until_reached()

    def end() -> None:
        gate.open()
        holders[0].result(60)

    gate, holders = Gate(), list[Future[None]]()
    acts["a"] = begin
    try:
        yield end
    finally:
        end()


@pytest.fixture
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idempotency._hand_over._built", {})
    monkeypatch.setattr(send, "lease_seconds", 1)
    # On a busy machine, half a second may end before the hand-over begins.
    monkeypatch.setattr(_batch, "_PART_OF_LIMIT", 100)


@pytest.mark.postgres
def test_a_pass_waits_for_the_lock_of_another_transaction(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_unwritten, "LOCKED_SECONDS", 60)
    stage("a")
    with locked_by_another() as end:
        threading.Timer(0.3, end).start()
        assert enqueue_once() == EnqueuePass(handed_over=1)
    assert (sent, left()) == (["a"], {})
    assert "are not written" not in caplog.text


@pytest.mark.postgres
@pytest.mark.usefixtures("_short_lease")
def test_a_job_whose_row_another_transaction_locks_beyond_the_lease_is_sent_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_unwritten, "LOCKED_SECONDS", 0)
    stage("a")
    with locked_by_another():
        assert enqueue_once() == EnqueuePass()
        stage("b", queue="fast")
        assert enqueue_once() == EnqueuePass(handed_over=1)
        time.sleep(1.1)
    assert enqueue_once() == EnqueuePass(handed_over=1)
    assert (sent, left()) == (["a", "b"], {})


@pytest.mark.postgres
@pytest.mark.usefixtures("_short_lease")
def test_a_job_whose_result_waits_for_a_lock_is_not_read_by_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lock ends between the attempt to write the result and the next batch."""
    monkeypatch.setattr(_unwritten, "LOCKED_SECONDS", 0)
    stage("a")
    with locked_by_another() as end:
        enqueue_once()
        time.sleep(1.1)
        reads = count()

        def end_before_batch(execute: Any, text: str, *rest: Any) -> Any:
            if "SKIP LOCKED" in text and next(reads) == 1:
                end()
            return execute(text, *rest)

        with connection.execute_wrapper(end_before_batch):
            enqueue_once()
    assert next(reads) > 1
    assert (sent, left()) == (["a"], {})


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_lease_is_in_the_database_of_the_job() -> None:
    found: list[object] = []

    def look() -> None:
        found.append(connections["shard_b"].in_atomic_block)
        found.append(elsewhere(lambda: enqueue_once(using="shard_b")))

    acts["a"] = look
    with transaction.atomic(using="shard_b"):
        stage_job("shop.jobs.book", {"name": "a"}, using="shard_b")
    assert enqueue_once(using="shard_b") == EnqueuePass(handed_over=1)
    assert (found, sent) == ([False, EnqueuePass()], ["a"])


@pytest.mark.postgres
def test_a_lost_connection_refuses_one_job_and_keeps_the_other_results() -> None:
    def lose() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    stage("a", "b", "c")
    acts["b"] = lose
    assert enqueue_once() == EnqueuePass(handed_over=2, refused=1)
    assert (sorted(sent), left()) == (["a", "b", "c"], {"b": (1, False)})


@pytest.mark.postgres
def test_a_session_that_the_server_ends_meanwhile_loses_no_result() -> None:
    def end_session() -> None:
        pid = connection.connection.info.backend_pid
        elsewhere(lambda: execute(f"SELECT pg_terminate_backend({pid})"))

    stage("a", "b")
    acts["b"] = end_session
    assert enqueue_once() == EnqueuePass(handed_over=2)
    assert (sorted(sent), left()) == (["a", "b"], {})


def execute(text: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(text)


@pytest.mark.postgres
def test_a_job_that_cannot_be_released_is_not_taken_for_one_that_the_service_has() -> None:
    """Its lease makes it due again."""

    def away() -> None:
        execute(
            "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'on purpose'; END $$"
        )
        execute(
            f"CREATE TRIGGER keep BEFORE UPDATE ON {StagedJob._meta.db_table}"
            " FOR EACH ROW EXECUTE FUNCTION keep()"
        )
        raise BrokerUnavailable("the service is away")

    acts["a"] = away
    stage("a")
    try:
        with pytest.raises(BrokerUnavailable):
            enqueue_once()
    finally:
        execute("DROP FUNCTION keep() CASCADE")
    acts.clear()
    StagedJob.objects.update(run_at=ago(seconds=1))
    assert enqueue_once() == EnqueuePass(handed_over=1)
    assert (sent, left()) == (["a", "a"], {})


class LosingConnection:
    """A backend that sends all jobs of a claim in one call, during which the connection is lost."""

    lease_seconds = 60

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, None]:
        sent.extend(job.job_args["name"] for job in jobs)
        cut_this_connection()
        return {}


class Cut(LosingConnection):
    """One that then uses the connection."""

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, None]:
        super().hand_over(queue, jobs)
        StagedJob.objects.exists()
        return {}


@pytest.mark.postgres
def test_the_results_of_a_claim_are_written_after_a_loss_that_nobody_met(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.LosingConnection"}}
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", None)
    monkeypatch.setitem(connection.settings_dict, "CONN_HEALTH_CHECKS", False)
    connection.close()
    stage("a")
    assert enqueue_once() == EnqueuePass(handed_over=1)
    assert (sent, left()) == (["a"], {})
    connection.close()


@pytest.mark.postgres
def test_of_a_claim_whose_connection_was_lost_one_job_is_refused(settings: Settings) -> None:
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.Cut"}}
    _batch.claim_sizes["default", "slow"] = 10
    stage("a", "b", "c")
    assert enqueue_once(stop=lambda: bool(sent)) == EnqueuePass(refused=1)
    assert (sent, left()) == (["a", "b", "c"], {"a": (1, False), "b": (0, False), "c": (0, False)})
    assert "server closed the connection" in StagedJob.objects.get(refusals=1).last_error


@pytest.mark.parametrize("seconds", [1, 86_400])
def test_the_limits_of_a_lease_are_valid(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idempotency._hand_over._built", {})
    monkeypatch.setattr(send, "lease_seconds", seconds)
    stage("a")
    assert enqueue_once() == EnqueuePass(handed_over=1)


@pytest.mark.parametrize("seconds", [0, -1, 86_401, "60", 1e300])
def test_an_invalid_lease_refuses_jobs(seconds: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idempotency._hand_over._built", {})
    monkeypatch.setattr(send, "lease_seconds", seconds)
    stage("a")
    stage("b", queue="fast")
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert (sent, left()) == (["b"], {"a": (1, False)})


def test_a_claim_has_a_deadline_and_a_context_of_its_own() -> None:
    found: list[object] = []

    def look() -> None:
        found.append(TENANT.get())
        found.append(0 < seconds_left() <= _batch.TURN_SECONDS)
        TENANT.set("another")

    acts["a"] = look
    stage("a")
    enqueue_once()
    assert [*found, TENANT.get(), seconds_left()] == ["none", True, "none", float("inf")]


@pytest.mark.postgres
def test_a_release_that_cannot_be_written_stops_no_other_one() -> None:
    def unavailable() -> None:
        raise BrokerUnavailable("on purpose")

    for name in "abc":
        acts[name] = unavailable
    stage(*"abc")
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " RAISE EXCEPTION 'on purpose'; END $$;"
            " CREATE TRIGGER keep BEFORE UPDATE ON idempotency_stagedjob FOR EACH ROW"
            " WHEN (OLD.job_args->>'name' = 'b' AND NEW.run_at < OLD.run_at)"
            " EXECUTE FUNCTION keep()"
        )
    try:
        with pytest.raises(BrokerUnavailable):
            enqueue_once()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION keep() CASCADE")
    assert set(batch_due()) == {"a", "c"}


def batch_due() -> list[str]:
    """Return the names of the jobs that are due."""
    return list(_batch.due("default").values_list("job_args__name", flat=True))
