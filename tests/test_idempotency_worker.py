"""The three loops in one process: each does its work, none ends another, and a health check sees how they are."""

import re
import signal
from contextlib import contextmanager

import pytest
from django.conf import settings
from django.core.management import load_command_class
from django.db import connection

from idempotency.models import IdempotencyKey, ProcessedMessage, StagedJob
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.ageing import ago, expired_key
from tests.kit.commands import FAILING, RECOVERED, run, start
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True), pytest.mark.processes]

INTERVALS = [f"--{loop}-interval=0.1" for loop in ("enqueue", "complete", "reap")]
LOOPS = {"enqueue_jobs", "complete_keys", "reap_keys"}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "heartbeats"


@contextmanager
def worker(*arguments, **changes):
    with start("idempotency_worker", *INTERVALS, *arguments, **changes) as process:
        yield process


def check(folder, max_age="180"):
    return run("idempotency_worker", "--check", "--heartbeat", str(folder), "--max-age", max_age)


def named(done):
    """Return the loops that a check has found silent, with which it fails."""
    silent = {name for name in LOOPS if f"{name} (" in done.stderr}
    assert done.returncode == bool(silent), done.stderr
    return silent


def give_work():
    """Leave a job, a key to reap, and one that the completer has to give up, since no view answers its path."""
    StagedJobFactory()
    expired_key()
    abandoned_key()


def abandoned_key():
    IdempotencyKeyFactory(request_path="/nowhere", created_at=ago(seconds=301), last_run_at=ago(seconds=301))


def all_done():
    keys = IdempotencyKey.objects
    return not StagedJob.objects.exists() and not keys.finished().exists() and keys.unfinished().count() == keys.stuck().count()


def test_it_does_the_work_of_all_three_and_says_so(broker, folder):
    give_work()
    with worker("--heartbeat", str(folder), "--concurrency", "2") as process:
        eventually(all_done)
        assert {path.name for path in folder.iterdir()} == LOOPS
        healthy = check(folder)
        assert (healthy.returncode, healthy.stderr) == (0, "")
        give_work()
        eventually(all_done)
        process.terminate()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert {line.partition(":")[0] for line in output.splitlines()} == LOOPS
    assert not list(folder.iterdir()), "what was healthy is over"
    assert check(folder).returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_at_once_while_all_loops_wait(number, broker, folder):
    with start("idempotency_worker", "--heartbeat", str(folder)) as process:
        eventually(lambda: folder.exists() and {path.name for path in folder.iterdir()} == LOOPS)
        process.send_signal(number)
        assert process.wait(60) == 0


def test_a_loop_that_fails_ends_no_other_and_the_check_names_it(broker, folder):
    def rename(old, new):
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE idempotency_stagedjob RENAME COLUMN {old} TO {new}")

    StagedJobFactory()
    rename("queue", "mislaid")
    mislaid = True
    try:
        with worker("--heartbeat", str(folder)) as process:
            eventually(lambda: folder.exists() and {path.name for path in folder.iterdir()} == LOOPS)
            # Another loop may be silent for two seconds on a slow machine, but does not stay so.
            eventually(lambda: named(check(folder, "2")) == {"enqueue_jobs"}, 120)
            ProcessedMessage.objects.create(source="s", message_id="1", processed_at=ago(days=31))
            abandoned_key()
            eventually(lambda: not ProcessedMessage.objects.exists() and IdempotencyKey.objects.stuck().exists())
            rename("mislaid", "queue")
            mislaid = False
            eventually(lambda: check(folder, "2").returncode == 0, 120)
            eventually(lambda: not StagedJob.objects.exists())
            process.terminate()
            _, errors = process.communicate(timeout=60)
    finally:
        if mislaid:
            rename("mislaid", "queue")
    assert process.returncode == 0
    assert errors.count(f"enqueue_jobs: {FAILING}") == errors.count(f"enqueue_jobs: {RECOVERED}") == 1
    assert "manage.py migrate --database default" in errors


def test_without_a_database_all_three_stay_and_give_no_sign_of_life(broker, folder):
    with worker("--heartbeat", str(folder), DATABASE_URL="postgresql://postgres@127.0.0.1:1/rides") as process:
        said = [process.stderr.readline() for _ in LOOPS]
        eventually(lambda: named(check(folder, "1")) == LOOPS, 120)
        process.terminate()
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    assert [FAILING in line for line in said] == [True] * 3, "a line for each"
    assert rest == ""


def test_wrong_options_exit_2(folder):
    folder.write_text("a file")
    for arguments, words in {
        ("--check",): "--check needs --heartbeat",
        ("--heartbeat", str(folder)): "cannot be used: File exists",
        ("--reap-interval", "0"): "usage:",
    }.items():
        done = run("idempotency_worker", *arguments)
        assert done.returncode == 2
        assert words in done.stderr


def test_the_commands_of_the_how_to_are_ones_that_the_commands_take():
    text = (settings.BASE_DIR / "docs" / "how-to" / "run-the-processes.md").read_text()
    commands = re.findall(r"manage\.py ((?:enqueue_jobs|complete_keys|reap_keys|idempotency_worker)[^`\n]*)", text)
    assert len(commands) > 10
    for name, *arguments in map(str.split, commands):
        load_command_class("idempotency", name).create_parser("manage.py", name).parse_args(arguments)
