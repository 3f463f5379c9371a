"""The enqueuer: every staged job reaches its broker: in normal running once, through a crash again
with the same id."""

import os
import re
import signal
import sqlite3
import time
from asyncio import CancelledError
from base64 import b64encode
from contextlib import closing, nullcontext, suppress
from dataclasses import astuple
from datetime import timedelta
from functools import partial

import psycopg
import pytest
import redis.retry
from django.db import connection, transaction
from django.db.models.functions import Now
from django.utils import timezone
from rq import Retry

from idempotency import _batch, _hand_over, backends, enqueuer
from idempotency.backends import BrokerUnavailable
from idempotency.contrib import rq as rq_backend
from idempotency.contrib.rq import RQBackend, run_once
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.exceptions import MessageInProgress
from idempotency.jobs import stage_job
from idempotency.models import ProcessedMessage, StagedJob
from rides_demo.models import AuditRecord
from rides_demo.processes.ports import free_port
from tests.factories import StagedJobFactory, UserFactory
from tests.kit.brokers import queued
from tests.kit.commands import run, start
from tests.kit.database import session_setting
from tests.kit.threads import Gate, at_once, background, elsewhere
from tests.kit.waiting import eventually
from tests.models import Account, Entry

pytestmark = pytest.mark.django_db(transaction=True)

ONE_TRY = {"retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0)}
PICKY = {"ENQUEUERS": {"*": "tests.kit.jobs.PickyBackend"}}


def stage(count, **values):
    return StagedJob.objects.bulk_create(StagedJobFactory.build_batch(count, **values))


def work(broker):
    """Let a real worker run what is queued, in a process of its own, and end."""
    done = run("rqworker", "default", "--burst")
    assert done.returncode == 0, done.stderr


def test_an_empty_table_does_nothing(broker):
    assert astuple(enqueue_once()) == astuple(EnqueuePass()) == (0, 0, 0)
    assert queued(broker) == []


def test_more_jobs_than_a_batch_all_go_out_once(broker):
    jobs = stage(2300)
    assert enqueue_once(batch_size=1000) == EnqueuePass(handed_over=2300)
    assert sorted(queued(broker)) == sorted(str(job.pk) for job in jobs)
    assert not StagedJob.objects.exists()


def test_a_backend_gets_the_job_as_it_is_stored(settings, monkeypatch):
    settings.IDEMPOTENCY = PICKY
    StagedJobFactory(job_args=["é", None, {"deep": 1.5}], hand_overs=2, last_error="-")
    names = [field.attname for field in StagedJob._meta.concrete_fields]
    stored, got = StagedJob.objects.values_list(*names).get(), []

    def hand_over(backend, queue, jobs):
        got.extend(tuple(vars(job)[name] for name in names) for job in jobs)
        return {}

    monkeypatch.setattr("tests.kit.jobs.PickyBackend.hand_over", hand_over)
    assert enqueue_once() == EnqueuePass(handed_over=1)
    assert got == [stored]


def test_a_job_that_is_not_due_stays(broker):
    stage(1, run_at=timezone.now() + timedelta(hours=1))
    stage(1, failed_at=timezone.now())
    assert enqueue_once() == EnqueuePass()
    assert StagedJob.objects.count() == 2


def test_a_dry_run_only_counts(broker):
    stage(3)
    assert enqueue_once(dry_run=True) == EnqueuePass(handed_over=3)
    assert StagedJob.objects.count() == 3
    assert queued(broker) == []


def test_a_batch_is_the_last_when_it_is_asked_to_stop(broker):
    stage(5)
    answers = iter([False, True])
    assert enqueue_once(batch_size=2, stop=lambda: next(answers)) == EnqueuePass(handed_over=2)
    assert StagedJob.objects.count() == 3


@pytest.mark.postgres
def test_a_job_that_commits_late_with_a_lower_id_is_not_lost(broker):
    """The published drain reads up to the last id and deletes all ids below: it loses this job."""
    gate, late = Gate(), []

    def slow_request():
        with transaction.atomic():
            late.append(stage_job("tests.kit.jobs.record"))
            gate.wait_here()

    with background(slow_request) as request:
        gate.wait_until_reached()
        with transaction.atomic():
            early = stage_job("tests.kit.jobs.record")
        assert late[0].pk < early.pk
        commit_while_handing_over(gate, request)
    enqueue_once()
    assert sorted(queued(broker)) == sorted([str(late[0].pk), str(early.pk)])


def commit_while_handing_over(gate, request):
    """Run a pass during which, between its SELECT and its DELETE, the slow request commits."""

    def execute(call, sql, *args):
        result = call(sql, *args)
        if sql.startswith("SELECT") and "SKIP LOCKED" in sql and not request.done():
            gate.open()
            request.result(60)
        return result

    with connection.execute_wrapper(execute):
        enqueue_once()
    assert request.done(), "it did not commit during the pass"


@pytest.mark.postgres
def test_two_enqueuers_at_once_hand_no_job_over_twice(broker):
    jobs = stage(1000)
    passes = at_once([partial(enqueue_once, batch_size=50)] * 4)
    assert sum(found.handed_over for found in passes) == 1000
    assert sorted(queued(broker)) == sorted(str(job.pk) for job in jobs)


@pytest.mark.postgres
@pytest.mark.processes
@pytest.mark.sample
def test_an_enqueuer_that_is_killed_between_hand_over_and_delete_sends_nothing_twice(broker):
    user = UserFactory()
    [job] = stage(1, job_name="tests.kit.jobs.record", job_args={"user": user.pk})
    stalling = (
        "import django; django.setup()\nfrom django.test.utils import override_settings\nfrom"
        " idempotency.enqueuer import enqueue_once\nwith"
        " override_settings(IDEMPOTENCY={'ENQUEUERS': {'*': 'tests.kit.jobs.StallingBackend'}}):\n "
        "   enqueue_once()\n"
    )
    with start(python=stalling) as process:
        eventually(lambda: queued(broker))
        assert enqueue_once() == EnqueuePass(), "the row is locked while another enqueuer holds it"
        os.kill(process.pid, signal.SIGKILL)
    assert StagedJob.objects.count() == 1
    eventually(lambda: enqueue_once().handed_over)
    assert queued(broker) == [str(job.pk)] * 2
    work(broker)
    assert AuditRecord.objects.count() == 1
    assert not StagedJob.objects.exists()
    assert queued(broker) == []


def test_a_broker_that_is_down_burns_nothing_and_stops_no_other_queue(broker, settings):
    settings.RQ_QUEUES = {**settings.RQ_QUEUES, "down": {"URL": f"redis://127.0.0.1:{free_port()}"}}
    rq_backend._queue.cache_clear()
    stage(3, queue="down", run_at=timezone.now() - timedelta(hours=1))
    stage(2)
    with pytest.raises(BrokerUnavailable, match=r"2 jobs were handed over.*'down'.*Redis"):
        enqueue_once(batch_size=3)
    assert len(queued(broker)) == 2
    assert (
        list(StagedJob.objects.values_list("queue", "refusals", "last_error", "failed_at"))
        == [("down", 0, "", None)] * 3
    )


@pytest.mark.parametrize(
    ("place", "address"),
    [
        ({"URL": "redis://user:secret@127.0.0.1:1/3?password=secret"}, "127.0.0.1:1, database 3"),
        ({"HOST": "127.0.0.1", "PORT": 1, "PASSWORD": "secret"}, "127.0.0.1:1, database 0"),
        ({"UNIX_SOCKET_PATH": "/nowhere/redis.sock", "DB": 0}, "/nowhere/redis.sock, database 0"),
        (
            {
                "SENTINELS": [("127.0.0.1", 1)],
                "MASTER_NAME": "shop",
                "PASSWORD": "secret",
                "SENTINEL_KWARGS": ONE_TRY,
            },
            "the Sentinel service 'shop'",
        ),
    ],
    ids=["url", "host", "socket", "sentinel"],
)
def test_the_error_of_a_broker_that_is_down_has_its_address_without_secrets(
    settings, place, address
):
    settings.RQ_QUEUES = {"down": place}
    rq_backend._queue.cache_clear()
    stage(1, queue="down")
    with pytest.raises(BrokerUnavailable) as caught:
        enqueue_once()
    assert f"Redis at {address} accepts no jobs" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_redis_never_takes_is_refused_and_stops_no_other_job(broker):
    """Redis closes the connection of a client that sends too much; from 7.4 on the whole MULTI of a
    batch counts."""
    blob = b64encode(os.urandom(1_500_000)).decode()  # A queue compresses it to three quarters.
    [large] = stage(1, job_args={"blob": blob}, run_at=timezone.now() - timedelta(hours=1))
    stage(2)
    broker.config_set("client-query-buffer-limit", 1024 * 1024)
    try:
        assert enqueue_once() == EnqueuePass(handed_over=2, refused=1)
    finally:
        broker.config_set("client-query-buffer-limit", 1024 * 1024 * 1024)
    job = StagedJob.objects.get()
    assert (job.pk, job.refusals) == (large.pk, 1)
    assert "client-query-buffer-limit" in job.last_error


def take_slowly(job):
    TAKEN.append(job.queue)
    time.sleep(0.06)


def take_fast(job):
    TAKEN.append(job.queue)


TAKEN = []


def test_a_slow_queue_does_not_delay_the_jobs_of_others(settings, monkeypatch):
    settings.IDEMPOTENCY = {
        "ENQUEUERS": {"slow": f"{__name__}.take_slowly", "*": f"{__name__}.take_fast"}
    }
    monkeypatch.setattr(backends, "BATCH_SECONDS", 0.05)
    TAKEN.clear()
    stage(5, queue="slow", run_at=timezone.now() - timedelta(seconds=20))
    stage(1, queue="payments", run_at=timezone.now() - timedelta(seconds=10))
    assert enqueue_once() == EnqueuePass(handed_over=6)
    assert TAKEN.index("payments") == 1


def test_after_a_small_batch_the_number_of_jobs_of_a_batch_doubles(monkeypatch):
    offered = []

    class Taking:
        def hand_over(self, queue, jobs):
            offered.append(len(jobs))
            return {}

    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: Taking())
    monkeypatch.setitem(enqueuer._sizes, "default", 1)
    stage(12)
    assert enqueue_once(batch_size=5) == EnqueuePass(handed_over=12)
    assert offered == [1, 2, 4, 5]
    for count in (1, 7):
        stage(count)
        assert enqueue_once(batch_size=5) == EnqueuePass(handed_over=count)
    assert offered[4:] == [1, 5, 2], "a batch that takes all due jobs is not a small one"


def test_the_first_error_of_a_broker_that_is_unavailable_is_reported(monkeypatch):
    offered = []

    class Away:
        def hand_over(self, queue, jobs):
            offered.extend(jobs)
            return {job.pk: BrokerUnavailable(f"{job.pk} is refused") for job in jobs}

    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: Away())
    stage(2)
    with pytest.raises(BrokerUnavailable) as raised:
        enqueue_once()
    assert f"{offered[0].pk} is refused" in str(raised.value)


@pytest.mark.parametrize(
    ("error", "jobs", "offered"),
    [(BrokerUnavailable("away"), 4, [4, 1, 1]), (RuntimeError("on purpose"), 1, [1])],
)
def test_how_often_jobs_are_offered_to_a_backend_that_takes_none(error, jobs, offered, monkeypatch):
    broker = Broker(error)
    broker.several = error
    monkeypatch.setattr(backends, "MOST_UNAVAILABLE", 3)
    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: broker)
    stage(jobs)
    with suppress(BrokerUnavailable):
        enqueue_once()
    assert [number for _, number, _ in broker.offers] == offered


def test_the_end_of_a_batch_concerns_no_code_after_it(broker):
    stage(1)
    enqueue_once()
    assert backends.seconds_left() == float("inf")


class Clock:
    """A clock that only the slow backend moves."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.mark.parametrize(("staged", "taken"), [("SSfff", "SfSff"), ("AAABBB", "ABABAB")])
def test_slow_queues_take_turns_with_all_others(staged, taken, monkeypatch):
    """After a batch in time, or when only slow ones are left, each queue has its turn again."""
    clock, order = Clock(), []

    def take_by_case(job):
        order.append(job.queue)
        clock.now += 2 * backends.BATCH_SECONDS * job.queue.isupper()

    for module in (backends, _batch, enqueuer):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(
        _hand_over, "backend_of", lambda queue, using: _hand_over.CallableBackend(take_by_case)
    )
    stage_by_age(staged)
    assert enqueue_once(batch_size=1) == EnqueuePass(handed_over=len(staged))
    assert "".join(order) == taken


def test_a_batch_in_which_no_job_may_run_is_not_offered(monkeypatch, caplog):
    caplog.set_level("INFO", logger="idempotency")
    broker = Broker()
    broker.runs_functions = True
    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: broker)
    stage(2, job_name="nowhere.to_be.found")
    assert enqueue_once() == EnqueuePass(refused=2)
    assert (broker.offers, "refused a batch" in caplog.text) == ([], False)


def test_a_broker_that_hangs_fails_before_the_database_gives_up(settings, monkeypatch):
    import socket

    monkeypatch.setitem(rq_backend._BOUNDS, "socket_timeout", 0.3)
    monkeypatch.setattr(backends, "BROKER_TIMEOUT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings.RQ_QUEUES = {"hangs": {"URL": f"redis://127.0.0.1:{silent.getsockname()[1]}"}}
        rq_backend._queue.cache_clear()
        stage(5, queue="hangs")
        with pytest.raises(BrokerUnavailable):
            enqueue_once()
        silent.setblocking(False)
        # all jobs, and one of them, because it may be the cause; the next pass is the next try
        for _ in range(2):
            silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()
    assert set(StagedJob.objects.values_list("refusals", flat=True)) == {0}


@pytest.mark.postgres
def test_a_slow_broker_does_not_get_the_same_jobs_again(broker, settings):
    """Otherwise the database ends the idle transaction, the rows stay, and each pass hands them
    over once more."""
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": "tests.kit.jobs.SlowBackend"}}
    stage(3)
    with connection.cursor() as cursor:
        cursor.execute("SET idle_in_transaction_session_timeout = '1s'")
    try:
        assert enqueue_once() == EnqueuePass(handed_over=3)
    finally:
        connection.close()
    assert enqueue_once() == EnqueuePass()
    assert len(queued(broker)) == 3


def test_a_broker_that_is_full_burns_nothing(broker):
    stage(2)
    broker.config_set("maxmemory", "1")
    try:
        with pytest.raises(BrokerUnavailable):
            enqueue_once()
    finally:
        broker.config_set("maxmemory", "0")
    assert set(StagedJob.objects.values_list("refusals", flat=True)) == {0}
    assert enqueue_once().handed_over == 2


def full_disk(broker, folder):
    """Let Redis fail to write its data down, after which it takes no writes."""
    (folder / "dump.rdb").mkdir()  # No file can take its place.
    folder.chmod(0o777)
    broker.config_set("dir", str(folder))
    broker.config_set("save", "3600 1")
    broker.set("written", 1)
    broker.bgsave()
    eventually(lambda: broker.info("persistence")["rdb_last_bgsave_status"] == "err")


def too_few_replicas(broker, folder):
    broker.config_set("min-replicas-to-write", "1")


@pytest.mark.parametrize("trouble", [full_disk, too_few_replicas])
def test_a_broker_that_takes_no_writes_burns_nothing(broker, tmp_path, trouble):
    stage(2)
    before = {
        name: broker.config_get(name)[name] for name in ("dir", "save", "min-replicas-to-write")
    }
    try:
        trouble(broker, tmp_path)
        with pytest.raises(BrokerUnavailable):
            enqueue_once()
    finally:
        for name, value in before.items():
            broker.config_set(name, value)
    assert set(StagedJob.objects.values_list("refusals", flat=True)) == {0}
    assert enqueue_once().handed_over == 2


@pytest.mark.parametrize(
    ("backend", "text"),
    [("UnbuiltBackend", "nobody listens there"), ("BackendOfATable", "brokers_of_tomorrow")],
)
def test_a_backend_that_cannot_be_built_undoes_nothing_of_other_queues(
    backend, text, broker, settings
):
    settings.IDEMPOTENCY = {
        "ENQUEUERS": {"*": "idempotency.contrib.rq.RQBackend", "bad": f"tests.kit.jobs.{backend}"}
    }
    stage(2)
    stage(1, queue="bad", run_at=Now())
    assert enqueue_once() == EnqueuePass(handed_over=2, refused=1)
    assert enqueue_once() == EnqueuePass()
    assert len(queued(broker)) == 2
    assert text in StagedJob.objects.get().last_error


@pytest.mark.parametrize("path", ["take_in_a_coroutine", "CoroutineBackend"])
def test_jobs_are_handed_over_to_a_coroutine_function_too(path, settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"tests.kit.jobs.{path}"}}
    stage(3, job_args=[UserFactory().pk])
    assert enqueue_once() == EnqueuePass(handed_over=3)
    assert AuditRecord.objects.count() == 3


def test_a_function_that_yields_takes_no_job_and_loses_none(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": "tests.kit.jobs.take_yielding"}}
    stage(3)
    assert enqueue_once() == EnqueuePass(refused=3)
    assert all("is a generator function" in job.last_error for job in StagedJob.objects.all())


@pytest.mark.parametrize("path", ["ForgetfulBackend", "MistakenBackend"])
def test_a_backend_that_does_not_say_what_it_refused_sends_nothing_of_other_queues_again(
    path, broker, settings
):
    settings.IDEMPOTENCY = {
        "ENQUEUERS": {"*": "idempotency.contrib.rq.RQBackend", "bad": f"tests.kit.jobs.{path}"}
    }
    stage(2)
    stage(2, queue="bad", job_args=[UserFactory().pk])
    assert enqueue_once() == EnqueuePass(handed_over=2, refused=2)
    assert enqueue_once() == EnqueuePass()
    assert (len(queued(broker)), AuditRecord.objects.count()) == (2, 2)
    assert all(job.last_error for job in StagedJob.objects.all())


def test_a_poison_job_fails_alone(broker, settings):
    settings.IDEMPOTENCY = PICKY
    [poison] = stage(1, job_name="tests.kit.jobs.poison")
    good = stage(20)
    assert enqueue_once() == EnqueuePass(handed_over=20, refused=1)
    assert sorted(queued(broker)) == sorted(str(job.pk) for job in good)
    poison.refresh_from_db()
    assert (poison.refusals, poison.last_error, poison.failed_at) == (
        1,
        "ValueError: it cannot be serialised?",
        None,
    )
    assert poison.run_at > timezone.now()
    assert enqueue_once() == EnqueuePass(), "it waits before it is offered again"


def test_a_refused_job_is_given_up_after_a_bounded_number_of_attempts(broker, settings, caplog):
    settings.IDEMPOTENCY = PICKY
    stage(
        1,
        job_name="tests.kit.jobs.poison",
        refusals=backends.MAX_ATTEMPTS - 1,
        last_error="refused",
    )
    assert enqueue_once() == EnqueuePass(failed=1)
    job = StagedJob.objects.get()
    assert job.refusals == backends.MAX_ATTEMPTS
    assert job.failed_at is not None
    assert f"staged job {job.pk} (tests.kit.jobs.poison) has failed: ValueError" in caplog.text
    assert enqueue_once() == EnqueuePass()


delivered = []


def broker_with_a_database(job):
    """Take a job, as a queue that lives in the same database does."""
    delivered.append(job.job_args["name"])
    if job.job_args["name"] == "poison":
        Account.objects.create(name="taken")


@pytest.mark.postgres
def test_a_refusal_by_the_database_stops_no_other_job(settings):
    delivered.clear()
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.broker_with_a_database"}}
    Account.objects.create(name="taken")
    for name in ("good", "poison", "later"):
        StagedJobFactory(job_args={"name": name})
    assert enqueue_once() == EnqueuePass(handed_over=2, refused=1)
    assert delivered == ["good", "poison", "later"]
    assert StagedJob.objects.get().job_args == {"name": "poison"}
    assert enqueue_once() == EnqueuePass()


def test_a_job_for_a_queue_that_nobody_knows_is_refused_with_the_reason(broker, settings):
    stage(1, queue="nowhere")
    stage(1)
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert "'nowhere'" in StagedJob.objects.get().last_error
    settings.IDEMPOTENCY = {"ENQUEUERS": {"default": "idempotency.contrib.rq.RQBackend"}}
    stage(1, queue="unnamed")
    assert enqueue_once() == EnqueuePass(refused=1)
    assert "'unnamed'" in StagedJob.objects.get(queue="unnamed").last_error


@pytest.mark.postgres
@pytest.mark.processes
def test_the_worker_runs_a_staged_job_with_its_arguments(broker):
    user = UserFactory()
    stage(1, job_name="tests.kit.jobs.record", job_args=[user.pk, "by position"])
    stage(1, job_name="tests.kit.jobs.record", job_args={"user": user.pk, "label": "by name"})
    enqueue_once()
    work(broker)
    assert set(AuditRecord.objects.values_list("action", flat=True)) == {"by position", "by name"}


@pytest.mark.postgres
@pytest.mark.processes
def test_a_job_that_fails_leaves_nothing_and_waits_for_its_next_try(broker):
    [job] = stage(1, job_name="tests.kit.jobs.record_and_fail", job_args=[UserFactory().pk])
    enqueue_once()
    work(broker)
    assert not AuditRecord.objects.exists()
    assert not ProcessedMessage.objects.exists()
    assert broker.zrange("rq:scheduled:default", 0, -1) == [str(job.pk).encode()]


def test_the_wrapper_runs_a_job_once(broker):
    user = UserFactory()
    for _ in range(2):
        run_once("tests.kit.jobs.record", [user.pk], "00000000-0000-7000-8000-000000000001")
    assert AuditRecord.objects.count() == 1
    assert RQBackend.retry.max >= 3
    assert issubclass(MessageInProgress, Exception)


def job_that_asks_to_be_run_again():
    """Do what RQ's documentation says: return a Retry when the time has not come."""
    if Entry.objects.exists():
        Account.objects.create(name="done at last")
        return None
    return Retry(max=3)


def test_a_job_that_returns_a_retry_is_run_again():
    job_id = "00000000-0000-7000-8000-00000000000a"
    name = f"{__name__}.job_that_asks_to_be_run_again"
    assert isinstance(run_once(name, {}, job_id), Retry)
    Entry.objects.create(name="the time has come")
    run_once(name, {}, job_id)
    assert Account.objects.filter(name="done at last").exists()


class Broker:
    """A backend that notes what it is offered, and in which transaction."""

    def __init__(self, error=None):
        self.error, self.offers = error, []
        self.several = RuntimeError("one of them is no job")

    def hand_over(self, queue, jobs):
        committed = (
            elsewhere(lambda: StagedJob.objects.filter(queue="a").count()) if queue == "b" else None
        )
        self.offers.append((queue, len(jobs), committed))
        if len(jobs) > 1:
            raise self.several
        if self.error:
            raise self.error
        return {}


@pytest.mark.postgres
@pytest.mark.parametrize(("seconds", "left"), [(-1, 0), (60, 1)])
def test_a_batch_that_took_too_long_is_committed_before_the_next_queue(seconds, left, monkeypatch):
    monkeypatch.setattr(backends, "BATCH_SECONDS", seconds)
    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: broker)
    broker = Broker()
    for queue in "ab":
        stage(1, queue=queue)
    assert enqueue_once() == EnqueuePass(handed_over=2)
    assert broker.offers == [("a", 1, None), ("b", 1, left)]


@pytest.mark.parametrize(
    ("seconds", "error", "offered"),
    [
        (60, None, [3, 1, 1, 1]),
        (-1, None, [3, 1, 2, 1, 1]),
        (60, BrokerUnavailable("away"), [3, 1, 1]),
    ],
)
def test_jobs_are_offered_one_by_one_until_the_broker_is_away_or_the_time_is_up(
    seconds, error, offered, monkeypatch, caplog
):
    caplog.set_level("INFO", logger="idempotency")
    monkeypatch.setattr(backends, "BATCH_SECONDS", seconds)
    monkeypatch.setattr(backends, "MOST_UNAVAILABLE", 2)
    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: broker)
    broker = Broker(error)
    stage(3)
    with pytest.raises(BrokerUnavailable) if error else nullcontext():
        assert enqueue_once() == EnqueuePass(handed_over=3)
    assert [number for _, number, _ in broker.offers] == offered
    assert (
        "queue 'default' refused a batch of 3 jobs, which are handed over one by one: RuntimeError:"
        " one of them is no job" in caplog.text
    )


class Unsayable(Exception):
    """An exception that cannot make its message."""

    def __str__(self):
        return None


class Failing(backends.OneByOne):
    """A backend that takes no job; it fails for each job, or for all at once."""

    def __init__(self, error, *, at_once):
        self.error = error
        if at_once:
            self.hand_over = self.hand_over_one

    def hand_over_one(self, queue, jobs):
        raise self.error


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CancelledError("by its channel"), "CancelledError: by its channel"),
        (Unsayable(), "Unsayable, whose message raises TypeError"),
    ],
)
def test_whatever_a_backend_raises_refuses_its_job_and_no_other(error, text, at_once, monkeypatch):
    others = Away()
    failing = Failing(error, at_once=at_once)
    monkeypatch.setattr(
        _hand_over, "backend_of", lambda queue, using: failing if queue == "bad" else others
    )
    stage_by_age(["a", "bad", "b"])
    assert enqueue_once() == EnqueuePass(handed_over=2, refused=1)
    assert others.offers == ["a", "b"]
    assert StagedJob.objects.get().last_error == text


class Cutting:
    """A backend during whose first hand-over the connection of the enqueuer is lost. It takes
    ``most`` jobs at once."""

    def __init__(self, most):
        self.most, self.sent = most, []

    def hand_over(self, queue, jobs):
        if len(jobs) > self.most:
            raise RuntimeError("too many jobs")
        self.sent += [job.pk for job in jobs]
        if len(self.sent) <= len(jobs):
            # A pooler tells another id of the process than the server.
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                own = cursor.fetchone()
            with psycopg.connect(connection.connection.info.dsn, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s::int, 5000)", own)
        return {}


@pytest.mark.postgres
@pytest.mark.parametrize(("most", "sendings"), [(3, 5), (1, 3)])
def test_no_queue_is_offered_jobs_in_a_transaction_whose_connection_is_lost(
    most, sendings, monkeypatch
):
    """The first job of the lost hand-over is refused, and the others are handed over in smaller
    batches."""
    backend, others = Cutting(most), Away()
    monkeypatch.setattr(
        _hand_over, "backend_of", lambda queue, using: backend if queue == "default" else others
    )
    stage(3)
    stage(1, queue="other", run_at=timezone.now())
    assert enqueue_once() == EnqueuePass(handed_over=3, refused=1)
    assert (len(backend.sent), others.offers) == (sendings, ["other"])


@pytest.mark.postgres
def test_no_other_queue_is_offered_after_the_connection_is_lost(monkeypatch):
    """The backend reports the loss as the refusal of a job."""
    cutting, others = Cutting(1), Away()
    backend = _hand_over.CallableBackend(lambda job: cutting.hand_over(job.queue, [job]))
    monkeypatch.setattr(
        _hand_over, "backend_of", lambda queue, using: backend if queue == "default" else others
    )
    stage_by_age(["default", "other"])
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert (len(cutting.sent), others.offers) == (1, ["other"])


class Router:
    """A backend that passes its jobs to another one, which takes one at a time and refuses some."""

    def __init__(self):
        self.sent, self.inner = [], _hand_over.CallableBackend(self.take)

    def hand_over(self, queue, jobs):
        return self.inner.hand_over(queue, jobs)

    def take(self, job):
        self.sent.append(job.pk)
        if job.job_name.endswith("poison"):
            raise ValueError("no such task")


def test_a_backend_may_pass_its_jobs_to_one_that_takes_one_at_a_time(monkeypatch):
    router = Router()
    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: router)
    stage(3)
    stage(1, job_name="shop.jobs.poison")
    assert enqueue_once() == EnqueuePass(handed_over=3, refused=1)
    assert len(router.sent) == len(set(router.sent)) == 4, "each was sent once"


class Away:
    """A backend that notes the queues of its offers; the queues ``away`` are unavailable for so
    many offers."""

    def __init__(self, **away):
        self.away, self.offers = away, []

    def hand_over(self, queue, jobs):
        self.offers.append(queue)
        if self.away.get(queue, 0):
            self.away[queue] -= 1
            raise BrokerUnavailable("timed out")
        return {}


def stage_by_age(queues):
    now = timezone.now()
    for age, queue in enumerate(reversed(queues)):
        stage(1, queue=queue, run_at=now - timedelta(minutes=age))


def test_a_queue_whose_broker_was_away_once_is_offered_again_in_the_same_pass(monkeypatch, caplog):
    """The other queue may have new jobs without end, and the pass lasts as long."""
    broker = Away(a=1)
    monkeypatch.setattr(enqueuer, "UNREACHABLE_SECONDS", 0)
    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: broker)
    stage_by_age("abbb")
    assert enqueue_once(batch_size=1) == EnqueuePass(handed_over=4)
    assert "".join(broker.offers) == "ababb"
    assert [(record.levelname, record.args[0]) for record in caplog.records] == [("WARNING", "a")]


def test_a_pass_names_the_queues_that_are_still_away_and_logs_each_once(monkeypatch, caplog):
    broker = Away(a=9, c=1)
    monkeypatch.setattr(enqueuer, "UNREACHABLE_SECONDS", 0)
    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: broker)
    stage_by_age("acbb")
    with pytest.raises(
        BrokerUnavailable, match=r"^3 jobs were handed over.* queue 'a': timed out$"
    ):
        enqueue_once(batch_size=1)
    assert "".join(broker.offers) == "acbacaba", "the marks end only after a batch that set none"
    assert sorted(record.args[0] for record in caplog.records) == ["a", "c"]


def test_a_pass_does_not_wait_for_the_end_of_a_mark(monkeypatch, caplog):
    broker = Away(a=1)
    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: broker)
    stage_by_age("abb")
    with pytest.raises(BrokerUnavailable, match="2 jobs were handed over"):
        enqueue_once(batch_size=1)
    assert broker.offers == ["a", "b", "b"]
    broker.away = {"a": 1}
    caplog.clear()
    with pytest.raises(BrokerUnavailable, match="0 jobs were handed over"):
        enqueue_once()
    assert not caplog.records, "the exception reports it"


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("of_role", "within"), [("0", 10_000), ("1min", 10_000), ("2500ms", 2_500)]
)
def test_the_wait_for_a_lock_is_limited_unless_the_limit_of_the_role_is_lower(
    of_role, within, monkeypatch
):
    limits = []

    class Looking(Broker):
        def hand_over(self, queue, jobs):
            with connection.cursor() as cursor:
                cursor.execute("SELECT setting::int FROM pg_settings WHERE name = 'lock_timeout'")
                limits.append(cursor.fetchone()[0])
            return {}

    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: Looking())
    stage(1)
    with session_setting("lock_timeout", f"'{of_role}'"):
        assert enqueue_once() == EnqueuePass(handed_over=1)
    assert limits == [within]


@pytest.mark.parametrize(("refusals", "wait"), [(0, 10), (1, 20), (3, 80), (8, 2560)])
def test_a_refused_job_waits_twice_as_long_each_time(refusals, wait, broker, settings):
    settings.IDEMPOTENCY = PICKY
    stage(1, job_name="tests.kit.jobs.poison", refusals=refusals)
    before = timezone.now()
    assert enqueue_once() == EnqueuePass(refused=1)
    waits = (StagedJob.objects.get().run_at - before).total_seconds()
    assert wait <= waits < wait + 5


def refuse(job):
    raise ValueError(f"{job.job_args['error']}\nof {job.pk}")


def test_the_first_refusal_of_a_job_is_logged_once_for_each_name_and_error(settings, caplog):
    """The backlog counts the job only when it has failed, hours or days later."""
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.refuse"}}
    jobs = [
        job
        for name, error in ("ax", "ay", "bx")
        for job in stage(2, job_name=name, job_args={"error": error})
    ]
    stage(1, job_name="c", job_args={"error": "again"}, refusals=1)
    assert enqueue_once(batch_size=2) == EnqueuePass(refused=7)
    logged = [
        (record.levelname, record.args[1], re.split(r"[ \\]", record.args[3])[1])
        for record in caplog.records
    ]
    assert sorted(logged) == [("WARNING", "a", "x"), ("WARNING", "a", "y"), ("WARNING", "b", "x")]
    [number, name, seconds, text] = caplog.records[0].args
    assert (seconds, name) == (10, next(job.job_name for job in jobs if job.pk == number))
    assert text == StagedJob.objects.get(pk=number).last_error.replace("\n", "\\n"), (
        "it is one line of the log"
    )
    StagedJob.objects.update(run_at=Now())
    caplog.clear()
    assert enqueue_once() == EnqueuePass(refused=7)
    assert not caplog.records, "it was logged before"


@pytest.mark.skipif("connection.vendor != 'sqlite'", reason="needs SQLite")
def test_nobody_else_writes_while_jobs_are_handed_over(monkeypatch):
    """SQLite has no row locks: another enqueuer would read the same jobs."""
    refused = []

    class Looking(Broker):
        def hand_over(self, queue, jobs):
            with closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=0)) as other:
                try:
                    other.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError as error:
                    refused.append(str(error))
            return {}

    connection.ensure_connection()
    monkeypatch.setattr(connection, "transaction_mode", None)  # as Django has it by default
    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: Looking())
    stage(1)
    assert enqueue_once() == EnqueuePass(handed_over=1)
    assert refused == ["database is locked"]
