"""The three loops in one process: each does its work, none ends another, and a probe finds their
heartbeats."""

import re
import signal
from contextlib import contextmanager

import pytest
from django.conf import settings
from django.core.management import load_command_class
from django.db import connection

from idempotency.models import IdempotencyKey, ProcessedMessage, ProcessHeartbeat, StagedJob
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.ageing import ago, expired_key
from tests.kit.commands import FAILING, RECOVERED, run, run_here, start
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True), pytest.mark.processes]

INTERVALS = [f"--{loop}-interval=0.1" for loop in ("enqueue", "complete", "reap")]
LOOPS = {"enqueue_jobs", "complete_keys", "reap_keys"}


@contextmanager
def worker(*arguments, **changes):
    with start("idempotency_worker", *INTERVALS, *arguments, **changes) as process:
        yield process


def probe():
    return run_here("idempotency_doctor", "--process", *LOOPS)


def alive():
    """Return the loops that have a heartbeat."""
    return set(ProcessHeartbeat.objects.values_list("name", flat=True))


def give_work():
    """Leave a job, a key to reap, and one that the completer has to give up, since no view answers
    its path."""
    StagedJobFactory()
    expired_key()
    abandoned_key()


def abandoned_key():
    IdempotencyKeyFactory(
        request_path="/nowhere", created_at=ago(seconds=301), last_run_at=ago(seconds=301)
    )


def all_done():
    keys = IdempotencyKey.objects
    return (
        not StagedJob.objects.exists()
        and not keys.finished().exists()
        and keys.unfinished().count() == keys.stuck().count()
    )


def test_it_does_the_work_of_all_three_and_says_so(broker):
    give_work()
    with worker("--concurrency", "2") as process:
        eventually(all_done)
        healthy = probe()
        assert (healthy.returncode, healthy.stderr) == (0, "")
        give_work()
        eventually(all_done)
        process.terminate()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert {line.partition(":")[0] for line in output.splitlines()} == LOOPS
    assert probe().returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_at_once_while_all_loops_wait(number, broker):
    with start("idempotency_worker") as process:
        eventually(lambda: alive() == LOOPS)
        process.send_signal(number)
        assert process.wait(60) == 0


def test_a_loop_that_fails_ends_no_other_and_alone_has_no_new_heartbeat(broker):
    def rename(old, new):
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE idempotency_stagedjob RENAME COLUMN {old} TO {new}")

    StagedJobFactory()
    rename("queue", "mislaid")
    mislaid = True
    try:
        with worker() as process:
            eventually(lambda: alive() == LOOPS)
            ProcessHeartbeat.objects.all().delete()
            eventually(lambda: alive() == LOOPS - {"enqueue_jobs"})
            ProcessedMessage.objects.create(source="s", message_id="1", processed_at=ago(days=31))
            abandoned_key()
            eventually(
                lambda: (
                    not ProcessedMessage.objects.exists()
                    and IdempotencyKey.objects.stuck().exists()
                )
            )
            rename("mislaid", "queue")
            mislaid = False
            eventually(lambda: alive() == LOOPS)
            eventually(lambda: not StagedJob.objects.exists())
            process.terminate()
            _, errors = process.communicate(timeout=60)
    finally:
        if mislaid:
            rename("mislaid", "queue")
    assert process.returncode == 0
    assert (
        errors.count(f"enqueue_jobs: {FAILING}") == errors.count(f"enqueue_jobs: {RECOVERED}") == 1
    )
    assert "manage.py migrate --database default" in errors


def test_without_a_database_all_three_stay(broker):
    with worker(DATABASE_URL="postgresql://postgres@127.0.0.1:1/rides") as process:
        said = [process.stderr.readline() for _ in LOOPS]
        process.terminate()
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    assert [FAILING in line for line in said] == [True] * 3, "a line for each"
    assert rest == ""


def test_a_wrong_option_exits_2():
    done = run("idempotency_worker", "--reap-interval", "0")
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_the_commands_of_the_how_to_are_ones_that_the_commands_take():
    text = (settings.BASE_DIR / "docs" / "how-to" / "run-the-processes.md").read_text()
    names = "enqueue_jobs|complete_keys|reap_keys|idempotency_worker|idempotency_doctor"
    commands = re.findall(rf"manage\.py ((?:{names})[^`\n&]*)", text)
    assert len(commands) > 6
    for name, *arguments in map(str.split, commands):
        load_command_class("idempotency", name).create_parser("manage.py", name).parse_args(
            arguments
        )
