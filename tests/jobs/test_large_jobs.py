"""Large jobs: the enqueuer reads a few at a time."""

import random

import pytest

from idempotency import _batch
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.models import StagedJob
from tests.factories import StagedJobFactory

pytestmark = pytest.mark.django_db(transaction=True)

KIB = 1024
#: What a batch may have in these tests.
MOST = 64 * KIB
got = []


class Backend:
    """A backend that notes the size of each job of a batch."""

    def hand_over(self, queue, jobs):
        got.append([len(job.job_args["text"]) for job in jobs])
        return {}


@pytest.fixture(autouse=True)
def small_batches(settings, monkeypatch):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.Backend"}}
    monkeypatch.setattr(_batch, "BATCH_BYTES", MOST)
    got.clear()


def stage(*sizes, letters=1):
    for size in sizes:
        StagedJobFactory(
            job_args={"text": "".join(random.choices("abcdefghijklmnop"[:letters], k=size))}
        )


@pytest.mark.parametrize("letters", [1, 16], ids=["compressible", "random"])
@pytest.mark.parametrize("batch_size", [3, 10, 1000])
def test_a_batch_is_limited_in_bytes(letters, batch_size):
    sizes = [10, 30 * KIB, 30 * KIB, 30 * KIB, 10, 200 * KIB, 10, 10, 5 * KIB, *[6 * KIB] * 30]
    stage(*sizes, letters=letters)
    assert enqueue_once(batch_size=batch_size) == EnqueuePass(handed_over=len(sizes))
    assert sorted(size for batch in got for size in batch) == sorted(sizes), "each once"
    assert max(sum(batch) - max(batch) for batch in got) <= 2 * MOST
    assert not StagedJob.objects.exists()


def test_jobs_of_a_usual_size_are_one_batch():
    stage(*[10] * 50)
    enqueue_once()
    assert len(got) == 1


def test_a_batch_of_large_jobs_is_followed_by_batches_as_large_as_before():
    stage(*[100 * KIB] * 3, *[10] * 50)
    enqueue_once(batch_size=50)
    assert len(got) < 12
