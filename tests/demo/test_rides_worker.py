"""The demo's RQ worker: no job waits for the lease of a worker that is no more."""

from collections.abc import Iterator

import pytest
from redis import Redis
from rq import Queue, Retry, SimpleWorker
from rq.job import Job
from rq.scheduler import RQScheduler

from rides_demo.processes.worker import OnlyWorker

pytestmark = pytest.mark.postgres


class InThisProcess(OnlyWorker, SimpleWorker):
    """The demo's worker without its work horse."""

    execute_job = SimpleWorker.execute_job


@pytest.fixture
def queue(broker: Redis) -> Iterator[Queue]:
    return Queue("default", connection=broker)


@pytest.fixture
def job(queue: Queue) -> Job:
    return queue.enqueue("os.getpid", retry=Retry(max=1))


def died_with(queue: Queue, job: Job, *, begun: bool) -> None:
    """Leave what a worker leaves that was killed with the job in hand."""
    taken, _ = Queue.dequeue_any([queue], None, connection=queue.connection)
    assert taken.id == job.id
    if begun:
        SimpleWorker([queue], connection=queue.connection).prepare_execution(taken)
    assert queue.job_ids == []


@pytest.mark.parametrize("begun", [False, True])
def test_the_next_worker_takes_up_a_job_at_once(queue, job, begun):
    died_with(queue, job, begun=begun)

    InThisProcess([queue], connection=queue.connection).work(burst=True)

    assert job.is_finished
    assert queue.intermediate_queue.get_job_ids() == []
    assert queue.started_job_registry.get_job_ids() == []


def test_a_stock_worker_leaves_it_where_it_is(queue, job):
    died_with(queue, job, begun=True)

    SimpleWorker([queue], connection=queue.connection).work(burst=True)

    assert not job.is_finished


def test_its_scheduler_owns_the_lock_of_the_one_that_was_killed(queue):
    killed, following = (OnlyWorker([queue], connection=queue.connection) for _ in range(2))
    for worker in (killed, following):
        worker._start_scheduler()
        lock = queue.connection.get(RQScheduler.get_locking_key("default"))
        assert (lock, worker.scheduler.acquired_locks) == (b"rides-demo", {"default"})
        worker.scheduler._process.kill()
        worker.scheduler._process.join()
