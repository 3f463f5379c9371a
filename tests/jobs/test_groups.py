"""Groups of staged jobs: the order of commits, one effect at a time, and a failed head."""

import random
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from uuid import UUID

import pytest
from django.core.management import call_command
from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone
from pytest_django import Settings

from idempotency._batch import due
from idempotency._engine.errors import sqlstate_of
from idempotency.backends import MAX_ATTEMPTS, HandOverResult
from idempotency.enqueuer import Backlog, EnqueuePass, backlog, enqueue_once
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.interventions import discard_jobs, retry_jobs
from idempotency.jobs import stage_job
from idempotency.models import JobGroup, StagedJob
from idempotency.monitoring.measures import staged_jobs
from idempotency.reaper import GROUP_RETENTION, reap_once
from tests.factories import StagedJobFactory
from tests.kit.database import default_isolation, held_transaction, statements, waits_for_a_lock
from tests.kit.threads import WAIT_SECONDS, all_at_once, in_background
from tests.kit.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)

#: The names of the jobs that the queue was given, and of those that took effect.
handed: list[str] = []
effects: list[str] = []


class InboxQueue:
    """A reliable queue whose workers use the inbox."""

    uses_inbox = True

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Note the names."""
        handed.extend(job.job_args["name"] for job in jobs)
        return {}


def take(job: StagedJob) -> None:
    """Take a job, like a broker without an inbox."""
    if job.job_args["name"] == refused:
        raise ValueError("on purpose")
    handed.append(job.job_args["name"])


refused = ""


@pytest.fixture(autouse=True)
def _queues(settings: Settings) -> None:
    settings.IDEMPOTENCY = {
        "ENQUEUERS": {"*": f"{__name__}.InboxQueue", "function": f"{__name__}.take"}
    }
    handed.clear()
    effects.clear()


def stage(name: str, group: str | None = "account:7", queue: str = "default") -> StagedJob:
    with transaction.atomic():
        return stage_job("shop.jobs.book", {"name": name}, queue=queue, group=group)


def work(*names: str) -> None:
    """Run the jobs of these names, as a worker does with their messages."""
    for name in names:
        deliver(StagedJob.objects.get(job_args__name=name))


def deliver(job: StagedJob) -> None:
    with process_once(STAGED_JOBS, str(job.pk)) as first:
        if first:
            effects.append(job.job_args["name"])


def taken(seconds: float = 2) -> list[str]:
    """Return the names that a pass hands over after this time."""
    handed.clear()
    past = timedelta(seconds=seconds)
    StagedJob.objects.filter(handed_over_at__isnull=False).update(
        run_at=Now(), handed_over_at=F("handed_over_at") - past
    )
    enqueue_once()
    return sorted(handed)


def test_a_job_waits_until_the_one_before_it_in_its_group_took_effect() -> None:
    for name, group in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a"), ("free", None)):
        stage(name, group)
    assert taken() == ["a1", "b1", "free"]
    assert taken() == []
    work("a1")
    assert taken() == ["a2"]
    work("a2", "b1")
    assert taken() == ["a3"]
    assert (effects, StagedJob.objects.get().job_args["name"]) == (["a1", "a2", "b1"], "a3")


@pytest.mark.parametrize(("passed", "wait"), [(0, 1), (5, 4), (100, 30)])
def test_the_inbox_is_checked_after_waits_that_double(passed: float, wait: int) -> None:
    stage("a1", "a")
    assert taken() == ["a1"]
    assert 0.5 < (StagedJob.objects.get().run_at - timezone.now()).total_seconds() <= 1
    assert taken(passed) == []
    left = (StagedJob.objects.get().run_at - timezone.now()).total_seconds()
    assert wait - 0.45 < left <= wait


def test_a_backend_without_an_inbox_keeps_the_order_of_hand_overs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("a1", "a2", "a3"):
        stage(name, queue="function")
    stage("b1", group="b", queue="function")
    monkeypatch.setattr(f"{__name__}.refused", "a2")
    enqueue_once()
    assert handed == ["a1", "b1"] or handed == ["b1", "a1"]
    monkeypatch.setattr(f"{__name__}.refused", "")
    StagedJob.objects.update(run_at=Now())
    handed.clear()
    assert enqueue_once() == EnqueuePass(handed_over=2), "one pass, in two batches"
    assert handed == ["a2", "a3"]


def test_ids_out_of_order_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks of two hosts may differ."""
    ids = sorted((UUID(int=random.getrandbits(128)) for _ in range(5)), reverse=True)
    monkeypatch.setattr(StagedJob._meta.get_field("id"), "_get_default", partial(ids.pop, 0))
    names = [f"a{number}" for number in range(5)]
    for name in names:
        stage(name, queue="function")
    enqueue_once()
    assert handed == names


@pytest.mark.postgres
def test_positions_are_in_the_order_of_commits() -> None:
    stage("first")
    with held_transaction(lambda: stage("second")):
        third = in_background(lambda: stage("third"))
        eventually(waits_for_a_lock)
        assert stage("other", group="b").group_position == 1
        assert StagedJob.objects.filter(group="account:7").count() == 1
    third.result(WAIT_SECONDS)
    positions = StagedJob.objects.filter(group="account:7").order_by("group_position")
    assert list(positions.values_list("job_args__name", flat=True)) == ["first", "second", "third"]


@pytest.mark.postgres
def test_an_old_snapshot_gives_no_position() -> None:
    stage("first")
    with default_isolation("repeatable read"), transaction.atomic():
        list(JobGroup.objects.all())
        in_background(lambda: stage("second")).result(WAIT_SECONDS)
        with pytest.raises(OperationalError) as caught:
            stage("third")
    assert sqlstate_of(caught.value) == "40001"


def test_a_rollback_leaves_its_position_to_the_next_job() -> None:
    with transaction.atomic():
        savepoint = transaction.savepoint()
        stage("never")
        transaction.savepoint_rollback(savepoint)
        stage("first")
    assert StagedJob.objects.get().group_position == 1


def test_the_late_message_of_a_former_head_has_no_effect() -> None:
    first = stage("a1")
    stage("a2")
    enqueue_once()
    deliver(first)
    enqueue_once()
    work("a2")
    deliver(first)
    assert effects == ["a1", "a2"]


def test_a_head_without_effect_is_handed_over_again_then_fails_and_holds_its_group() -> None:
    head = stage("a1")
    stage("a2")
    for number in range(MAX_ATTEMPTS):
        if number:
            assert taken(seconds=600 * 2 ** (number - 1) - 60) == []
        assert taken(seconds=60) == ["a1"]
        head.refresh_from_db()
        assert (head.hand_overs, head.failed_at) == (number + 1, None)
    assert taken(seconds=600 * 2**9) == []
    head.refresh_from_db()
    assert head.last_error.startswith("NoEffect:")
    assert head.failed_at
    assert backlog() == Backlog(oldest_seconds=0.0, due_jobs=0, failed_jobs=1)
    assert staged_jobs(StagedJob.objects.all()).due == 0, "the held job is not late"


@pytest.mark.parametrize("took_effect", [True, False])
def test_a_retried_head_comes_before_its_group(took_effect: bool) -> None:
    head, _ = stage("a1"), stage("a2")
    enqueue_once()
    StagedJob.objects.filter(pk=head.pk).update(failed_at=Now(), last_error="NoEffect: x")
    if took_effect:
        deliver(head)
    assert taken() == []
    assert retry_jobs() == 1
    assert taken() == (["a2"] if took_effect else ["a1"])


def test_a_discarded_head_never_runs_and_its_group_continues() -> None:
    head, _ = stage("a1"), stage("a2")
    enqueue_once()
    StagedJob.objects.filter(pk=head.pk).update(failed_at=Now(), last_error="NoEffect: x")
    assert discard_jobs([head.pk]) == 1
    assert taken() == ["a2"]
    deliver(head)
    assert effects == []


def test_a_head_that_is_not_due_yet_holds_its_group() -> None:
    head, _ = stage("a1"), stage("a2")
    StagedJob.objects.filter(pk=head.pk).update(run_at=Now() + timedelta(hours=1))
    assert taken() == []


@pytest.mark.postgres
def test_several_enqueuers_hand_over_one_job_of_a_group_at_a_time() -> None:
    groups = range(20)
    for number in range(4):
        for group in groups:
            stage(f"{group}-{number}", group=f"group {group}", queue="function")
    all_at_once(lambda _: enqueue_once(batch_size=3), 4)
    enqueue_once()  # A pass may skip jobs that another one has locked.
    assert sorted(handed) == sorted(f"{group}-{number}" for group in groups for number in range(4))
    for group in groups:
        mine = [name for name in handed if name.startswith(f"{group}-")]
        assert mine == sorted(mine)


@pytest.mark.postgres
def test_a_head_that_another_enqueuer_hands_over_holds_its_group() -> None:
    stage("a1")
    stage("a2")

    def lock_and_delete() -> None:
        StagedJob.objects.select_for_update().get(group_position=1)

    with held_transaction(lock_and_delete):
        assert taken() == []


def test_a_group_costs_a_job_without_one_no_statement() -> None:
    stage("before", group=None)
    with statements() as staging:
        stage("free", group=None)
    with statements() as grouped:
        stage("a1")
    assert len(grouped) == len(staging) + 1
    StagedJob.objects.filter(group__isnull=False).delete()
    with statements() as moving:
        enqueue_once()
    assert not [each for each in moving if "processedmessage" in each["sql"]]


@pytest.mark.postgres
def test_no_other_job_is_looked_up_for_a_job_without_a_group() -> None:
    for number in range(50):
        stage(f"{number}", group=None)
    text, parameters = due("default")[:20].query.sql_with_params()
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {text}", parameters)
        plan = "\n".join(line for (line,) in cursor.fetchall())
    # With or without an index, as the statistics of the table suggest. The name of the subplan
    # stands in the filter as well, above the scan of an index.
    lookups = [line for line in plan.partition(" SubPlan 1\n")[2].splitlines() if "->" in line]
    assert lookups
    assert all("never executed" in line for line in lookups), plan


def test_a_group_without_jobs_is_forgotten_after_a_day() -> None:
    job = stage("a1")
    stage("b1", group="b")
    JobGroup.objects.filter(name="b").update(used_at=Now() - GROUP_RETENTION)
    reap_once()
    assert JobGroup.objects.count() == 2, "it has a job"
    StagedJob.objects.exclude(pk=job.pk).delete()
    reap_once()
    assert JobGroup.objects.get().name == "account:7"
    assert stage("b2", group="b").group_position == 1


def test_groups_are_forgotten_in_batches() -> None:
    """A statement has at most 65,535 parameters, and a project may have a group for each order."""
    for number in range(5):
        stage("a1", group=f"order:{number}")
    StagedJob.objects.all().delete()
    JobGroup.objects.update(used_at=Now() - GROUP_RETENTION)
    with statements() as sent:
        reap_once(batch_size=2)
    deletions = [each for each in sent if each["sql"].startswith("DELETE")]
    assert len([each for each in deletions if JobGroup._meta.db_table in each["sql"]]) == 3
    assert not JobGroup.objects.exists()


@pytest.mark.postgres
def test_a_group_that_is_used_while_it_is_forgotten_keeps_its_position() -> None:
    stage("a1")
    JobGroup.objects.update(used_at=Now() - GROUP_RETENTION)
    StagedJob.objects.all().delete()
    with held_transaction(lambda: stage("a2")):
        reap_once()
    assert stage("a3").group_position == 3


@pytest.mark.parametrize("group", ["", "a" * 201, "a\0", 7])
def test_a_group_that_cannot_be_stored_is_refused(group: str) -> None:
    with pytest.raises(ValueError, match="name of a group must be a string of 1 to 200"):
        stage("a1", group=group)


def test_the_database_refuses_two_jobs_at_a_position() -> None:
    job = stage("a1")
    with pytest.raises(IntegrityError):
        StagedJob.objects.create(job_name="shop.jobs.book", group=job.group, group_position=1)
    with pytest.raises(IntegrityError):
        StagedJob.objects.create(job_name="shop.jobs.book", group="without a position")


def test_the_command_lists_the_group_and_what_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    stage("a1")
    stage("a2")
    call_command("staged_jobs", "list")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("due ")
    assert "  group account:7  " in first
    assert second.startswith("held  ")


def test_a_job_of_a_group_is_not_given_up_before_its_follow_up(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.take"}}
    job = StagedJobFactory(
        group="g", group_position=1, hand_overs=MAX_ATTEMPTS, handed_over_at=Now()
    )
    assert enqueue_once() == EnqueuePass()
    job.refresh_from_db()
    assert job.failed_at is None
