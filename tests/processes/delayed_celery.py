"""Celery on quorum queues behind topic exchanges, where RabbitMQ delays a retry. The worker takes
the messages of one queue; no worker takes those of the default queue."""

from celery import Celery
from kombu import Exchange, Queue

from idempotency.contrib.celery import OnceTask
from tests.processes.service import leave_entry

QUEUE, TASK = "payments", "tests.flaky"


def fail_once(self: OnceTask, name: str) -> None:
    """Leave a row in the second run."""
    if not self.request.retries:
        raise ValueError("The first run fails.")
    leave_entry(name)


def app_of(url: str) -> Celery:
    """Return the app of a broker."""
    app = Celery("delayed", broker=url, set_as_current=False)
    app.conf.update(
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        task_queues=[
            Queue(name, Exchange(name, "topic"), name, queue_arguments={"x-queue-type": "quorum"})
            for name in ("celery", QUEUE)
        ],
    )
    app.task(fail_once, name=TASK, base=OnceTask, bind=True)
    return app


def work(url: str) -> None:
    """Work on the queue until the process is killed."""
    options = ["--pool=solo", "--loglevel=WARNING", "--without-gossip", "--without-mingle"]
    app_of(url).worker_main(["worker", f"--queues={QUEUE}", *options])
