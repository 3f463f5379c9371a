"""The three commands: their exit status, their output, and how they stop and go on."""

import os
import pty
import re
import signal
from contextlib import ExitStack

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection

from idempotency.models import IdempotencyKey, ProcessHeartbeat, StagedJob
from rides_demo.processes.ports import free_port
from tests.factories import StagedJobFactory
from tests.kit.ageing import expired_keys, make_older
from tests.kit.commands import FAILING, RECOVERED, run, run_here, start
from tests.kit.database import held_transaction, lock_table, waits_for_a_lock
from tests.kit.waiting import eventually

COMMANDS = ["enqueue_jobs", "complete_keys", "reap_keys"]
REST = "0 settled, 0 stuck, 0 messages\n"
NOBODY = "postgresql://postgres@127.0.0.1:{}/rides"

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def loop(broker):
    """Return a function that starts a command with --loop; it is ended after the test."""
    with ExitStack() as processes:
        yield lambda command, *arguments, **changes: processes.enter_context(
            start(command, "--loop", "--interval", "0.1", *arguments, **changes)
        )


def backends():
    """Return the connections of other processes to the test database, by process id of the
    server."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <>"
            " pg_backend_pid() AND backend_type = 'client backend'"
        )
        return {pid for (pid,) in cursor.fetchall()}


@pytest.mark.parametrize("command", COMMANDS)
def test_one_pass_on_an_empty_table_exits_0(command, broker):
    done = run_here(command)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"{command}: 0 .*\n", done.stdout)


@pytest.mark.processes
def test_the_exit_status_of_a_process_is_that_of_its_command(broker):
    assert run("enqueue_jobs").returncode == 0
    assert run("reap_keys", "--interval", "0").returncode == 2


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.processes
def test_a_database_that_cannot_be_reached_exits_1_with_one_line(command):
    done = run(command, DATABASE_URL=NOBODY.format(free_port()))
    assert done.returncode == 1
    assert "onnection" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.processes
def test_a_broker_that_cannot_be_reached_exits_1_and_burns_nothing():
    StagedJobFactory()
    done = run("enqueue_jobs", REDIS_URL=f"redis://127.0.0.1:{free_port()}/0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert StagedJob.objects.get().refusals == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--interval", "0"],
        ["--interval", "soon"],
        ["--batch-size", "0"],
        ["--database", "nowhere"],
        ["--unknown"],
        ["extra"],
    ],
)
def test_a_wrong_argument_exits_2(arguments):
    done = run_here("reap_keys", *arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reap_keys", "--interval", "0"], "'0' is not a number of seconds above 0, at most 86400"),
        (
            ["reap_keys", "--batch-size", "1.5"],
            "'1.5' is not a whole number above 0, at most 100000",
        ),
        (
            ["staged_jobs", "list", "--limit", "-5"],
            "'-5' is not a whole number above 0, at most 100000",
        ),
        (
            ["describe_idempotency", "--urlconf", "nope.urls"],
            "--urlconf nope.urls: No module named 'nope'",
        ),
        (["describe_idempotency", "--urlconf", "tests.models"], "--urlconf tests.models: "),
    ],
)
def test_a_wrong_argument_is_told_what_is_right(arguments, said):
    done = run_here(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [*COMMANDS, "idempotency_doctor", "staged_jobs stats"])
def test_a_missing_migration_is_told_in_one_line_with_its_cure(command, broker):
    with connection.cursor() as cursor:
        cursor.execute(
            "ALTER TABLE idempotency_idempotencykey RENAME TO away; ALTER TABLE"
            " idempotency_stagedjob RENAME TO away_too"
        )
    try:
        done = run_here(*command.split())
    finally:
        with connection.cursor() as cursor:
            cursor.execute(
                "ALTER TABLE away RENAME TO idempotency_idempotencykey; ALTER TABLE away_too RENAME"
                " TO idempotency_stagedjob"
            )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert re.search(
        r"relation \S+ does not exist: run manage.py migrate --database default$",
        done.stderr.strip(),
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_options_the_defaults_and_the_exit_status(command):
    done = run_here(command, "--help")
    assert done.returncode == 0
    for word in (
        "--loop",
        "--interval",
        "--batch-size",
        "--dry-run",
        "--database",
        "default:",
        "Exit status",
    ):
        assert word in " ".join(done.stdout.split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.processes
def test_a_loop_ends_with_0_when_it_is_told_to_even_while_it_waits(command, number, broker):
    with start(command, "--loop", "--interval", "3600") as process:
        eventually(ProcessHeartbeat.objects.exists)
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.processes
def test_a_loop_goes_on_working_and_says_nothing_when_idle(loop, broker):
    process = loop("enqueue_jobs")
    StagedJobFactory()
    eventually(lambda: not StagedJob.objects.exists())
    StagedJobFactory()
    eventually(lambda: not StagedJob.objects.exists())
    process.terminate()
    output, errors = process.communicate(timeout=60)
    counts = re.findall(
        r"^enqueue_jobs: (\d) handed over, 0 refused, 0 failed$", output, re.MULTILINE
    )
    assert sum(map(int, counts)) == 2
    start_line, *rest = output.splitlines()
    assert start_line == "enqueue_jobs: database 'default', a pass every 0.1 s"
    assert len(rest) == len(counts) <= 2, "a pass that did nothing says nothing"
    assert (process.returncode, errors) == (0, "")


@pytest.mark.processes
def test_a_loop_that_waits_longer_than_a_session_may_be_idle_logs_nothing(broker):
    with start(
        "enqueue_jobs", "--loop", "--interval", "1", PGOPTIONS="-c idle_session_timeout=500"
    ) as process:
        for _ in range(3):
            StagedJobFactory()
            eventually(lambda: not StagedJob.objects.exists())
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.processes
def test_the_reaper_rests_longer_than_a_session_may_be_idle(broker):
    """A deletion that waits for a lock is a long batch, after which the reaper rests for as long as
    possible."""
    expired_keys(20)
    with ExitStack() as processes:
        with held_transaction(lambda: lock_table("tests_entry")):
            reaper = start(
                "reap_keys", "--batch-size", "10", PGOPTIONS="-c idle_session_timeout=1500"
            )
            process = processes.enter_context(reaper)
            eventually(waits_for_a_lock)
        _, errors = process.communicate(timeout=90)
    assert (process.returncode, errors) == (0, "")
    assert not IdempotencyKey.objects.exists()


@pytest.mark.processes
def test_a_loop_outlives_its_database_connection_and_logs_one_line_per_change(loop, broker):
    process = loop("enqueue_jobs")
    for _ in range(2):
        eventually(backends)
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", [list(backends())]
            )
        eventually(lambda: not StagedJob.objects.exists())
        StagedJobFactory()
        eventually(lambda: not StagedJob.objects.exists())
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
    # A connection that was dropped between two passes may be replaced without anybody noticing.
    assert errors.count(FAILING) == errors.count(RECOVERED) <= 2


@pytest.mark.processes
def test_a_loop_outlives_its_broker_and_logs_one_line_per_change(loop, broker, tmp_path):
    from rides_demo.processes.embedded import Redis

    with Redis(tmp_path / "redis") as server:
        process = loop("enqueue_jobs", REDIS_URL=server.url)
        StagedJobFactory()
        eventually(lambda: not StagedJob.objects.exists())
        server.stop()
        StagedJobFactory()
        errors = process.stderr.readline()
        assert FAILING in errors
        server.start()
        eventually(lambda: not StagedJob.objects.exists())
        process.terminate()
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    assert (errors + rest).count(FAILING) == 1
    assert rest.count(RECOVERED) == 1


@pytest.mark.processes
def test_sigterm_finishes_the_batch_and_leaves_the_rest(loop, broker):
    """The signal comes while a batch waits for a lock; the batch commits, the next ones are not
    begun."""
    keys = expired_keys(40)
    # A table whose references to the keys the batch must set to null.
    with held_transaction(lambda: lock_table("tests_entry")):
        process = loop("reap_keys", "--batch-size", "10")
        eventually(waits_for_a_lock)
        os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert IdempotencyKey.objects.count() == len(keys) - 10


def test_a_dry_run_says_so_and_changes_nothing(broker, capsys):
    StagedJobFactory()
    expired_keys(2)
    call_command("enqueue_jobs", dry_run=True)
    call_command("reap_keys", dry_run=True)
    call_command("complete_keys", dry_run=True)
    output = capsys.readouterr().out
    assert "enqueue_jobs: would be: 1 handed over" in output
    assert "reap_keys: would be: 2 deleted" in output
    assert "complete_keys: would be: 0 run" in output
    assert StagedJob.objects.count() == 1
    assert IdempotencyKey.objects.count() == 2


@pytest.mark.processes
def test_the_reaper_counts_on_a_terminal_and_nowhere_else(broker):
    """A real terminal, and a pipe."""
    expired_keys(30)
    make_older(-2 * 3600, "finished_at")
    assert (
        run("reap_keys", "--batch-size", "10").stdout
        == "reap_keys: 0 deleted, 0 protected, " + REST
    )
    make_older(2 * 3600, "finished_at")
    terminal, its_end = pty.openpty()
    with start("reap_keys", "--batch-size", "10", stdout=its_end) as process:
        os.close(its_end)
        assert process.wait(60) == 0
        output = os.read(terminal, 10_000).decode()
        os.close(terminal)
    counter, line = output.split("\r\x1b[K")
    assert counter == "\r10 of 30\r20 of 30\r30 of 30"
    assert line.strip() == f"reap_keys: 30 deleted, 0 protected, {REST}".strip()


def test_the_completer_takes_a_number_of_threads(broker):
    done = run_here("complete_keys", "--concurrency", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert run_here("complete_keys", "--concurrency", "0").returncode == 2


def test_it_can_be_called_from_code(broker, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    call_command("enqueue_jobs", verbosity=0)
    assert capsys.readouterr().out == ""
    with pytest.raises(CommandError):
        call_command("enqueue_jobs", "--database", "nowhere")
    assert signal.getsignal(signal.SIGTERM) == handler
