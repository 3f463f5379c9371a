"""The measurements: the dashboard, the doctor and the metrics tell the same numbers of the same
rows."""

from typing import Any
from uuid import uuid4

import pytest
from django.test import Client
from django.utils import timezone

from idempotency.contrib.prometheus import DatabaseCollector
from idempotency.models import IdempotencyKey, ProcessHeartbeat
from idempotency.monitoring import measures
from idempotency.monitoring.doctor import diagnose
from tests.factories import IdempotencyKeyFactory, StagedJobFactory, UserFactory
from tests.kit.ageing import ago, lock_end

pytestmark = pytest.mark.django_db

OLD = {"created_at": ago(hours=1), "last_run_at": ago(minutes=30)}


def stuck(code: str = "call_in_doubt") -> dict[str, Any]:
    return {"stuck_at": ago(minutes=10), "stuck_code": code, "stuck_reason": "Look.", **OLD}


def fill() -> None:
    """Create rows of every kind that is counted."""
    IdempotencyKeyFactory.create_batch(2, **stuck())
    IdempotencyKeyFactory(**stuck("refused_when_rebuilt"))
    IdempotencyKeyFactory.create_batch(3, **stuck(), acknowledged_at=timezone.now())
    # A retry of the client runs this one after a deploy: nobody needs to look.
    IdempotencyKeyFactory(
        **stuck("unknown_recovery_point"), locked_until=lock_end(), claim_token=uuid4()
    )
    IdempotencyKeyFactory.create_batch(4, **OLD)
    IdempotencyKeyFactory()
    IdempotencyKeyFactory(finished=True, **OLD)
    IdempotencyKeyFactory(refused_at=timezone.now(), **OLD)
    for since in ({"minutes": 3}, {"seconds": 9}, {"hours": -1}):
        StagedJobFactory(run_at=ago(**since))
    StagedJobFactory.create_batch(2, failed_at=timezone.now())
    ProcessHeartbeat.objects.create(name="enqueue_jobs", host="dead", pid=1, beat_at=ago(hours=2))
    ProcessHeartbeat.objects.create(name="enqueue_jobs", host="alive", pid=1)
    ProcessHeartbeat.objects.create(name="reap_keys", host="dead", pid=1, beat_at=ago(hours=2))


def of_the_metrics() -> dict[str, Any]:
    samples = [sample for family in DatabaseCollector().collect() for sample in family.samples]
    value = {
        sample.name.removeprefix("idempotency_"): sample.value
        for sample in samples
        if not sample.labels
    }
    by_code = {sample.labels["code"]: sample.value for sample in samples if "code" in sample.labels}
    lags = {sample.labels["name"]: sample.value for sample in samples if "name" in sample.labels}
    return {
        "unfinished": value["unfinished_keys"], "stuck": sum(by_code.values()),
        "due": value["due_jobs"], "failed": value["failed_jobs"],
        "silent": {name for name, lag in lags.items() if lag > 180},
    }  # fmt: skip


def of_the_doctor() -> dict[str, Any]:
    found = diagnose()
    told, silent = (
        found.measured,
        [finding.seen for finding in found.findings if finding.code == "process_silent"],
    )
    return {
        "unfinished": told["keys_unfinished"], "stuck": told["keys_stuck"], "due": told["due_jobs"],
        "failed": told["failed_jobs"], "silent": {seen.split()[3] for seen in silent},
    }  # fmt: skip


def of_the_dashboard() -> dict[str, Any]:
    client = Client()
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    context = client.get("/admin/idempotency/idempotencykey/dashboard/").context
    jobs = {bar.label: bar.count for bar in context["jobs_by_age"]}
    return {
        "unfinished": context["unfinished"],
        "stuck": {bar.label: bar.count for bar in context["by_state"]}["stuck"],
        "due": sum(jobs.values()) - jobs["not due yet"],
        "failed": sum(bar.count for bar in context["jobs_failed"]),
        "silent": {process.name for process in context["processes"] if process.silent},
    }


def test_the_dashboard_the_doctor_and_the_metrics_agree() -> None:
    fill()
    wanted = {"unfinished": 12, "stuck": 3, "due": 2, "failed": 2, "silent": {"reap_keys"}}
    assert (of_the_metrics(), of_the_doctor(), of_the_dashboard()) == (wanted, wanted, wanted)


def test_a_rebuilt_request_that_is_refused_is_stuck_and_pages_nobody() -> None:
    IdempotencyKeyFactory(**stuck("refused_when_rebuilt"))
    keys = measures.unfinished_keys(IdempotencyKey.objects.all())
    assert (keys.by_state["stuck"], keys.for_review) == (1, 0)


def test_a_key_that_is_due_is_late_and_one_that_a_run_holds_is_not() -> None:
    IdempotencyKeyFactory(**OLD, locked_until=lock_end(), claim_token=uuid4())
    assert measures.unfinished_keys(IdempotencyKey.objects.all()).completer_lag == 0
    IdempotencyKeyFactory(**stuck("unknown_recovery_point"))
    assert measures.unfinished_keys(IdempotencyKey.objects.all()).completer_lag > 60
