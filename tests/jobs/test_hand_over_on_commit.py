"""A hand-over that only queues a callback for COMMIT has handed nothing over: the job stays staged,
with the reason."""

import django_rq
import pytest
from django.db import connections, transaction
from rq import Queue

from idempotency import _prompt
from idempotency.backends import OneByOne
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.jobs import stage_job
from idempotency.models import StagedJob
from rides_demo.models import AuditRecord
from tests.factories import StagedJobFactory, UserFactory
from tests.kit.brokers import queued

pytestmark = pytest.mark.django_db(transaction=True)


def with_django_rq(job: StagedJob) -> None:
    """Enqueue with django-rq as a project is set up without further thought."""
    django_rq.get_queue("default").enqueue("tests.kit.jobs.record", str(job.pk))


def with_django_rq_at_once(job: StagedJob) -> None:
    """Enqueue with django-rq as the guide says."""
    queue: Queue = django_rq.get_queue("default", commit_mode="auto")
    queue.enqueue("tests.kit.jobs.record", job_id=str(job.pk))


def some_on_commit(job: StagedJob) -> None:
    """Take the job; one that is named ``late`` waits for COMMIT."""
    if job.job_name.endswith("late"):
        transaction.on_commit(lambda: None, robust=True)


def as_a_batch(queue, jobs):
    """Take the jobs all at once."""
    for job in jobs:
        some_on_commit(job)
    return {}


class BatchBackend:
    """A queue that takes a batch."""

    hand_over = staticmethod(as_a_batch)


class BrokerElsewhere(OneByOne):
    """A queue that is not in the database; a library around it uses the database all the same."""

    uses_database = False

    def hand_over_one(self, queue, job):
        some_on_commit(job)


def stages_the_next(job: StagedJob) -> None:
    """Take the job, and stage what follows it."""
    if job.job_args:
        stage_job("tests.kit.jobs.record", [])


def test_a_job_that_django_rq_queues_on_commit_stays_with_the_reason(broker, settings):
    settings.RQ = {}
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.with_django_rq"}}
    StagedJobFactory()
    assert enqueue_once() == EnqueuePass(refused=1)
    job = StagedJob.objects.get()
    assert (job.refusals, job.failed_at, job.last_error.partition(":")[0]) == (
        1,
        None,
        "HandOverOnCommit",
    )
    assert queued(broker) == [], (
        "the callback goes with the refusal: no job runs that is offered again"
    )


def test_django_rq_as_the_guide_configures_it_takes_the_job(broker, settings):
    settings.RQ = {}
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.with_django_rq_at_once"}}
    job = StagedJobFactory()
    assert enqueue_once() == EnqueuePass(handed_over=1)
    assert (queued(broker), StagedJob.objects.count()) == ([str(job.pk)], 0)


@pytest.mark.parametrize("backend", ["some_on_commit", "BatchBackend", "BrokerElsewhere"])
def test_only_the_jobs_that_wait_for_commit_are_refused(backend, settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.{backend}"}}
    late = StagedJobFactory(job_name="shop.jobs.late")
    StagedJobFactory.create_batch(3)
    assert enqueue_once() == EnqueuePass(handed_over=3, refused=1)
    assert StagedJob.objects.get() == late


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_callback_on_another_database_counts_too(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.on_the_other_database"}}
    StagedJobFactory()
    with transaction.atomic(using="shard_b"):
        assert enqueue_once() == EnqueuePass(refused=1)
        assert connections["shard_b"].run_on_commit
    assert StagedJob.objects.count() == 1


def on_the_other_database(job: StagedJob) -> None:
    """Wait for the COMMIT of another database."""
    transaction.on_commit(lambda: None, using="shard_b")


def test_a_hand_over_that_stages_the_next_job_is_none_of_these(settings, monkeypatch):
    """The attempt after COMMIT is a callback too, and no job depends on it."""
    monkeypatch.setattr(_prompt, "_attempt", lambda alias: None)
    settings.IDEMPOTENCY = {
        "ENQUEUERS": {"*": f"{__name__}.stages_the_next"},
        "HAND_OVER_AFTER_COMMIT": True,
    }
    StagedJobFactory(job_args={"of": UserFactory().pk})
    assert enqueue_once() == EnqueuePass(handed_over=2)
    assert not AuditRecord.objects.exists()
