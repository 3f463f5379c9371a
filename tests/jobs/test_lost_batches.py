"""Batches whose results cannot be written: time limits, lost connections and rows that cannot be
deleted. No job is handed over again and again."""

import os
import time
from collections import Counter
from contextlib import contextmanager

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction
from django.db.models.functions import Now
from django.db.models.signals import pre_delete

from idempotency import _outcomes, _unwritten
from idempotency._batch import Release
from idempotency._engine.limits import IDLE, LOCK
from idempotency.backends import MAX_ATTEMPTS, NotOffered, OneByOne
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.interventions import retry_jobs
from idempotency.models import StagedJob
from idempotency.monitoring.doctor import diagnose
from tests.factories import StagedJobFactory
from tests.kit.commands import start
from tests.kit.database import database_setting
from tests.kit.outages import cut_this_connection
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

#: The jobs that a backend got, in order.
sent = []


def send(job):
    """Take a job, and do what its arguments say."""
    sent.append(job.pk)
    time.sleep(job.job_args.get("seconds", 0))
    if job.job_args.get("is_refused"):
        raise LookupError
    if job.job_args.get("loses_connection"):
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


class Sender(OneByOne):
    """A backend whose broker is no database."""

    uses_database = False

    def hand_over_one(self, queue, job):
        send(job)


def write_down(job):
    """Take a job slowly, in a process that is given the name of a file."""
    time.sleep(0.05)
    with open(os.environ["SENT"], "a") as file:
        file.write(f"{job.pk}\n")


@pytest.fixture(autouse=True, params=["send", "Sender"])
def backend(request, settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.{request.param}"}}
    sent.clear()
    return request.param


STUBBORN = "tests.kit.jobs.stubborn"


@pytest.fixture(params=["transaction_timeout", "idle_in_transaction_session_timeout"])
def time_limit(request):
    """Limit the time of transactions, or their time without a statement, to a second."""
    with limited(request.param, "1s"):
        yield


def limited(name, limit):
    connection.ensure_connection()
    if name == "transaction_timeout" and connection.pg_version < 170000:
        pytest.skip("needs PostgreSQL 17")
    return database_setting(name, limit)


def stage(count, **args):
    return [job.pk for job in StagedJobFactory.create_batch(count, job_args=args)]


def times_sent():
    return set(Counter(sent).values())


def test_a_batch_that_would_exceed_a_time_limit_is_cut(time_limit):
    jobs = stage(12, seconds=0.12)
    assert enqueue_once() == EnqueuePass(handed_over=12)
    assert sent == jobs


@pytest.mark.parametrize("backend", ["Sender"], indirect=True)
@pytest.mark.parametrize("time_limit", ["transaction_timeout"], indirect=True)
def test_a_batch_without_merged_round_trips_is_cut_too(time_limit, settings, caplog):
    settings.IDEMPOTENCY |= {"MERGE_ROUND_TRIPS": False}
    jobs = stage(12, seconds=0.12)
    assert enqueue_once() == EnqueuePass(handed_over=12)
    assert sent == jobs
    assert "rolled back" not in caplog.text


LOOP = f"""
import django; django.setup()
from django.core.management import call_command
from django.test.utils import override_settings
with override_settings(IDEMPOTENCY={{"ENQUEUERS": {{"*": "{__name__}.write_down"}}}}):
    call_command("enqueue_jobs", loop=True, interval=0.1)
"""


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["send"], indirect=True)
def test_two_loops_whose_batches_would_exceed_a_time_limit_send_each_job_once(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SENT", str(tmp_path / "sent"))
    jobs = stage(100)
    with (
        limited("transaction_timeout", "4s"),
        start(python=LOOP) as one,
        start(python=LOOP) as other,
    ):
        eventually(lambda: not StagedJob.objects.exists())
        jobs += stage(1)
        eventually(lambda: not StagedJob.objects.exists())
        for process in (one, other):
            process.terminate()
            assert process.wait(60) == 0
    assert sorted((tmp_path / "sent").read_text().split()) == sorted(map(str, jobs))


def note_limits(job):
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT current_setting('{IDLE}'), current_setting('{LOCK}')")
        sent.append(cursor.fetchone())


@pytest.mark.parametrize("backend", ["note_limits"], indirect=True)
@pytest.mark.parametrize("merged", [True, False], ids=["merged", "one by one"])
@pytest.mark.parametrize(
    ("given", "found"), [(("5s", "500ms"), ("5s", "500ms")), (("1h", "2min"), ("90s", "10s"))]
)
def test_a_batch_only_lowers_the_time_limits_of_a_role(given, found, merged, settings):
    settings.IDEMPOTENCY |= {"MERGE_ROUND_TRIPS": merged}
    with limited(IDLE, given[0]), limited(LOCK, given[1]):
        for _ in range(2):
            stage(1)
            enqueue_once()
    assert sent == [found] * 2


def test_a_job_that_exceeds_a_time_limit_alone_is_not_sent_again_and_again(time_limit, backend):
    _, [slow], _ = stage(2), stage(1, seconds=1.3), stage(2)
    found = enqueue_once()
    assert sent.count(slow) == 1
    if backend == "Sender":
        assert (found, times_sent()) == (EnqueuePass(handed_over=5), {1})
        return
    assert found == EnqueuePass(handed_over=4, refused=1)
    assert max(times_sent()) == 2, "a rollback undoes what a function may have written"
    job = StagedJob.objects.get()
    assert (job.pk, job.refusals) == (slow, 1)
    assert "transaction timeout" in job.last_error


def test_no_job_is_sent_in_a_transaction_that_is_lost(backend):
    before, [broken], after = stage(3), stage(1, loses_connection=True), stage(30)
    enqueue_once()
    assert sent[:4] == [*before, broken]
    assert sent.count(broken) == 1
    assert max(sent.count(job) for job in after) == 1


class Losing(Sender):
    """A backend whose broker may lose jobs."""

    follow_up_seconds = 600


@pytest.mark.parametrize("backend", ["Losing"], indirect=True)
def test_a_job_that_its_broker_may_lose_stays_staged_after_the_connection_was_lost():
    [first], _ = stage(1), stage(1, loses_connection=True)
    enqueue_once()
    assert StagedJob.objects.get(pk=first).hand_overs == 1


@pytest.mark.parametrize("backend", ["Losing"], indirect=True)
def test_a_hand_over_that_cannot_be_counted_refuses_its_job_alone():
    stage(2)
    stubborn = StagedJobFactory(job_name=STUBBORN, job_args={})
    stage(3)
    with trigger("UPDATE", f"OLD.job_name = '{STUBBORN}' AND NEW.hand_overs > OLD.hand_overs"):
        assert enqueue_once() == EnqueuePass(handed_over=5, refused=1)
    assert (len(sent), times_sent()) == (6, {1})
    assert StagedJob.objects.get(refusals=1) == stubborn
    assert StagedJob.objects.filter(hand_overs=1).count() == 5


@pytest.mark.parametrize("backend", ["Losing"], indirect=True)
def test_a_result_that_cannot_be_written_at_all_is_kept_until_it_can():
    jobs = stage(2)
    stubborn = StagedJobFactory(job_name=STUBBORN, job_args={})
    with (
        trigger("UPDATE", f"OLD.job_name = '{STUBBORN}'"),
        pytest.raises(DatabaseError, match="kept for the audit"),
    ):
        enqueue_once()
    assert enqueue_once() == EnqueuePass(refused=1)
    assert (sent, StagedJob.objects.get(refusals=1)) == ([*jobs, stubborn.pk], stubborn)


class Singly:
    """A backend that refuses several jobs at once."""

    def hand_over(self, queue, jobs):
        if len(jobs) > 1:
            raise ValueError("one at a time")
        send(jobs[0])
        return {}


def test_a_job_that_breaks_the_transaction_alone_is_the_one_that_is_refused(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.Singly"}}
    before, [broken], after = stage(2), stage(1, loses_connection=True), stage(2)
    enqueue_once()
    assert sent == [*before, broken, *before, *after]
    assert list(StagedJob.objects.values_list("pk", "refusals")) == [(broken, 1)]


class Together:
    """A backend that sends all jobs in one call."""

    def hand_over(self, queue, jobs):
        for job in jobs:
            send(job)
        return {}


def test_the_first_of_the_jobs_that_break_the_transaction_together_is_refused(settings, caplog):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.Together"}}
    [first], [broken] = stage(1), stage(1, loses_connection=True)
    assert enqueue_once(stop=lambda: bool(sent)) == EnqueuePass(refused=1)
    assert dict(StagedJob.objects.values_list("pk", "refusals")) == {first: 1, broken: 0}
    assert "terminating connection" in StagedJob.objects.get(pk=first).last_error
    assert (
        "a transaction was rolled back after the hand-over of its staged jobs, 1 of which are"
        " handed over again: OperationalError: terminating connection" in caplog.text
    )


def execute(text):
    with connection.cursor() as cursor:
        cursor.execute(text)


RAISE, SKIP = "RAISE EXCEPTION 'kept for the audit'", "RETURN NULL"


@contextmanager
def trigger(event, when="true", *, body=RAISE, deferred=False):
    """Give the table of staged jobs a trigger."""
    kind = "CONSTRAINT TRIGGER keep AFTER" if deferred else "TRIGGER keep BEFORE"
    mode = "DEFERRABLE INITIALLY DEFERRED" if deferred else ""
    execute(f"CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body}; END $$")
    execute(
        f"CREATE {kind} {event} ON {StagedJob._meta.db_table} {mode} FOR EACH ROW WHEN ({when})"
        " EXECUTE FUNCTION keep()"
    )
    try:
        yield
    finally:
        execute("DROP FUNCTION keep() CASCADE")


@pytest.mark.parametrize("body", [RAISE, SKIP])
def test_a_job_whose_row_cannot_be_deleted_is_sent_once(body):
    jobs = stage(3)
    with trigger("DELETE", body=body):
        assert enqueue_once() == EnqueuePass(handed_over=3, refused=3)
        for refusals in range(2, MAX_ATTEMPTS):
            due_now()
            assert enqueue_once() == EnqueuePass(refused=3)
            assert set(StagedJob.objects.values_list("refusals", flat=True)) == {refusals}
        assert [finding.code for finding in diagnose().findings if "job" in finding.code] == [
            "jobs_not_deleted"
        ]
        due_now()
        assert enqueue_once() == EnqueuePass(failed=3)
    assert {
        error.partition(":")[0] for error in StagedJob.objects.values_list("last_error", flat=True)
    } == {"NotDeleted"}
    retry_jobs()
    assert enqueue_once() == EnqueuePass()
    assert (sent, StagedJob.objects.count()) == (jobs, 0)


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_error_names_the_number_of_rows_that_were_not_deleted(jobs):
    stage(1, keep=True)
    stage(jobs - 1)
    with trigger("DELETE", "OLD.job_args ? 'keep'", body=SKIP):
        assert enqueue_once() == EnqueuePass(handed_over=jobs, refused=jobs)
    text = f"1 of {jobs} rows were not deleted"
    assert StagedJob.objects.filter(last_error__contains=text).count() == jobs


def due_now():
    StagedJob.objects.update(run_at=Now())


def test_a_deletion_that_exceeds_a_time_limit_is_repeated_row_by_row():
    jobs = stage(20)
    with (
        trigger("DELETE", body="PERFORM pg_sleep(0.03); RETURN OLD"),
        database_setting("statement_timeout", "300ms"),
    ):
        assert enqueue_once() == EnqueuePass(handed_over=20, refused=20)
        due_now()
        assert enqueue_once() == EnqueuePass()
    assert (sent, StagedJob.objects.count()) == (jobs, 0)


def test_a_role_without_the_right_to_delete_sends_each_job_once():
    jobs = stage(3)
    execute("CREATE ROLE sender NOLOGIN")
    execute("GRANT SELECT, UPDATE ON ALL TABLES IN SCHEMA public TO sender")
    try:
        execute("SET ROLE sender")
        assert enqueue_once() == EnqueuePass(handed_over=3, refused=3)
        due_now()
        assert enqueue_once() == EnqueuePass(refused=3)
    finally:
        execute("RESET ROLE")
        execute("DROP OWNED BY sender")
        execute("DROP ROLE sender")
    assert all(
        "permission denied" in error
        for error in StagedJob.objects.values_list("last_error", flat=True)
    )
    due_now()
    assert enqueue_once() == EnqueuePass()
    assert (sent, StagedJob.objects.count()) == (jobs, 0)


def test_one_row_that_cannot_be_deleted_stops_no_other_job():
    jobs = stage(3)
    StagedJobFactory(job_name=STUBBORN, job_args={})
    with trigger("DELETE", f"OLD.job_name = '{STUBBORN}'"):
        assert enqueue_once() == EnqueuePass(handed_over=4, refused=4)
        due_now()
        assert enqueue_once() == EnqueuePass(refused=1)
        jobs += stage(3)
        assert enqueue_once() == EnqueuePass(handed_over=3)
    assert (len(sent), times_sent()) == (7, {1})
    assert StagedJob.objects.get().job_name == STUBBORN


def test_a_row_that_makes_commit_fail_stops_no_other_job(backend):
    jobs = stage(6)
    stubborn = StagedJobFactory(job_name=STUBBORN, job_args={})
    with trigger("DELETE", f"OLD.job_name = '{STUBBORN}'", deferred=True):
        enqueue_once()
        assert StagedJob.objects.count() <= 3
        for _ in range(3):
            due_now()
            enqueue_once()
        assert StagedJob.objects.get().pk == stubborn.pk
    assert max(sent.count(job) for job in jobs) <= (1 if backend == "Sender" else 4)


def test_of_two_rows_only_the_one_that_makes_commit_fail_is_left(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.Sender"}}
    stage(1)
    stubborn = StagedJobFactory(job_name=STUBBORN, job_args={})
    with trigger("DELETE", f"OLD.job_name = '{STUBBORN}'", deferred=True):
        assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
        assert list(StagedJob.objects.values_list("pk", flat=True)) == [stubborn.pk]


@pytest.mark.parametrize("body", [RAISE, SKIP])
def test_a_process_whose_results_cannot_be_written_hands_nothing_more_over(backend, body):
    jobs = stage(3)
    with trigger("DELETE OR UPDATE", body=body):
        for _ in range(3):
            with pytest.raises(DatabaseError):
                enqueue_once()
        assert (sent, StagedJob.objects.count()) == (jobs, 3)
    enqueue_once()
    due_now()
    enqueue_once()
    assert not StagedJob.objects.exists()
    assert times_sent() == {1} if backend == "Sender" else times_sent() <= {1, 2}


def test_a_job_that_was_not_offered_is_never_taken_for_one_that_the_queue_has():
    jobs, table = stage(1), StagedJob._meta.db_table
    _unwritten._left["default"] = [(StagedJob.objects.get(), NotOffered())]
    execute(f"ALTER TABLE {table} RENAME TO hidden")
    try:
        with pytest.raises(DatabaseError):
            enqueue_once()
    finally:
        execute(f"ALTER TABLE hidden RENAME TO {table}")
    for _ in range(2):
        due_now()
        enqueue_once()
    assert (sent, StagedJob.objects.count()) == (jobs, 0)


def test_a_job_that_is_let_go_takes_no_result_of_another_job_with_it():
    """Else the job that the broker has would be handed over again."""
    stubborn = StagedJobFactory(job_name=STUBBORN, job_args={})
    delivered = StagedJobFactory(job_args={})
    _unwritten._left["default"] = [(stubborn, Release(stubborn.run_at)), (delivered, None)]
    with trigger("UPDATE OR DELETE", f"OLD.job_name = '{STUBBORN}'"):
        _unwritten.write_left("default", _outcomes.Log())
    assert list(StagedJob.objects.values_list("pk", flat=True)) == [stubborn.pk]


def test_a_result_stays_as_it_is_when_the_connection_is_lost_as_it_is_written():
    """The queue has the job. Its row can be deleted, so it is no refusal."""
    stage(1)
    _unwritten._left["default"] = [(StagedJob.objects.get(), None)]

    def cut(execute, sql, *arguments):
        if "FOR UPDATE" in sql:
            cut_this_connection()
        return execute(sql, *arguments)

    with connection.execute_wrapper(cut), pytest.raises(OperationalError):
        enqueue_once()
    assert enqueue_once() == EnqueuePass(handed_over=1)
    assert (sent, StagedJob.objects.count()) == ([], 0)


def test_what_a_batch_has_to_log_is_logged_before_the_next(caplog):
    stage(2, is_refused=True)
    logged = []
    enqueue_once(batch_size=1, stop=lambda: logged.append("was refused" in caplog.text))
    assert logged[:2] == [False, True]


def test_results_that_are_left_are_logged_as_they_are_written(caplog):
    stage(1)
    _unwritten._left["default"] = [(StagedJob.objects.get(), None)]
    due_now()  # Another enqueuer has claimed the job.
    _unwritten.write_left("default", _outcomes.Log())
    assert "1 results of hand-overs are not written" in caplog.text


def test_a_job_that_was_not_offered_keeps_its_turn():
    stage(1)
    job = StagedJob.objects.get()
    with transaction.atomic():
        _outcomes.write("default", [(job, NotOffered())], float("inf"), _outcomes.Log())
    assert StagedJob.objects.get().run_at == job.run_at


def test_the_loss_of_the_session_at_the_deletion_is_told_as_it_is(caplog):
    left = [1]

    def lose(**kwargs):
        if left:
            left.clear()
            send(StagedJob(job_args={"loses_connection": True}))

    stage(1)
    pre_delete.connect(lose, sender=StagedJob)
    try:
        enqueue_once(stop=lambda: "rolled back" in caplog.text)
    finally:
        pre_delete.disconnect(lose, sender=StagedJob)
    assert "handed over again: OperationalError: terminating connection" in caplog.text
