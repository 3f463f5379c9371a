"""An error of a job: its report shows no argument of the job in a frame of this app."""

import logging
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync
from celery import Celery
from django.db import IntegrityError, connection, transaction
from django.db.models.functions import Now
from django.db.models.signals import pre_save
from pytest_django import Settings

from idempotency._async import awaited
from idempotency.contrib.celery import OnceTask
from idempotency.contrib.rq import run_once
from idempotency.contrib.tasks import InvalidTask, run_staged, task, task_enqueued
from idempotency.enqueuer import enqueue_once
from idempotency.inbox import process_once
from idempotency.interventions import retry_jobs
from idempotency.jobs import astage_job, call_job, stage_job
from idempotency.models import StagedJob
from tests.kit.frames import OutOfLuck, Planted

pytestmark = pytest.mark.django_db(transaction=True)


def failing(card: str) -> None:
    """Fail as a job does."""
    raise OutOfLuck


async def failing_async(card: str) -> None:
    """Fail as an async job does."""
    raise OutOfLuck


@pytest.fixture(params=[failing, failing_async])
def job(request: pytest.FixtureRequest, settings: Settings) -> str:
    """Return the name of a job that fails."""
    settings.IDEMPOTENCY = {"JOB_MODULES": [__name__]}
    return f"{__name__}.{request.param.__name__}"


@pytest.fixture(params=[dict, list])
def arguments(request: pytest.FixtureRequest, planted: Planted) -> Any:
    """Return arguments with a secret, by name and by position."""
    return {"card": planted["argument"]} if request.param is dict else [planted["argument"]]


@pytest.mark.parametrize(
    "run",
    [
        call_job,
        lambda name, args: run_once(name, args, str(uuid4())),
        lambda name, args: run_staged.call(name, args, str(uuid4())),
    ],
    ids=["call_job", "RQ", "Django Tasks"],
)
def test_60_error_of_a_job(
    run: Callable[[str, Any], Any], job: str, arguments: Any, planted: Planted
) -> None:
    with pytest.raises(OutOfLuck) as caught:
        run(job, arguments)
    planted.refuse_shown(caught.value, at_least=3)


@pytest.mark.parametrize("function", [failing, failing_async])
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("with_id", [True, False])
def test_60_error_of_a_task_of_celery(
    function: Callable[..., Any], by_name: bool, with_id: bool, planted: Planted
) -> None:
    app = Celery(set_as_current=False, broker="memory://")
    task = app.task(base=OnceTask, max_retries=0)(function)
    args, kwargs = ((), {"card": planted["argument"]}) if by_name else ((planted["argument"],), {})
    with pytest.raises(OutOfLuck) as caught:
        task.apply(args, kwargs, throw=True) if with_id else awaited(task(*args, **kwargs))
    planted.refuse_shown(caught.value)


def test_60_error_of_a_message(planted: Planted) -> None:
    def deliver(body: str) -> None:
        with process_once("bank", "evt_1"):
            raise OutOfLuck

    async def deliver_async(body: str) -> None:
        async with process_once("bank", "evt_2"):
            raise OutOfLuck

    for delivery in (deliver, async_to_sync(deliver_async)):
        with pytest.raises(OutOfLuck) as caught:
            delivery(planted["body"])
        planted.refuse_shown(caught.value, at_least=0)


@pytest.mark.parametrize("stage", [stage_job, async_to_sync(astage_job)])
def test_60_error_of_a_receiver_while_a_job_is_staged(
    stage: Any, arguments: Any, planted: Planted
) -> None:
    def receiver(**kwargs: Any) -> None:
        raise OutOfLuck

    pre_save.connect(receiver, sender=StagedJob)
    try:
        with pytest.raises(OutOfLuck) as caught, transaction.atomic():
            stage("tests.kit.jobs.anything", arguments)
    finally:
        pre_save.disconnect(receiver, sender=StagedJob)
    planted.refuse_shown(caught.value, at_least=3)


@pytest.mark.parametrize("value", [object(), "\0", float("nan"), {1: 2}])
@pytest.mark.parametrize("stage", [stage_job, async_to_sync(astage_job)])
def test_60_error_of_arguments_that_cannot_be_stored(
    stage: Any, value: object, planted: Planted
) -> None:
    secret = planted["argument"]
    for args in ({"card": secret, "bad": value}, [secret, value], {"bad": [secret, value]}):
        with pytest.raises(TypeError) as caught, transaction.atomic():
            stage("tests.kit.jobs.anything", args)
        planted.refuse_shown(caught.value, at_least=3)


@task
def taken(*args: Any, **kwargs: Any) -> None:
    """Do nothing: no worker runs here."""


@pytest.mark.parametrize("given", [([1], {}), ([], {"a": 1}), ([1], {"b": 2})])
def test_60_error_of_a_receiver_while_a_task_is_staged(
    given: Any, planted: Planted, settings: Settings
) -> None:
    settings.TASKS = {
        "default": {
            "BACKEND": "idempotency.contrib.tasks.StagedBackend",
            "OPTIONS": {"backend": "worker"},
        },
        "worker": {"BACKEND": "django_tasks.backends.dummy.DummyBackend"},
    }
    args, kwargs = (
        [planted["argument"]] * len(given[0]),
        dict.fromkeys(given[1], planted["argument"]),
    )

    def receiver(**kwargs: Any) -> None:
        raise OutOfLuck

    task_enqueued.connect(receiver)
    try:
        with pytest.raises((OutOfLuck, InvalidTask)) as caught, transaction.atomic():
            taken.using(backend="default").enqueue(*args, **kwargs)
    finally:
        task_enqueued.disconnect(receiver)
    planted.refuse_shown(caught.value)


def fail_to_take(job: StagedJob) -> None:
    """Fail as a backend does."""
    raise OutOfLuck


def leave(job: StagedJob) -> None:
    """End the process."""
    raise SystemExit


@pytest.mark.parametrize("backend", [fail_to_take, leave])
def test_60_error_of_a_backend(
    backend: Any,
    arguments: Any,
    planted: Planted,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "idempotency")
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.{backend.__name__}"}}
    with transaction.atomic():
        stage_job("tests.kit.jobs.anything", arguments)
    try:
        assert enqueue_once().refused == 1
    except SystemExit as error:
        planted.refuse_shown(error, at_least=5)
    planted.refuse_logged(caplog.records)


@pytest.fixture
def _constraint(db: None) -> Iterator[None]:
    """Give the table of staged jobs a constraint that no new or changed row meets."""
    table = StagedJob._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f"ALTER TABLE {table} ADD CONSTRAINT added CHECK (hand_overs > 99) NOT VALID"
        )
    yield
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} DROP CONSTRAINT added")


@pytest.mark.postgres
@pytest.mark.usefixtures("_constraint")
@pytest.mark.parametrize("stage", [stage_job, async_to_sync(astage_job)])
def test_60_error_of_a_constraint_that_a_new_job_violates(
    stage: Any, arguments: Any, planted: Planted
) -> None:
    with pytest.raises(IntegrityError, match="added") as caught, transaction.atomic():
        stage("tests.kit.jobs.anything", arguments)
    planted.refuse_shown(caught.value, at_least=3)


@pytest.mark.postgres
def test_60_error_of_a_constraint_that_a_refused_job_violates(
    arguments: Any,
    planted: Planted,
    settings: Settings,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.fail_to_take"}}
    with transaction.atomic():
        stage_job("tests.kit.jobs.anything", arguments)
    request.getfixturevalue("_constraint")
    with pytest.raises(IntegrityError, match="added") as caught:
        enqueue_once()
    planted.refuse_shown(caught.value, at_least=3)
    planted.refuse_logged(caplog.records)
    StagedJob.objects.filter(failed_at=None).update(failed_at=Now(), hand_overs=100)
    with pytest.raises(IntegrityError, match="added") as caught:
        retry_jobs()
    planted.refuse_shown(caught.value)
