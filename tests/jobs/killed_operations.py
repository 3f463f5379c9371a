"""What a worker of ``test_staged_operations.py`` imports: a process that is killed once at a chosen
place of an operation."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

from celery.signals import task_postrun
from django.conf import settings
from django.db.models.signals import post_save
from django_rq import job

from idempotency.contrib.celery import RETRIES
from idempotency.contrib.rq import RETRIES as RETRIES_OF_RQ
from idempotency.signals import key_claimed, key_finished
from tests import operations
from tests.jobs.celery_tasks import app
from tests.models import Account, Entry

#: The places of ``pay``, in their order.
PLACES = (
    "after the claim",
    "in the first transaction",
    "before the call",
    "after the call",
    "in the last transaction",
    "after the last commit",
)
#: Celery has not acknowledged the message yet.
AFTER_THE_TASK = "after the task"


@app.task(**RETRIES)
def pay_invoice(name: str, cents: int) -> dict[str, Any]:
    """Call an operation, as a task of a project does."""
    paid: dict[str, Any] = operations.pay.once(name, name=name, cents=cents)
    return paid


@job("default", **RETRIES_OF_RQ)
def pay_by_rq(name: str, cents: int) -> dict[str, Any]:
    """Call an operation, as a job of a project does."""
    paid: dict[str, Any] = operations.pay.once(name, name=name, cents=cents)
    return paid


@app.task
def noted(paid: dict[str, Any]) -> dict[str, Any]:
    """Use the result of the task before."""
    return {"noted": paid}


def _die(mark: Path, *args: Any, **options: Any) -> None:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at(place: str, mark: str) -> None:
    """Kill this process, or the first child that gets there. A lease lasts two seconds."""
    settings.IDEMPOTENCY = settings.IDEMPOTENCY | {"LOCK_TIMEOUT_SECONDS": 2}
    die = partial(_die, Path(mark))
    match place:
        case "after the claim":
            key_claimed.connect(die, weak=False)
        case "in the first transaction":
            post_save.connect(die, sender=Entry, weak=False)
        case "before the call":
            operations.bank.before = die
        case "after the call":
            operations.bank.after = die
        case "in the last transaction":
            post_save.connect(die, sender=Account, weak=False)
        case "after the last commit":
            key_finished.connect(die, weak=False)
        case "after the task":
            task_postrun.connect(die, weak=False)
