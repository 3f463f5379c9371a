"""A broker that is unavailable for some jobs only: a partner that answers 503 for them, or closes
the connection."""

from collections import Counter
from contextlib import suppress

import pytest

from idempotency import _hand_over, backends
from idempotency.backends import BrokerUnavailable
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.models import StagedJob
from tests.factories import StagedJobFactory

pytestmark = pytest.mark.django_db(transaction=True)


class Partner(backends.OneByOne):
    """A backend whose partner does not answer for some jobs, or is down."""

    down = False

    def __init__(self):
        self.took, self.offers = [], 0

    def hand_over_one(self, queue, job):
        self.offers += 1
        if self.down or job.job_name.endswith("poison"):
            raise BrokerUnavailable("the partner answered 503")
        self.took.append(job.pk)


class InALoop(Partner):
    """A backend that takes all jobs in a loop, and is left by the first exception."""

    def hand_over(self, queue, jobs):
        for job in jobs:
            self.hand_over_one(queue, job)
        return {}


class WithResults(Partner):
    """A backend that returns a result for each job."""

    def hand_over(self, queue, jobs):
        results = {}
        for job in jobs:
            try:
                self.hand_over_one(queue, job)
            except BrokerUnavailable as error:
                results[job.pk] = error
        return results


@pytest.fixture(params=[Partner, InALoop, WithResults])
def partner(request, monkeypatch):
    made = request.param()
    monkeypatch.setattr(_hand_over, "backend_of", lambda queue, using: made)
    return made


def stage(count, name="shop.jobs.good"):
    return StagedJobFactory.create_batch(count, job_name=name)


def refusals():
    return Counter(StagedJob.objects.values_list("job_name", "refusals"))


def test_a_job_for_which_the_broker_is_unavailable_is_refused_and_blocks_no_other(partner):
    stage(1, "shop.jobs.poison")
    stage(5)
    assert enqueue_once() == EnqueuePass(handed_over=5, refused=1)
    [job] = StagedJob.objects.all()
    assert (job.refusals, job.last_error) == (1, "BrokerUnavailable: the partner answered 503")
    assert enqueue_once() == EnqueuePass(), "it waits"


def test_many_such_jobs_block_no_other(partner):
    """Among them the broker may take none of the jobs that are offered in a pass."""
    poison, good = stage(30, "shop.jobs.poison"), stage(30)
    for _ in range(50):
        with suppress(BrokerUnavailable):
            enqueue_once()
    assert set(partner.took) == {job.pk for job in good}
    assert StagedJob.objects.count() == len(poison)


def test_a_broker_that_takes_no_job_charges_none(partner):
    partner.down = True
    stage(30)
    for _ in range(2):
        partner.offers = 0
        with pytest.raises(BrokerUnavailable):
            enqueue_once()
        assert partner.offers < 30 + backends.MOST_UNAVAILABLE
    assert refusals() == {("shop.jobs.good", 0): 30}
    partner.down = False
    assert enqueue_once() == EnqueuePass(handed_over=30)


def test_a_job_that_no_other_one_proves_wrong_is_refused_in_the_pass_that_has_another_one(partner):
    stage(1, "shop.jobs.poison")
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            enqueue_once()
    assert refusals() == {("shop.jobs.poison", 0): 1}
    stage(1)
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert refusals() == {("shop.jobs.poison", 1): 1}


def test_a_job_that_waits_long_for_such_a_broker_ends_in_the_list_of_the_failed(partner):
    StagedJobFactory(job_name="shop.jobs.poison", refusals=backends.MAX_ATTEMPTS - 1)
    stage(2)
    assert enqueue_once() == EnqueuePass(handed_over=2, failed=1)


@pytest.mark.parametrize("partner", [Partner, WithResults], indirect=True)
def test_a_broker_that_goes_down_in_a_batch_refuses_no_job(monkeypatch, partner):
    stage(30)

    def hand_over_one(self, queue, job):
        if len(self.took) == 10:
            raise BrokerUnavailable("nobody is there")
        self.took.append(job.pk)

    monkeypatch.setattr(Partner, "hand_over_one", hand_over_one)
    with pytest.raises(BrokerUnavailable, match="10 jobs were handed over"):
        enqueue_once()
    assert len(partner.took) == 10
    assert refusals() == {("shop.jobs.good", 0): 20}
