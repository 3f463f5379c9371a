"""Celery in ``test_processes_killed.py``: its app, its backend and its task."""

from celery import Celery
from django.conf import settings

from idempotency.contrib.celery import CeleryBackend, OnceTask
from tests.kit.celery_app import broker_url
from tests.processes.service import JOB, NEXT_JOB, TakesTime, leave_entry, leave_next

app = Celery("killed", broker=broker_url(settings.REDIS_URL), set_as_current=True)
app.conf.update(
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    # What a killed worker had in hand comes back after so many seconds, not after an hour.
    broker_transport_options={
        "visibility_timeout": 1,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
)
app.task(leave_entry, name=JOB, base=OnceTask)
app.task(leave_next, name=NEXT_JOB, base=OnceTask)


class Backend(TakesTime, CeleryBackend):
    """A job that was lost goes out again soon."""

    follow_up_seconds = 5
