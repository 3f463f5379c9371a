"""Bulk work: each row is changed once and counted once, whichever process dies, sleeps or comes
late, and whatever happens to single rows."""

import logging
import os
import signal
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.db import OperationalError, ProgrammingError, connection, transaction
from django.db.models.functions import Now
from django.http import HttpResponse
from psycopg.errors import TransactionTimeout
from pytest_django import Settings

from idempotency import _bulk_work, _watchdog
from idempotency._engine import decisions
from idempotency.completer import CompletePass, complete_once
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.models import BulkRow, BulkWork, IdempotencyKey, StagedJob
from idempotency.reaper import reap_once
from tests.factories import StagedJobFactory, UserFactory
from tests.kit.ageing import ago, lock_end
from tests.kit.breaking import break_with_write
from tests.kit.commands import start
from tests.kit.stuck_keys import MANY, stuck_keys
from tests.kit.threads import all_at_once, elsewhere
from tests.kit.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bulk_work, "CHUNK_ROWS", 5)


def begin(action: str = "hand_back", rows: Any = None, **changes: Any) -> BulkWork:
    """Begin the work on these rows, by default on all stuck keys."""
    chosen = IdempotencyKey.objects.stuck().order_by("pk") if rows is None else rows
    values = {"expected": chosen.count(), "user_id": str(UserFactory().pk), "by": "jane"} | changes
    values |= {"log_message": "Done.", "log_flag": DELETION if action == "discard" else CHANGE}
    work = BulkWork(action=action, note="ticket 7", **values)
    assert _bulk_work.begin(work, chosen)
    return work


def work_off() -> None:
    while _bulk_work.work_off("default"):
        pass


def counted(work: BulkWork) -> tuple[int, dict[str, int], bool]:
    work.refresh_from_db()
    return work.done, work.unchanged, work.finished_at is not None


def each_key_was_changed_once(work: BulkWork, count: int) -> None:
    assert counted(work) == (count, {}, True)
    assert not BulkRow.objects.exists()
    histories = IdempotencyKey.objects.values_list("history", flat=True)
    details = [[(event["event"], event["detail"]) for event in history] for history in histories]
    assert details == [[("handed back", "to the completer, by jane: ticket 7")]] * count
    assert LogEntry.objects.count() == count
    assert set(LogEntry.objects.values_list("user_id", flat=True)) == {int(work.user_id)}


def test_a_pass_of_the_completer_does_the_work() -> None:
    stuck_keys(12)
    work = begin()
    assert complete_once() == CompletePass()
    each_key_was_changed_once(work, 12)


@pytest.mark.parametrize(
    ("action", "state"),
    [("hand_back", "waiting for a retry"), ("acknowledge", "acknowledged")],
)
def test_an_action_changes_keys_as_its_function_does(action: str, state: str) -> None:
    stuck_keys(3)
    work = begin(action)
    work_off()
    assert counted(work) == (3, {}, True)
    assert {key.state for key in IdempotencyKey.objects.with_state()} == {state}


def test_the_acknowledgement_of_many_keys_is_undone() -> None:
    stuck_keys(3, acknowledged_at=Now())
    begin("unacknowledge", IdempotencyKey.objects.acknowledged())
    work_off()
    assert IdempotencyKey.objects.stuck().count() == 3


def test_jobs_are_retried_and_discarded_but_not_those_that_failed_since_or_that_run() -> None:
    jobs = [StagedJobFactory(failed_at=ago(minutes=1)) for _ in range(4)]
    work = begin("discard", StagedJob.objects.filter(pk__in=[job.pk for job in jobs]))
    # The times of SQLite have milliseconds.
    BulkWork.objects.filter(pk=work.pk).update(created_at=ago(seconds=1))
    StagedJob.objects.filter(pk=jobs[0].pk).update(failed_at=Now())
    StagedJob.objects.filter(pk=jobs[1].pk).update(failed_at=None)
    work_off()
    assert counted(work) == (2, {_bulk_work.JOB_CHANGED: 2}, True)
    assert set(StagedJob.objects.all()) == set(jobs[:2])
    assert LogEntry.objects.filter(action_flag=DELETION).count() == 2
    begin("retry", StagedJob.objects.filter(failed_at__isnull=False))
    work_off()
    assert not StagedJob.objects.filter(failed_at__isnull=False).exists()


def test_what_has_changed_since_the_confirmation_is_left_alone_and_counted_by_reason() -> None:
    same, claimed, moved, held, deleted = stuck_keys(5)
    work = begin(expected=7)
    keys = IdempotencyKey.objects
    keys.filter(pk=claimed.pk).update(claim_token=uuid4())
    keys.filter(pk=moved.pk).update(recovery_point="further")
    keys.filter(pk=held.pk).update(locked_until=lock_end())
    deleted.delete()
    work_off()
    reasons = {_bulk_work.CHANGED: 2 + 3, _bulk_work.RUNNING: 1}
    assert counted(work) == (1, reasons, True)
    assert keys.exclude(handed_back_at=None).get() == same


def test_a_form_that_is_sent_twice_begins_one_work() -> None:
    stuck_keys(3)
    work = begin()
    again = BulkWork(
        pk=work.pk, action="hand_back", by="x", user_id="1", log_message="", log_flag=2
    )
    again.expected = 3
    assert not _bulk_work.begin(again, IdempotencyKey.objects.stuck())
    assert (BulkWork.objects.get().by, BulkRow.objects.count()) == ("jane", 3)


def test_stopped_work_waits_until_it_is_resumed() -> None:
    stuck_keys(12)
    work = begin()
    assert _bulk_work._process(work.pk, "default")
    BulkWork.objects.update(stopped_at=Now())
    complete_once()
    assert counted(work) == (5, {}, False)
    BulkWork.objects.update(stopped_at=None)
    complete_once()
    each_key_was_changed_once(work, 12)


class LogInDatabase(logging.Handler):
    """A log that breaks an open transaction, and hides the error."""

    def emit(self, record: logging.LogRecord) -> None:
        break_with_write()


@pytest.mark.parametrize("is_caught", [False, True])
def test_a_row_that_the_database_refuses_is_left_out_and_the_others_are_changed(
    is_caught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, *_ = keys = stuck_keys(7)

    decide = decisions.decide

    def refuse(name: str, decision: Any) -> bool:
        if decision.pk == bad.pk and is_caught:  # A wrapper around execute() hides the error.
            decided = decide(name, decision)
            break_with_write()
            return decided
        if decision.pk == bad.pk:  # A CHECK refuses it.
            IdempotencyKey.objects.filter(pk=bad.pk).update(recovery_point="")
        return decide(name, decision)

    monkeypatch.setattr(decisions, "decide", refuse)
    work = begin()
    monkeypatch.setattr(logging.getLogger("idempotency"), "handlers", [LogInDatabase()])
    work_off()
    assert counted(work) == (6, {_bulk_work.FAILED: 1}, True)
    assert IdempotencyKey.objects.stuck().get() == bad
    assert len(keys) == 7


def test_work_that_fails_as_a_whole_is_stopped_with_its_error_and_does_not_stop_the_completer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("no log")

    monkeypatch.setattr(_bulk_work, "_log", fail)
    stuck_keys(3)
    work = begin()
    assert complete_once() == CompletePass()
    assert counted(work) == (0, {}, False)
    assert (work.error, work.stopped_at is None) == ("ValueError: no log", False)
    assert IdempotencyKey.objects.stuck().count() == 3


def test_work_that_exceeds_a_time_limit_of_the_project_does_not_stop_the_completer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end_session(*args: Any) -> None:
        raise OperationalError("terminating connection") from TransactionTimeout()

    monkeypatch.setattr(_bulk_work, "_log", end_session)
    stuck_keys(3)
    work = begin()
    assert complete_once() == CompletePass()
    assert counted(work) == (0, {}, False)
    assert work.stopped_at is not None


def test_a_role_without_the_tables_of_bulk_work_completes_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deny(*args: Any, **options: Any) -> bool:
        raise ProgrammingError("permission denied for table idempotency_bulkwork")

    monkeypatch.setattr(_bulk_work, "work_off", deny)
    assert complete_once() == CompletePass()


def test_slow_answers_of_the_project_leave_the_completer_time_for_keys(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"ANSWER_FOR_KEY": lambda key: HttpResponse(str(key.pk))}
    monkeypatch.setattr(_bulk_work, "CHUNK_SECONDS", -1)
    keys = stuck_keys(3)
    keys[0].delete()
    work = begin("answer", IdempotencyKey.objects.order_by("pk"), answer={"kind": "project"})
    keys[1].delete()
    assert len(_bulk_work._prepared(work.pk, "default") or ()) == 1
    work_off()
    assert counted(work) == (1, {_bulk_work.CHANGED: 1}, True)


def test_an_answer_of_the_project_that_hangs_stops_the_work(settings: Settings) -> None:
    def hang(key: IdempotencyKey) -> None:
        (run,) = _watchdog._runs.values()
        run.mark("shop/answers.py:7")

    settings.IDEMPOTENCY = {"ANSWER_FOR_KEY": hang}
    stuck_keys(1)
    work = begin("answer", answer={"kind": "project"})
    work_off()
    assert counted(work) == (0, {}, False)
    assert work.stopped_at is not None
    assert work.error.endswith("hangs at shop/answers.py:7")


def test_the_work_of_a_person_who_was_deleted_goes_on_without_entries_in_the_log() -> None:
    stuck_keys(3)
    work = begin(user_id="999999999")
    work_off()
    assert counted(work) == (3, {}, True)
    assert not LogEntry.objects.exists()


@pytest.mark.postgres
def test_a_key_that_another_transaction_has_locked_waits_and_the_others_do_not() -> None:
    locked, *_ = stuck_keys(7)
    work = begin()
    with transaction.atomic():
        IdempotencyKey.objects.select_for_update().get(pk=locked.pk)
        elsewhere(work_off)
        assert elsewhere(lambda: counted(work)) == (6, {}, False)
    work_off()
    each_key_was_changed_once(work, 7)


@pytest.mark.postgres
def test_a_job_that_runs_now_is_not_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idempotency.inbox.WAIT_SECONDS", 1)
    job = StagedJobFactory(failed_at=ago(minutes=1))
    work = begin("discard", StagedJob.objects.all())
    with transaction.atomic(), process_once(STAGED_JOBS, str(job.pk)):
        elsewhere(work_off)
    assert counted(work) == (0, {_bulk_work.JOB_CHANGED: 1}, True)


@pytest.mark.postgres
def test_several_processes_at_once_change_each_key_once() -> None:
    stuck_keys(60)
    work = begin()
    all_at_once(lambda number: work_off(), 4)
    work_off()
    each_key_was_changed_once(work, 60)


@pytest.mark.postgres
def test_of_two_works_on_the_same_keys_each_key_is_changed_for_one() -> None:
    stuck_keys(40)
    works = [begin(), begin()]
    all_at_once(lambda number: work_off(), 2)
    work_off()
    done = [counted(work)[0] for work in works]
    assert sum(done) == 40
    assert sum(work.unchanged.get(_bulk_work.CHANGED, 0) for work in works) == 40
    assert LogEntry.objects.count() == 40


def test_the_reaper_deletes_old_work_with_its_rows() -> None:
    stuck_keys(1)
    finished, stopped, kept = begin(), begin(), begin()
    BulkWork.objects.filter(pk=finished.pk).update(finished_at=ago(days=9))
    BulkWork.objects.filter(pk=stopped.pk).update(stopped_at=ago(days=9))
    reap_once()
    assert BulkWork.objects.get() == kept
    assert BulkRow.objects.get().work_id == kept.pk


#: A child process that sends itself a signal when it calls a function for the third time.
CHILD = """
import os, signal
import django
django.setup()
from idempotency import _bulk_work, _watchdog
_bulk_work.CHUNK_ROWS = 5
calls, function = [], _bulk_work.{name}
def counting(*args, **more):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.{signal})
    return function(*args, **more)
_bulk_work.{name} = counting
while _bulk_work.work_off("default"):
    pass
"""


@pytest.mark.processes
@pytest.mark.parametrize("name", ["_locked", "_targets", "_change", "_log", "_process"])
def test_a_process_that_is_killed_at_any_place_leaves_each_row_changed_or_not(name: str) -> None:
    stuck_keys(23)
    work = begin()
    with start(python=CHILD.format(name=name, signal="SIGKILL")) as child:
        assert child.wait(60) == -signal.SIGKILL
    done, unchanged, finished = counted(work)
    assert (done + BulkRow.objects.count(), unchanged, finished) == (23, {}, False)
    assert LogEntry.objects.count() == done
    eventually(lambda: _bulk_work.work_off("default") or counted(work)[2])
    work_off()
    each_key_was_changed_once(work, 23)


@pytest.mark.postgres
@pytest.mark.processes
def test_a_process_that_sleeps_in_a_chunk_and_wakes_up_late_changes_nothing_more() -> None:
    stuck_keys(23)
    work = begin()
    short = (
        "from django.conf import settings\n"
        "settings.IDEMPOTENCY = {{**settings.IDEMPOTENCY, 'LOCK_TIMEOUT_SECONDS': 2}}\n"
    )
    code = CHILD.replace("import django\n", f"import django\n{short}", 1)
    with start(python=code.format(name="_log", signal="SIGSTOP")) as child:
        eventually(lambda: os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT))
        work_off()
        assert not counted(work)[2], "the sleeper holds the work until its time limit"
        eventually(lambda: (work_off(), counted(work)[2])[1])
        child.send_signal(signal.SIGCONT)
        assert child.wait(60) != 0
    each_key_was_changed_once(work, 23)


@pytest.mark.postgres
@pytest.mark.processes
def test_completers_that_are_killed_again_and_again_finish_the_work() -> None:
    count = 1500
    stuck_keys(1)
    with connection.cursor() as cursor:
        columns = [field.column for field in IdempotencyKey._meta.concrete_fields]
        names = [name for name in columns if name not in ("id", "idempotency_key", "claim_token")]
        cursor.execute(MANY.format(", ".join(names)), [count])
    work = begin()
    command = "complete_keys", "--loop", "--interval", "0.1", "--skip-checks"
    kills = 0
    while not counted(work)[2]:
        before, kills = work.done, kills + 1
        with start(*command), start(*command):  # The end of the block kills both.
            eventually(lambda before=before: counted(work)[0] > before)
    assert kills > 1
    each_key_was_changed_once(work, count)
