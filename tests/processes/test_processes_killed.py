"""Real processes that die, and services that go away: nothing is lost or takes effect twice,
everything comes to an end."""

import re
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise

import pytest
import redis
from django.conf import settings
from django.db import connection, transaction
from django.test import override_settings

from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey, ProcessedMessage, StagedJob
from rides_demo.processes.embedded import Postgres, Redis
from rides_demo.processes.process import Process
from tests.factories import IdempotencyKeyFactory, StagedJobFactory, UserFactory
from tests.kit.ageing import ago, expired_keys
from tests.kit.chance import chance
from tests.kit.commands import FAILING, RECOVERED, environment, run
from tests.kit.waiting import eventually
from tests.models import Entry
from tests.processes.queues import QUEUES, Celery, Rq, Tasks
from tests.processes.service import HOPELESS, JOB, NEXT_JOB

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]

SETTINGS = "tests.processes.settings"
COMMANDS = {
    "enqueuer": "enqueue_jobs --loop --interval 0.1 --batch-size 25",
    "second enqueuer": "enqueue_jobs --loop --interval 0.1 --batch-size 25",
    "completer": "complete_keys --loop --interval 0.2 --batch-size 20 --concurrency 3",
    "reaper": "reap_keys --loop --interval 0.2 --batch-size 2",
    "all three": (
        "idempotency_worker --enqueue-interval 0.1 --complete-interval 0.1 --reap-interval 0.1"
    ),
}
LOOPS = ["complete_keys", "enqueue_jobs", "reap_keys"]
KILLS = 24
JOBS, KEYS, EXPIRED = 2000, 500, 300
#: Groups of two jobs, and kills: RQ has the large number.
GROUPS = {Rq: (1000, KILLS), Celery: (100, 8), Tasks: (100, 8)}
END_SECONDS = 1200


class Processes:
    """Some of the commands, each in a process of its own that is started again when it ends, as
    systemd does."""

    def __init__(self, stack, folder, queue, *names, **changes):
        given = environment(DJANGO_SETTINGS_MODULE=SETTINGS, TEST_BACKEND=queue.backend, **changes)
        self.by_name = {name: self._start(stack, folder, name, queue, given) for name in names}

    def _start(self, stack, folder, name, queue, given):
        command = (
            queue.worker
            if name in queue.workers
            else [sys.executable, "-m", "django", *COMMANDS[name].split()]
        )
        return stack.enter_context(
            Process(
                name,
                command,
                environment=given,
                folder=settings.BASE_DIR,
                output=folder / f"{name}.log",
            )
        )

    def kill(self, name):
        """Kill -9, and start again."""
        self.by_name[name].kill()
        self.by_name[name].launch()

    def until(self, condition, seconds):
        """Wait for ``condition``, starting again what ends."""

        def revive_and_look():
            for process in self.by_name.values():
                process.launch()
            return condition()

        eventually(revive_and_look, seconds)


def stage(names):
    jobs = [StagedJobFactory.build(job_name=JOB, job_args={"name": name}) for name in names]
    StagedJob.objects.bulk_create(jobs)


def abandon(count):
    """Leave ``count`` keys as clients do that went away; one in ten is so old that the reaper wants
    it as well."""
    user = UserFactory()
    IdempotencyKey.objects.bulk_create(
        IdempotencyKeyFactory.build(
            user=user,
            scope=f"user:{user.pk}",
            request_path=f"/two-phases/{number}",
            created_at=ago(hours=73 if number % 10 == 5 else 1),
            last_run_at=ago(minutes=30),
            lease_seconds=3,  # that of the processes
        )
        for number in range(count)
    )


@pytest.fixture(params=QUEUES, ids=lambda queue: queue.__name__.lower())
def queue(request):
    return request.param


def entries():
    return Counter(Entry.objects.values_list("name", flat=True))


@pytest.mark.sample
def test_processes_killed_at_random_lose_nothing_and_repeat_nothing(queue, broker, tmp_path):
    drawn = chance()
    names = [f"job {number}" for number in range(JOBS)]
    keys = IdempotencyKey.objects
    abandon(KEYS)
    expired_keys(EXPIRED)
    expired = keys.expired()
    unfinished = keys.unfinished().filter(stuck_at=None)

    def left():
        # A job that a queue may lose is offered again after waits that double; this test does not
        # wait for the long ones.
        StagedJob.objects.filter(run_at__gt=ago(seconds=-15)).update(run_at=ago(seconds=-15))
        return {
            "staged": StagedJob.objects.count(),
            "in the queue": queue.left(broker),
            "expired": expired.count(),
            "unfinished": unfinished.count(),
        }

    with ExitStack() as stack:
        processes = Processes(stack, tmp_path, queue, "enqueuer", "worker", "completer", "reaper")
        for kill in range(KILLS):
            stage(names[kill::KILLS])
            threading.Event().wait(drawn.uniform(0.1, 1.5))
            processes.kill(drawn.choice(list(processes.by_name)))
        try:
            # However slow the machine, as long as something moves: what comes twice has no effect,
            # but takes its time.
            end = time.monotonic() + END_SECONDS
            while any((before := left()).values()):
                processes.until(lambda before=before: left() != before, 90)
                assert time.monotonic() < end
        except AssertionError:
            pytest.fail(f"What is left: {left()}, with {len(entries())} effects")

    finished = {
        int(path.rpartition("/")[2])
        for path in keys.finished().values_list("request_path", flat=True)
    }
    stuck = dict(keys.stuck().values_list("request_path", "stuck_code"))
    assert len(finished) + len(stuck) == KEYS
    # The reaper may have been the first at the old ones.
    assert {code for path, code in stuck.items() if int(path.rpartition("/")[2]) % HOPELESS} <= {
        "retention_passed"
    }
    assert not [number for number in finished if number % HOPELESS == 0]

    done = entries()
    assert set(done.values()) == {1}, "nothing took effect twice"
    assert {name for name in done if name.startswith("job ") and "of" not in name} == set(names)
    for effect in ("second phase", "job"):
        assert {name for name in done if name.startswith(f"{effect} of ")} == {
            f"{effect} of {number}" for number in finished
        }
    assert {f"first phase of {number}" for number in finished} <= set(done)
    assert queue.given_up(broker) == 0


@override_settings(IDEMPOTENCY={"JOB_MODULES": ["tests.processes.service"]})
def test_groups_keep_their_order_while_every_process_is_killed(queue, broker, tmp_path):
    """Two workers of Celery and of Django Tasks could run both jobs of a group at once."""
    drawn, (groups, kills) = chance(), GROUPS[queue]
    staged = [(group, number) for group in range(groups) for number in range(2)]
    ends = [len(staged) * kill // kills for kill in range(kills + 1)]

    def left():
        return StagedJob.objects.count(), queue.left(broker), Entry.objects.count()

    with ExitStack() as stack:
        names = "enqueuer", "second enqueuer", *queue.workers
        processes = Processes(stack, tmp_path, queue, *names)
        for begin, end in pairwise(ends):
            with transaction.atomic():
                for group, number in staged[begin:end]:
                    job = {"group": group, "number": number}
                    # Without the group, half of the second jobs would be handed over first.
                    since = ago(seconds=drawn.randrange(60))
                    stage_job(NEXT_JOB, job, group=f"group {group}", run_at=since)
            threading.Event().wait(drawn.uniform(0.1, 1.5))
            processes.kill(drawn.choice(list(processes.by_name)))
        end = time.monotonic() + END_SECONDS
        while (before := left())[:2] != (0, 0):
            processes.until(lambda before=before: left() != before, 90)
            assert time.monotonic() < end
    wanted = {f"group {group}: {number} after {number}" for group, number in staged}
    assert entries() == Counter(wanted)
    assert queue.given_up(broker) == 0


@pytest.mark.parametrize("queue", [Rq, Celery], indirect=True)
def test_a_broker_that_is_away_for_a_while_loses_no_job_and_fails_none(
    queue, short_folder, tmp_path
):
    """Django Tasks have no broker but the database, which the next test takes away."""
    names = [f"job {number}" for number in range(300)]
    with Redis(short_folder / "redis") as server, ExitStack() as stack:
        processes = Processes(stack, tmp_path, queue, "enqueuer", "worker", REDIS_URL=server.url)
        stage(names[:200])
        eventually(lambda: len(entries()) > 20)
        server.stop()
        stage(names[200:])
        log = tmp_path / "enqueuer.log"
        eventually(lambda: FAILING in log.read_text())
        threading.Event().wait(10)
        assert StagedJob.objects.filter(refusals=0, failed_at=None).count() >= 100
        server.start()
        with redis.Redis.from_url(server.url) as connection:
            processes.until(
                lambda: (
                    not StagedJob.objects.exists()
                    and not queue.left(connection)
                    and len(entries()) == 300
                ),
                120,
            )
            assert queue.given_up(connection) == 0
        processes.by_name["enqueuer"].stop()
        assert [log.read_text().count(words) for words in (FAILING, RECOVERED, "Traceback")] == [
            1,
            1,
            0,
        ]
    assert entries() == Counter(names)


@pytest.fixture
def own_postgres(short_folder):
    """Return a PostgreSQL that may be restarted: the default database of this test and of its
    processes."""
    with Postgres(short_folder / "postgres") as server, pytest.MonkeyPatch.context() as patch:
        connection.close()
        its_own = {
            "NAME": "rides",
            "HOST": str(server.sockets),
            "PORT": "",
            "USER": "postgres",
            "PASSWORD": "",
        }
        for name, value in its_own.items():
            patch.setitem(connection.settings_dict, name, value)
        done = run("migrate", "--verbosity", "0")
        assert done.returncode == 0, done.stderr
        yield server
        connection.close()


def test_all_loops_come_back_after_postgres_was_restarted(queue, broker, own_postgres, tmp_path):
    log = tmp_path / "all three.log"

    def every_loop_works(number):
        stage([f"job {number}"])
        ProcessedMessage.objects.create(source="s", message_id="1", processed_at=ago(days=31))
        abandon(2)
        processes.until(
            lambda: (
                not IdempotencyKey.objects.unfinished().filter(stuck_at=None).exists()
                and not ProcessedMessage.objects.filter(source="s").exists()
                and not StagedJob.objects.exists()
                and not queue.left(broker)
                and (entries()[f"job {number}"], entries()["job of 1"]) == (1, number + 1)
            ),
            120,
        )

    def lines(words):
        return sorted(re.findall(rf"(\w+): {words}", log.read_text()))

    with ExitStack() as stack:
        processes = Processes(stack, tmp_path, queue, "all three", "worker")
        process = processes.by_name["all three"]
        pid = process.pid
        every_loop_works(0)
        for number, end in enumerate((own_postgres.stop, own_postgres.crash), start=1):
            end()
            connection.close()
            eventually(lambda number=number: lines(FAILING) == sorted(LOOPS * number))
            own_postgres.start()
            every_loop_works(number)
        eventually(lambda: lines(RECOVERED) == sorted(LOOPS * 2))
        assert process.pid == pid
    assert "Traceback" not in log.read_text()
