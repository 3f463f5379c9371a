"""Jobs of several databases in one worker process: each job runs in the database of its staged
row."""

from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models.functions import Now
from pytest_django import Settings

from idempotency.contrib.celery import CeleryBackend
from idempotency.contrib.tasks import TasksBackend
from idempotency.enqueuer import enqueue_once
from idempotency.jobs import stage_job
from idempotency.models import ProcessedMessage, StagedJob
from tests.jobs import jobs_of_shards
from tests.kit.brokers import KINDS, Broker
from tests.kit.shards import GUIDE
from tests.kit.waiting import eventually
from tests.models import Entry

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.processes,
    pytest.mark.django_db(transaction=True, databases=["default", "shard_b"]),
]

ALIASES = ("default", "shard_b")

#: A worker of all shards, with the router of the guide.
_ROUTED = """
from django.conf import settings
from tests.jobs import jobs_of_shards
from tests.kit.shards import GUIDE
settings.DATABASE_ROUTERS = [GUIDE["TenantRouter"]()]
"""


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__.lower())
def queue(
    request: pytest.FixtureRequest, broker: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Broker:
    """Return a queue with the workers of all shards. Its enqueuers have the router too."""
    for backend in (CeleryBackend, TasksBackend):
        monkeypatch.setattr(backend, "follow_up_seconds", 3600)
    settings.DATABASE_ROUTERS = [GUIDE["TenantRouter"]()]
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": request.param.backend}}
    monkeypatch.setenv("RIDES_TEST_SHARD_B", connections["shard_b"].settings_dict["NAME"])
    queue: Broker = request.param(broker)
    queue.worker = _ROUTED + queue.worker
    return queue


def hand_over(alias: str, function: Any, **arguments: str) -> None:
    """Stage a job in a database, and let the enqueuer of that database hand it over."""
    with transaction.atomic(using=alias):
        stage_job(f"{jobs_of_shards.__name__}.{function.__name__}", arguments, using=alias)
    enqueue_once(using=alias)


def follow_up() -> None:
    """Let the enqueuers look for each job that is still staged, and hand it over again if it had no
    effect."""
    for alias in ALIASES:
        StagedJob.objects.using(alias).update(run_at=Now())
        enqueue_once(using=alias)


def effects() -> dict[str, tuple[list[str], int]]:
    """Return for each database the names of its entries and the number of messages in its inbox."""
    return {
        alias: (
            list(Entry.objects.using(alias).values_list("name", flat=True)),
            ProcessedMessage.objects.using(alias).count(),
        )
        for alias in ALIASES
    }


def entries() -> int:
    return sum(len(names) for names, _ in effects().values())


def test_a_job_takes_effect_once_in_its_database_after_a_job_of_another_one(queue: Broker) -> None:
    hand_over("shard_b", jobs_of_shards.enter_for_tenant, shard="shard_b", name="b")
    hand_over("default", jobs_of_shards.enter_for_tenant, shard="default", name="a")
    done = {"default": (["a"], 1), "shard_b": (["b"], 1)}
    with queue.working():
        eventually(lambda: entries() >= 2 and queue.idle(), 60)
        follow_up()
        eventually(queue.idle, 60)
    follow_up()
    assert effects() == done
    assert not any(StagedJob.objects.using(alias).exists() for alias in ALIASES)


def test_a_job_inherits_no_tenant_from_the_job_before_it(queue: Broker) -> None:
    hand_over("shard_b", jobs_of_shards.enter_for_tenant, shard="shard_b", name="b")
    hand_over("default", jobs_of_shards.enter_for_nobody, name="nobody")
    with queue.working():
        eventually(lambda: entries() >= 2 and queue.idle(), 60)
    assert effects() == {"default": (["nobody"], 1), "shard_b": (["b"], 1)}
