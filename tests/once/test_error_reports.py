"""An error of an operation: its report shows no key, argument or answer in a frame of this app."""

import asyncio
from typing import Any

import pytest
from django.db import transaction
from django.db.models.signals import pre_save

from idempotency.completer import complete_key
from idempotency.contrib.celery import run_operation
from idempotency.contrib.rq import run_once
from idempotency.contrib.tasks import run_staged
from idempotency.exceptions import Unfinished
from idempotency.models import IdempotencyKey, StagedJob
from tests.kit.frames import OutOfLuck, Planted
from tests.operations import Bank, charge, note, pay, tell

pytestmark = pytest.mark.django_db(transaction=True)


def fail(*args: Any, **kwargs: Any) -> None:
    raise OutOfLuck


def test_60_error_of_a_plain_operation(planted: Planted) -> None:
    with pytest.raises(ValueError, match="broken") as caught:
        note.once(planted["key"], name=planted["argument"], fails="breaks")
    planted.refuse_shown(caught.value, at_least=3)


@pytest.mark.parametrize("place", ["before", "after", "inside"])
@pytest.mark.parametrize("operation", [charge, pay, tell])
def test_60_error_of_a_phased_operation(
    operation: Any, place: str, bank: Bank, planted: Planted
) -> None:
    if place == "inside" and operation is not charge:
        return
    setattr(bank, place, fail)
    with pytest.raises(Unfinished) as caught:
        operation.once(planted["key"], name=planted["argument"], cents=1)
    planted.of_key(IdempotencyKey.objects.get())
    planted.refuse_shown(caught.value, at_least=5)


def test_60_error_of_an_operation_of_the_completer(
    bank: Bank, planted: Planted, caplog: pytest.LogCaptureFixture
) -> None:
    bank.after = fail
    with pytest.raises(Unfinished):
        charge.once(planted["key"], name=planted["argument"], cents=1)
    key = IdempotencyKey.objects.get()
    planted.of_key(key)
    with planted.logged(caplog):
        assert complete_key(key.pk) == "failed"


def test_60_error_of_an_async_caller(bank: Bank, planted: Planted) -> None:
    bank.before = fail

    async def call() -> Any:
        return await charge.aonce(planted["key"], name=planted["argument"], cents=1)

    with pytest.raises(Unfinished) as caught:
        asyncio.run(call())
    planted.refuse_shown(caught.value, at_least=5)


def test_60_error_while_an_operation_is_staged(planted: Planted) -> None:
    pre_save.connect(fail, sender=StagedJob)
    try:
        with pytest.raises(OutOfLuck) as caught, transaction.atomic():
            note.stage(planted["key"], name=planted["argument"])
    finally:
        pre_save.disconnect(fail, sender=StagedJob)
    planted.refuse_shown(caught.value, at_least=2)


@pytest.mark.parametrize(
    ("worker", "operation"),
    [(run_once, note), (run_staged.func, note), (run_staged.func, charge), (run_operation, charge)],
)
def test_60_error_of_a_staged_operation(
    worker: Any, operation: Any, bank: Bank, planted: Planted
) -> None:
    bank.before = fail
    values = {"fails": "breaks"} if operation is note else {"cents": 1}
    with transaction.atomic():
        job = operation.stage(planted["key"], name=planted["argument"], **values)
    given: Any = (job.job_name, job.job_args, str(job.pk))
    with pytest.raises((ValueError, Unfinished)) as caught:
        worker(**job.job_args) if worker is run_operation else worker(*given)
    planted.refuse_shown(caught.value, at_least=5)
