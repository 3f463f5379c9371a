"""The doctor: each ailment is found and has a cure; a healthy site has none."""

import json
import socket
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from idempotency.models import IdempotencyKey, ProcessHeartbeat
from idempotency.monitoring.doctor import diagnose
from idempotency.monitoring.heartbeats import LOOPS
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.ageing import ago
from tests.kit.commands import run, run_here
from tests.kit.threads import Gate, background
from tests.kit.waiting import eventually

TABLE = IdempotencyKey._meta.db_table
pytestmark = pytest.mark.django_db
#: What the tests' own server is run with, for speed, or has from other tests.
OF_THE_SERVER = {"not_durable", "dead_rows", "old_transaction", "no_process"}


def codes():
    """Return what is found, without what belongs to the server of the tests."""
    return [finding.code for finding in diagnose().findings if finding.code not in OF_THE_SERVER]


def test_a_healthy_site_has_no_findings():
    IdempotencyKeyFactory(finished=True)
    IdempotencyKeyFactory()
    StagedJobFactory()
    for name in LOOPS:
        ProcessHeartbeat.objects.create(name=name, host="web1", pid=1)
    assert codes() == []


def test_a_stuck_key_is_found_until_a_person_has_seen_it():
    key = IdempotencyKeyFactory(
        stuck_at=ago(minutes=1), stuck_code="call_in_doubt", stuck_reason="x"
    )
    assert codes() == ["stuck_keys"]
    IdempotencyKey.objects.filter(pk=key.pk).update(acknowledged_at=timezone.now())
    assert codes() == []
    assert diagnose().measured["keys_acknowledged"] == 1


@pytest.mark.parametrize(("minutes", "wanted"), [(6, []), (9, ["completer_late"])])
def test_a_completer_that_does_not_come_is_found(minutes, wanted):
    IdempotencyKeyFactory(created_at=ago(minutes=minutes), last_run_at=ago(minutes=minutes))
    assert codes() == wanted


def test_a_key_that_the_completer_has_put_off_is_not_late():
    IdempotencyKeyFactory(
        created_at=ago(hours=2), last_run_at=ago(hours=1), next_run_at=ago(seconds=10)
    )
    assert codes() == []


@pytest.mark.parametrize(("hours", "wanted"), [(72.5, []), (74, ["reaper_late"])])
def test_a_reaper_that_does_not_come_is_found(hours, wanted):
    IdempotencyKeyFactory(finished=True, created_at=ago(hours=hours), finished_at=ago(hours=hours))
    assert codes() == wanted


def test_jobs_that_wait_or_have_failed_are_found():
    StagedJobFactory(run_at=ago(minutes=3))
    assert codes() == ["jobs_late"]
    StagedJobFactory(failed_at=ago(minutes=3), last_error="x")
    assert codes() == ["jobs_late", "jobs_failed"]


def test_a_silent_loop_is_found_and_one_beside_it_is_enough():
    ProcessHeartbeat.objects.create(name="reap_keys", host="web1", pid=1, beat_at=ago(minutes=9))
    assert codes() == ["process_silent"]
    ProcessHeartbeat.objects.create(name="reap_keys", host="web2", pid=1)
    assert codes() == []
    assert {process["process"] for process in diagnose().measured["processes"]} == {
        "web1/1",
        "web2/1",
    }


@pytest.mark.parametrize(
    ("elsewhere", "minutes", "names", "silent"),
    [
        (False, 2, ["reap_keys"], []),
        (False, 4, ["reap_keys"], ["reap_keys"]),
        (True, 2, ["reap_keys"], ["reap_keys"]),
        (False, 2, ["reap_keys", "enqueue_jobs"], ["enqueue_jobs"]),
    ],
)
def test_a_probe_finds_the_loops_without_a_young_heartbeat_of_this_host(
    elsewhere, minutes, names, silent
):
    host = "another" if elsewhere else socket.gethostname()
    ProcessHeartbeat.objects.create(
        name="reap_keys", host=host, pid=1, beat_at=ago(minutes=minutes)
    )
    IdempotencyKeyFactory(stuck_at=ago(minutes=1), stuck_code="call_in_doubt", stuck_reason="x")
    done = run_here("idempotency_doctor", "--process", *names)
    assert (done.returncode, [name for name in LOOPS if name in done.stderr]) == (
        bool(silent),
        silent,
    )


def test_a_probe_takes_the_names_of_loops_alone():
    for arguments in (["web"], [], ["reap_keys", "--json"]):
        assert run_here("idempotency_doctor", "--process", *arguments).returncode == 2


def test_what_cannot_be_told_is_said():
    unknown = "\n".join(diagnose().cannot_tell)
    assert all(name in unknown for name in LOOPS)
    assert ("has no statistics" in unknown) is (connection.vendor == "sqlite")


def test_a_look_asks_as_much_of_many_keys_as_of_few():
    with CaptureQueriesContext(connection) as few:
        diagnose()
    IdempotencyKeyFactory.create_batch(40, finished=True)
    IdempotencyKeyFactory.create_batch(
        40, stuck_at=ago(minutes=1), stuck_code="x", stuck_reason="x"
    )
    with CaptureQueriesContext(connection) as many:
        diagnose()
    assert len(many) == len(few) <= 12
    of_keys = [query["sql"] for query in many if f'FROM "{TABLE}"' in query["sql"]]
    assert of_keys
    # The conditions of the partial indexes.
    assert all('finished_at" IS NULL' in sql or 'expires_at" <' in sql for sql in of_keys)


def test_the_command_says_what_to_do_and_exits_with_1():
    ProcessHeartbeat.objects.create(name="enqueue_jobs", host="web1", pid=1, beat_at=ago(minutes=9))
    with pytest.raises(SystemExit) as ended:
        call_command("idempotency_doctor", stdout=(output := StringIO()))
    assert ended.value.code == 1
    assert "process_silent" in output.getvalue()
    with pytest.raises(SystemExit):
        call_command("idempotency_doctor", "--json", stdout=(output := StringIO()))
    told = json.loads(output.getvalue())
    assert "process_silent" in [finding["code"] for finding in told["findings"]]
    assert told["measured"]["due_jobs"] == 0


def test_a_site_without_any_loop_is_not_in_order_unless_cron_runs_the_passes(monkeypatch):
    def exit_status(*options):
        try:
            call_command("idempotency_doctor", *options, stdout=(output := StringIO()))
        except SystemExit as ended:
            return ended.code, "no_process" in output.getvalue()
        return 0, "no_process" in output.getvalue()

    assert exit_status() == (1, True)
    assert exit_status("--cron")[1] is False
    ProcessHeartbeat.objects.create(name="reap_keys", host="web1", pid=1)
    assert exit_status()[1] is False


@pytest.mark.processes
def test_a_database_that_is_away_is_said_in_one_line():
    done = run("idempotency_doctor", DATABASE_URL="postgresql://postgres@127.0.0.1:1/nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_an_old_transaction_is_found_and_named(monkeypatch):
    monkeypatch.setattr("idempotency.monitoring.doctor.OLDEST_TRANSACTION_SECONDS", 0)
    gate = Gate()

    def idle():
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            [pid] = cursor.fetchone()
            gate.wait_here()
            return pid

    with background(idle) as session:
        gate.wait_until_reached()
        [finding] = [found for found in diagnose().findings if found.code == "old_transaction"]
        gate.open()
    assert f"pg_terminate_backend({session.result()})" in finding.cure


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_transactions_that_a_role_may_not_see_are_not_taken_for_none():
    gate = Gate()

    def idle():
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            gate.wait_here()

    with background(idle), transaction.atomic(), connection.cursor() as cursor:
        gate.wait_until_reached()
        cursor.execute(
            "CREATE ROLE few_rights; GRANT SELECT ON ALL TABLES IN SCHEMA public TO few_rights; SET"
            " ROLE few_rights"
        )
        told = diagnose().cannot_tell
        cursor.execute("RESET ROLE")
        transaction.set_rollback(True)
        gate.open()
    assert "GRANT pg_read_all_stats" in "\n".join(told)


def reset_statistics():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute("SELECT pg_stat_reset_single_table_counters(%s::regclass)", [TABLE])


def of_the_table():
    """Return what is found of the table, as soon as its updates are counted."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute("SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = %s", [TABLE])
        if cursor.fetchone()[0] < 1000:
            return None
    return {finding.code for finding in diagnose().findings} | {"counted"}


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("columns", "named"), [("request_path", None), ("request_path, attempts", "harmful")]
)
def test_an_index_on_a_column_that_runs_change_is_found(columns, named):
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE INDEX harmful ON {TABLE} ({columns})")
        try:
            seen = [
                finding.seen for finding in diagnose().findings if finding.code == "extra_index"
            ]
        finally:
            cursor.execute("DROP INDEX harmful")
    assert [f"on columns that runs change: {named}." in text for text in seen] == [True] * bool(
        named
    )


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_table_that_nobody_vacuums_is_found():
    IdempotencyKeyFactory.create_batch(200)
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE} SET (autovacuum_enabled = false)")
        try:
            reset_statistics()
            for _ in range(60):
                cursor.execute(f"UPDATE {TABLE} SET created_at = created_at - interval '1 s'")  # noqa: S608
            cursor.execute(f"ANALYZE {TABLE}")
            assert "dead_rows" in eventually(of_the_table)
        finally:
            cursor.execute(f"ALTER TABLE {TABLE} RESET (autovacuum_enabled)")


@pytest.mark.postgres
def test_a_database_that_may_forget_is_found():
    for value, wanted in (("off", True), ("on", diagnose().measured["fsync"] == "off")):
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('synchronous_commit', %s, true)", [value])
        assert ("not_durable" in {finding.code for finding in diagnose().findings}) is wanted
