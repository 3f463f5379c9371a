"""The attempt to hand over right after COMMIT: without an enqueuer running."""

import logging

import pytest
from django.db import transaction

from idempotency import _prompt
from idempotency.enqueuer import enqueue_once
from idempotency.jobs import stage_job
from idempotency.models import StagedJob
from rides_demo.models import AuditRecord
from tests.factories import UserFactory
from tests.kit.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def attempts(settings, monkeypatch):
    """Turn the attempts on, into a function of this process; the threads end with the test."""
    settings.IDEMPOTENCY = {
        "ENQUEUERS": {"*": "tests.kit.jobs.take"},
        "HAND_OVER_AFTER_COMMIT": True,
    }
    monkeypatch.setattr(_prompt, "LINGER_SECONDS", 0.2)
    monkeypatch.setattr(_prompt, "PAUSE_SECONDS", 600)
    monkeypatch.setattr(_prompt, "_paused_until", 0.0)
    yield settings
    for mover in _prompt._movers.values():
        mover.join(60)
        assert not mover.is_alive()


def stage(user, count=1):
    with transaction.atomic():
        for _ in range(count):
            stage_job("tests.kit.jobs.record", [user.pk])


def test_a_job_is_handed_over_as_soon_as_it_is_committed(attempts):
    user = UserFactory()
    for _ in range(2):
        stage(user, count=3)
        eventually(lambda: not StagedJob.objects.exists())
    eventually(lambda: AuditRecord.objects.count() == 6)


def test_a_job_of_a_slow_backend_is_handed_over_too(attempts):
    attempts.IDEMPOTENCY |= {"ENQUEUERS": {"*": "tests.jobs.test_leases.send"}}
    with transaction.atomic():
        stage_job("tests.kit.jobs.record", {"name": "a"})
    eventually(lambda: not StagedJob.objects.exists())


def test_it_is_off_by_default(attempts):
    attempts.IDEMPOTENCY = {"ENQUEUERS": attempts.IDEMPOTENCY["ENQUEUERS"]}
    _prompt._movers.clear()
    stage(UserFactory())
    assert not _prompt._movers
    assert StagedJob.objects.count() == 1


def test_work_that_is_rolled_back_hands_nothing_over(attempts):
    _prompt._movers.clear()
    with transaction.atomic():
        stage_job("tests.kit.jobs.record", [1])
        transaction.set_rollback(True)
    assert not _prompt._movers


def test_a_broker_that_is_down_is_left_to_the_enqueuer_for_a_while(attempts, caplog):
    attempts.IDEMPOTENCY = attempts.IDEMPOTENCY | {
        "ENQUEUERS": {"*": "tests.kit.jobs.nobody_takes"}
    }
    with caplog.at_level(logging.INFO, logger="idempotency"):
        stage(UserFactory())
        eventually(lambda: "HAND_OVER_AFTER_COMMIT pauses" in caplog.text)
        _prompt._movers.clear()
        stage(UserFactory())
    assert not _prompt._movers, "no further attempt is made for a while"
    assert set(StagedJob.objects.values_list("refusals", flat=True)) == {0}
    attempts.IDEMPOTENCY = attempts.IDEMPOTENCY | {"ENQUEUERS": {"*": "tests.kit.jobs.take"}}
    assert enqueue_once().handed_over == 2
