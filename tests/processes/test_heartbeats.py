"""Heartbeats: each loop has a row while it runs, the dashboard shows it, and a loop works on
without the table."""

import os
import subprocess
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from idempotency.completer import CompletePass
from idempotency.models import ProcessHeartbeat
from idempotency.monitoring.heartbeats import LOOPS, Heartbeat
from tests.kit.ageing import ago
from tests.kit.commands import start
from tests.kit.loops import looping
from tests.kit.waiting import eventually

DASHBOARD = "/admin/idempotency/idempotencykey/dashboard/"


@pytest.mark.django_db
def test_a_heartbeat_is_one_row_that_is_written_now_and_then(
    django_assert_num_queries: Any, admin_client: Client
) -> None:
    ProcessHeartbeat.objects.create(name="enqueue_jobs", host="gone", pid=1, beat_at=ago(days=2))
    ProcessHeartbeat.objects.create(name="enqueue_jobs", host="silent", pid=1, beat_at=ago(hours=2))
    assert "gone" not in admin_client.get(DASHBOARD).text
    heartbeat = Heartbeat("enqueue_jobs", using="default")
    heartbeat.beat()
    with django_assert_num_queries(0):
        heartbeat.beat()
    context = admin_client.get(DASHBOARD).context
    assert [p.silent for p in context["processes"] if p.name == "enqueue_jobs"] == [False]
    assert [p.host for p in context["gone"]] == ["silent"]
    heartbeat.remove()
    assert ProcessHeartbeat.objects.get().host == "silent"
    page = admin_client.get(DASHBOARD)
    assert [p.silent for p in page.context["processes"] if p.name == "enqueue_jobs"] == [True]


@pytest.mark.django_db
def test_a_loop_that_stops_takes_killed_loops_of_its_host_off_the_list() -> None:
    """Otherwise a loop that was killed, and then replaced by cron, would be reported for ever. One
    that runs and fails in each pass is still reported."""
    heartbeat = Heartbeat("reap_keys", using="default")
    heartbeat.beat()
    host = ProcessHeartbeat.objects.get().host
    killed = [ended() for _ in range(3)]
    kept = {
        ("reap_keys", host, os.getppid(), 10),
        ("reap_keys", host, killed[1], 1),
        ("reap_keys", "other", killed[0], 10),
    }
    kept |= {("complete_keys", host, killed[2], 10)}
    for name, of_host, pid, minutes in kept | {("reap_keys", host, killed[0], 10)}:
        ProcessHeartbeat.objects.create(
            name=name, host=of_host, pid=pid, beat_at=ago(minutes=minutes)
        )
    heartbeat.remove()
    left = ProcessHeartbeat.objects.values_list("name", "host", "pid")
    assert set(left) == {row[:3] for row in kept}


def ended() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.processes
def test_each_loop_gives_signs_of_life_until_it_is_told_to_stop(admin_client: Client) -> None:
    with start(
        "idempotency_worker",
        "--enqueue-interval=0.1",
        "--complete-interval=0.1",
        "--reap-interval=0.1",
    ) as process:
        eventually(
            lambda: set(ProcessHeartbeat.objects.values_list("name", flat=True)) == set(LOOPS)
        )
        assert {process.silent for process in admin_client.get(DASHBOARD).context["processes"]} == {
            False
        }
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, ProcessHeartbeat.objects.count()) == (0, 0), errors


@pytest.mark.django_db(transaction=True)
def test_a_loop_outlives_the_reader_of_its_output() -> None:
    def say(counts: Any) -> None:
        raise BrokenPipeError

    with looping(lambda stop: CompletePass(finished=1), say=say) as passes:
        eventually(lambda: len(passes) > 2)


class NoTable:
    """While it is open, the table of heartbeats cannot be found."""

    def __enter__(self) -> None:
        self._rename(ProcessHeartbeat._meta.db_table, "elsewhere")

    def __exit__(self, *_: object) -> None:
        self._rename("elsewhere", ProcessHeartbeat._meta.db_table)

    def _rename(self, name: str, to: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {name} RENAME TO {to}")


def test_a_process_works_on_when_its_heart_cannot_be_heard(transactional_db: None) -> None:
    heartbeat = Heartbeat("complete_keys", using="default")
    with NoTable():
        heartbeat.beat()
        heartbeat.remove()
    Heartbeat("complete_keys", using="default").beat()
    assert ProcessHeartbeat.objects.get().name == "complete_keys"
