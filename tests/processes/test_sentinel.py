"""RQ and Celery on Redis with Sentinel: the settings of the guide, what a failover loses, and what
is handed over again."""

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db.models.functions import Now
from pytest_django import Settings

from idempotency import _hand_over
from idempotency.backends import BrokerUnavailable
from idempotency.contrib import celery_delivery
from idempotency.contrib import rq as rq_backend
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.models import StagedJob
from rides_demo.models import AuditRecord
from tests.factories import StagedJobFactory, UserFactory
from tests.kit.brokers import IMPATIENCE_SECONDS, queued
from tests.kit.celery_app import app
from tests.kit.commands import start
from tests.kit.examples import blocks
from tests.kit.sentinel import Failover
from tests.kit.waiting import eventually

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.processes,
    pytest.mark.django_db(transaction=True),
]

#: Queues of RQ with the backend of the app and with that of the guide, and a queue of Celery.
PLAIN, FOLLOWED, CELERY = QUEUES = ("plain", "followed", "celery")
CELERY_OPTIONS = ("broker_url", "broker_transport_options")
_RQ_WORKER = """
import django; django.setup()
from django.conf import settings
settings.RQ_QUEUES.update({queues!r})
from django.core.management import call_command
call_command("rqworker", *{queues!r})
"""
_CELERY_WORKER = """
import django; django.setup()
from tests.kit.celery_app import app
app.conf.update({options!r})
app.worker_main("worker --pool=solo --loglevel=CRITICAL --without-gossip --without-mingle".split())
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Failover]:
    with Failover(tmp_path) as servers:
        yield servers


@pytest.fixture
def guide(
    servers: Failover, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """Execute the lines of the guide with the ports of the servers; return the names that they
    define."""
    lines, backend = (code for code in blocks("choose-a-queue.md", "python") if "entinel" in code)
    ports = iter(each.port for each in servers.sentinels)
    defined: dict[str, Any] = {}
    exec(re.sub(r'"sentinel-\d", 26379', lambda _: f'"127.0.0.1", {next(ports)}', lines), defined)
    assert next(ports, None) is None
    of_shop = ModuleType("shop.queues")
    exec(backend, vars(of_shop))
    monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.queues", of_shop)
    for queue in (PLAIN, FOLLOWED):
        monkeypatch.setitem(django_settings.RQ_QUEUES, queue, defined["RQ_QUEUES"]["default"])
    settings.IDEMPOTENCY = {
        "ENQUEUERS": {
            PLAIN: "idempotency.contrib.rq.RQBackend",
            FOLLOWED: defined["IDEMPOTENCY"]["ENQUEUERS"]["*"],
            CELERY: "idempotency.contrib.celery.CeleryBackend",
        }
    }
    assert app.conf["broker_url"]  # Celery reads its configuration at the first use.
    for name in CELERY_OPTIONS:
        monkeypatch.setitem(app.conf.changes, name, defined[f"CELERY_{name.upper()}"])
    monkeypatch.setattr(_hand_over, "_built", {})
    rq_backend._queue.cache_clear()
    yield defined
    rq_backend._queue.cache_clear()


def stage(label: str) -> None:
    """Stage a job on each queue."""
    user = UserFactory(username=label).pk
    for queue in QUEUES:
        args = [user, f"{queue}: {label}"]
        StagedJobFactory(job_name="tests.kit.jobs.record", job_args=args, queue=queue)


def messages(server: Any) -> dict[str, int]:
    """Return the number of jobs in each queue of a server."""
    with server.connection() as of_rq, server.connection(1) as of_celery:
        kept = {queue: len(queued(of_rq, queue)) for queue in (PLAIN, FOLLOWED)}
        return kept | {CELERY: of_celery.llen("celery")}


def all_are_handed_over() -> bool:
    with suppress(BrokerUnavailable):
        enqueue_once()
    return not StagedJob.objects.filter(hand_overs=0).exists()


def test_a_failover_loses_jobs_and_those_that_stay_staged_are_handed_over_again(
    servers: Failover, guide: dict[str, Any]
) -> None:
    stage("replicated")
    assert enqueue_once() == EnqueuePass(handed_over=3)
    eventually(lambda: messages(servers.replica) == dict.fromkeys(QUEUES, 1))
    servers.separate()
    stage("acknowledged by the primary")
    assert enqueue_once() == EnqueuePass(handed_over=3)
    assert messages(servers.primary) == dict.fromkeys(QUEUES, 2)
    assert set(StagedJob.objects.values_list("queue", flat=True)) == {FOLLOWED, CELERY}
    servers.primary.kill()
    stage("during the outage")
    with pytest.raises(BrokerUnavailable):
        enqueue_once()
    servers.promote()
    assert messages(servers.replica) == dict.fromkeys(QUEUES, 1), "each queue has lost a job"

    jobs = StagedJob.objects
    eventually(all_are_handed_over, 120)
    assert not jobs.exclude(refusals=0).exists()
    jobs.update(run_at=Now())
    assert enqueue_once() == EnqueuePass(handed_over=6), "also those that still wait"
    rq = {queue: django_settings.RQ_QUEUES[queue] for queue in (PLAIN, FOLLOWED)}
    celery = {name: guide[f"CELERY_{name.upper()}"] for name in CELERY_OPTIONS}
    with (
        start(python=_RQ_WORKER.format(queues=rq)),
        start(python=_CELERY_WORKER.format(options=celery)),
    ):
        eventually(lambda: AuditRecord.objects.count() >= 8, 240)
        eventually(lambda: messages(servers.replica) == dict.fromkeys(QUEUES, 0), 60)
    jobs.update(run_at=Now())
    assert enqueue_once() == EnqueuePass()
    assert not jobs.exists()
    labels = ("replicated", "acknowledged by the primary", "during the outage")
    wanted = {f"{queue}: {label}" for queue in QUEUES for label in labels}
    wanted -= {"plain: acknowledged by the primary"}
    assert Counter(AuditRecord.objects.values_list("action", flat=True)) == Counter(wanted)


def test_a_primary_that_takes_no_writes_refuses_no_job(
    servers: Failover, guide: dict[str, Any]
) -> None:
    stage("before")
    assert enqueue_once() == EnqueuePass(handed_over=3)
    waiting = StagedJob.objects.filter(hand_overs=0, refusals=0)
    with servers.primary.connection() as primary:
        for number, (change, undo) in enumerate(
            (
                (["REPLICAOF", "127.0.0.1", servers.replica.port], ["REPLICAOF", "NO", "ONE"]),
                (
                    ["CONFIG", "SET", "min-replicas-to-write", "2"],
                    ["CONFIG", "SET", "min-replicas-to-write", "0"],
                ),
            )
        ):
            primary.execute_command(*change)
            stage(f"meanwhile {number}")
            with pytest.raises(BrokerUnavailable) as caught:
                enqueue_once()
            assert all(f"queue '{queue}'" in str(caught.value) for queue in QUEUES)
            assert waiting.count() == 3
            primary.execute_command(*undo)
            assert enqueue_once() == EnqueuePass(handed_over=3)


def test_a_sentinel_that_hangs_delays_a_hand_over_by_one_timeout(
    servers: Failover, guide: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for bounds in (rq_backend._BOUNDS, celery_delivery.BOUNDS["redis"]):
        monkeypatch.setitem(bounds, "socket_timeout", IMPATIENCE_SECONDS)
    os.kill(servers.sentinels[0].pid, signal.SIGSTOP)
    stage("once")
    since = time.monotonic()
    assert enqueue_once() == EnqueuePass(handed_over=3)
    assert time.monotonic() - since < 15 * IMPATIENCE_SECONDS
    servers.sentinels[0].kill()
