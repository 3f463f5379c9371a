"""Jobs that a queue may lose stay staged and are offered again: what is counted, what is
remembered, and for how long."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from django.apps import apps
from django.db import connection, models
from django.db.models.functions import Now
from django.utils import timezone
from pytest_django import Settings

from idempotency import backends
from idempotency.backends import (
    MAX_ATTEMPTS,
    BrokerUnavailable,
    HandOverResult,
    OfferAgain,
    OneByOne,
)
from idempotency.checks.databases import check_references
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.inbox import STAGED_JOBS, process_once
from idempotency.interventions import retry_jobs
from idempotency.models import ProcessedMessage, StagedJob
from idempotency.reaper import ReapPass, reap_once
from tests.factories import StagedJobFactory
from tests.kit.database import held_transaction, lock_table
from tests.kit.threads import all_at_once

pytestmark = pytest.mark.django_db(transaction=True)

#: The ids that the queue was given, and those of the jobs that took effect.
handed: list[UUID] = []
effects: list[UUID] = []


class ForgetfulQueue(OneByOne):
    """A queue that may lose what it took; it refuses everything while ``refuses``."""

    follow_up_seconds = 30
    refuses = False

    def hand_over_one(self, queue: str, job: StagedJob) -> None:
        """Note the id."""
        if self.refuses:
            raise LookupError("No task has this name.")
        handed.append(job.pk)


class KeepingQueue(ForgetfulQueue):
    """One that loses nothing."""

    follow_up_seconds = None


class ForgetfulBatches:
    """A queue that may lose what it took, and takes a batch at once."""

    follow_up_seconds = 30

    def hand_over(self, queue: str, jobs: Sequence[StagedJob]) -> Mapping[UUID, HandOverResult]:
        """Note the ids."""
        handed.extend(job.pk for job in jobs)
        return {}


@pytest.fixture(autouse=True)
def _queue(settings: Settings) -> None:
    settings.IDEMPOTENCY = {
        "ENQUEUERS": {"*": f"{__name__}.ForgetfulQueue", "kept": f"{__name__}.KeepingQueue"}
    }
    handed.clear()
    effects.clear()


def work() -> None:
    """Run what was handed over, as a worker does."""
    for job_id in handed:
        with process_once(STAGED_JOBS, str(job_id)) as first:
            if first:
                effects.append(job_id)
    handed.clear()


def offer() -> EnqueuePass:
    """Offer all jobs that are not failed, whenever they are due."""
    StagedJob.objects.filter(failed_at=None).update(run_at=Now())
    return enqueue_once()


def forget() -> ReapPass:
    """Let the inbox grow older than it remembers, and reap."""
    ProcessedMessage.objects.update(processed_at=timezone.now() - timedelta(days=31))
    return reap_once()


def test_a_job_that_waits_for_its_next_look_is_remembered_however_long() -> None:
    job, other = StagedJobFactory(), StagedJobFactory()
    ProcessedMessage.objects.create(source="stripe", message_id=str(other.pk))
    offer()
    work()
    assert set(effects) == {job.pk, other.pk}
    assert len(effects) == 2
    assert forget() == ReapPass(messages=1), "another source may use the same ids"
    assert offer() == EnqueuePass()
    assert (handed, StagedJob.objects.count()) == ([], 0)
    assert forget() == ReapPass(messages=2)


def test_a_job_is_offered_again_after_waits_that_double() -> None:
    job = StagedJobFactory(hand_overs=3)
    assert enqueue_once() == EnqueuePass(handed_over=1)
    job.refresh_from_db()
    assert 200 < (job.run_at - timezone.now()).total_seconds() <= 240


def test_a_job_without_an_effect_keeps_the_number_of_its_refusals() -> None:
    job = StagedJobFactory(hand_overs=MAX_ATTEMPTS, refusals=2)
    assert enqueue_once() == EnqueuePass(failed=1)
    job.refresh_from_db()
    assert (job.refusals, job.last_error.partition(":")[0]) == (2, "NoEffect")


def test_a_backend_of_whole_batches_follows_up_like_any_other(settings: Settings) -> None:
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.ForgetfulBatches"}}
    StagedJobFactory.create_batch(3)
    assert enqueue_once() == EnqueuePass(handed_over=3)
    assert not StagedJob.objects.filter(run_at__lte=Now()).exists()
    lost = handed.pop()
    work()
    assert offer() == EnqueuePass(handed_over=1)
    assert handed == [lost]
    assert StagedJob.objects.get().hand_overs == 2


def given_up() -> StagedJob:
    """Return a job that failed after ten hand-overs. The queue still has its messages."""
    job: StagedJob = StagedJobFactory()
    for _ in range(MAX_ATTEMPTS + 1):
        offer()
    job.refresh_from_db()
    assert (job.failed_at is None, "NoEffect" in job.last_error, len(handed)) == (
        False,
        True,
        MAX_ATTEMPTS,
    )
    return job


def test_a_job_that_took_effect_after_it_was_given_up_on_is_only_deleted() -> None:
    job = given_up()
    work()
    assert retry_jobs() == 1
    offer()
    assert (handed, effects, StagedJob.objects.count()) == ([], [job.pk], 0)


def test_the_reaper_looks_again_for_the_effects_of_failed_jobs() -> None:
    """Otherwise a job whose worker was away for hours would be on the list of failed jobs until a
    person looks."""
    done = given_up()
    work()
    also_done = StagedJobFactory(
        failed_at=done.failed_at,
        last_error="LookupError: It was refused after its first hand-over.",
    )
    handed.append(also_done.pk)
    work()
    others = [StagedJobFactory(failed_at=Now(), last_error="NoEffect: x") for _ in range(3)] + [
        StagedJobFactory()
    ]
    assert reap_once(batch_size=2) == ReapPass()
    assert set(StagedJob.objects.values_list("pk", flat=True)) == {job.pk for job in others}
    assert forget() == ReapPass(messages=2)


def test_refusals_use_up_no_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    job = StagedJobFactory()
    with monkeypatch.context() as patch:
        patch.setattr(ForgetfulQueue, "refuses", True)
        for _ in range(MAX_ATTEMPTS - 1):
            assert offer() == EnqueuePass(refused=1)
    offer()
    job.refresh_from_db()
    assert (job.hand_overs, job.refusals, job.last_error, handed) == (1, 0, "", [job.pk])
    assert job.run_at - timezone.now() < timedelta(seconds=31), "as after any first hand-over"
    for _ in range(MAX_ATTEMPTS):
        offer()
    job.refresh_from_db()
    assert (handed, job.failed_at is None) == ([job.pk] * MAX_ATTEMPTS, False)


def test_hand_overs_are_no_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    job = StagedJobFactory()
    for _ in range(MAX_ATTEMPTS - 1):
        assert offer() == EnqueuePass(handed_over=1)
    monkeypatch.setattr(ForgetfulQueue, "refuses", True)
    assert offer() == EnqueuePass(refused=1)
    job.refresh_from_db()
    assert (job.hand_overs, job.refusals, job.failed_at) == (MAX_ATTEMPTS - 1, 1, None)
    assert job.run_at - timezone.now() < timedelta(seconds=11), "as after any first refusal"


@pytest.mark.postgres
def test_enqueuers_at_a_high_level_of_isolation_hand_each_job_over_once() -> None:
    StagedJob.objects.bulk_create(StagedJobFactory.build_batch(200, queue="kept"))

    def enqueue(number: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_isolation = 'serializable'")
        while StagedJob.objects.exists():
            enqueue_once(batch_size=7)

    all_at_once(enqueue, 3)
    assert len(handed) == len(set(handed)) == 200


@pytest.fixture
def pointing(request: pytest.FixtureRequest) -> Iterator[type[models.Model]]:
    """Return a model of a user that points at staged jobs, without its table."""

    class Receipt(models.Model):  # noqa: DJ008 - nobody prints it
        job = models.ForeignKey(StagedJob, null=True, on_delete=request.param, related_name="+")

        class Meta:
            app_label = "tests"

    yield Receipt
    del apps.all_models["tests"]["receipt"]
    apps.clear_cache()


@pytest.mark.parametrize("pointing", [models.SET_NULL, models.CASCADE], indirect=True)
def test_a_row_that_points_at_a_job_is_treated_as_its_model_says(pointing: Any) -> None:
    with connection.schema_editor() as editor:
        editor.create_model(pointing)
    try:
        jobs = [StagedJobFactory(queue="kept") for _ in range(6)]
        pointing.objects.create(job=jobs[0])
        assert enqueue_once(batch_size=3) == EnqueuePass(handed_over=6)
        assert (sorted(handed), StagedJob.objects.count()) == (sorted(job.pk for job in jobs), 0)
        cascades = pointing._meta.get_field("job").remote_field.on_delete is models.CASCADE
        assert list(pointing.objects.values_list("job", flat=True)) == ([] if cascades else [None])
    finally:
        with connection.schema_editor() as editor:
            editor.delete_model(pointing)
    assert check_references(None) == []


@pytest.mark.parametrize(
    "pointing", [models.PROTECT, models.RESTRICT, models.DO_NOTHING], indirect=True
)
def test_a_row_that_would_keep_a_job_is_an_error(pointing: Any) -> None:
    (error,) = check_references(None)
    assert error.id == "idempotency.E010"
    assert "tests.Receipt.job" in error.msg


@pytest.mark.parametrize("seconds", [0, 0.9, -1, float("nan"), float("inf"), 1e9, Decimal(30)])
def test_a_job_is_offered_again_after_a_second_to_ten_years(seconds: Any) -> None:
    """A job that is due at once would be handed over in the same pass without end. A time that
    cannot be stored would roll back the batch after the hand-over."""
    with pytest.raises(ValueError, match="number of seconds from 1 to"):
        OfferAgain(seconds)


@pytest.mark.parametrize(("seconds", "handed_over"), [(0.4, 0), (Decimal(30), 0), (300e6, 1)])
def test_a_queue_with_a_time_that_cannot_be_stored_gets_no_job(
    seconds: Any, handed_over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each pass would hand the job over, and count it as refused. A time that only grows
    too long is cut."""
    monkeypatch.setattr(ForgetfulQueue, "follow_up_seconds", seconds)
    StagedJobFactory(hand_overs=1)
    assert enqueue_once() == EnqueuePass(handed_over=handed_over, refused=1 - handed_over)
    assert len(handed) == handed_over


@pytest.mark.postgres
def test_a_job_whose_effect_cannot_be_looked_up_is_not_handed_over_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "BROKER_TIMEOUT_SECONDS", 1)
    forgotten, new, kept = StagedJobFactory(), StagedJobFactory(), StagedJobFactory(queue="kept")
    StagedJob.objects.exclude(pk=new.pk).update(hand_overs=1)
    with (
        held_transaction(partial(lock_table, "idempotency_processedmessage")),
        pytest.raises(
            BrokerUnavailable,
            match=r"^1 jobs were handed over.* queue 'default': The inbox cannot be read",
        ),
    ):
        offer()
    assert handed == [kept.pk]
    assert set(StagedJob.objects.values_list("pk", "refusals", "hand_overs")) == {
        (forgotten.pk, 0, 1),
        (new.pk, 0, 0),
    }
