"""A Celery app on the Redis of the tests: ``celery -A tests.kit.celery_app worker``."""

from celery import Celery
from django.conf import settings

from idempotency.contrib.celery import OnceTask


def broker_url(redis_url: str) -> str:
    """Return the URL of a Redis in the form that Celery expects."""
    return redis_url.replace("unix://", "redis+socket://")


app = Celery("tests", broker=broker_url(settings.REDIS_URL), set_as_current=True)
app.conf.update(worker_hijack_root_logger=False, broker_connection_retry_on_startup=True)


@app.on_after_finalize.connect
def register_tasks(sender: Celery, **kwargs: object) -> None:
    """Register as tasks the functions that RQ and Django Tasks run directly, under the same
    names."""
    from tests.kit import jobs

    for name, function in vars(jobs).items():
        if name.startswith("record"):
            sender.task(base=OnceTask)(function)
    sender.task(name="tests.unprotected")(jobs.record)
