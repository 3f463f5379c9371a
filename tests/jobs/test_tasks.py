"""Django Tasks in front: ``task.enqueue()`` stages a job in the open transaction."""

from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.utils import timezone
from django_tasks_db.models import DBTaskResult

from idempotency.contrib.rq import run_once
from idempotency.contrib.tasks import InvalidTask, run_staged, task, task_backends
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.exceptions import NoOpenTransaction
from idempotency.models import StagedJob
from rides_demo.models import AuditRecord
from tests.factories import UserFactory
from tests.kit import jobs
from tests.kit.commands import start

pytestmark = pytest.mark.django_db(transaction=True)

STAGED = {
    "BACKEND": "idempotency.contrib.tasks.StagedBackend",
    "OPTIONS": {"backend": "worker"},
    "QUEUES": ["default", "mail"],
}
WORKER = {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["default", "mail"]}

record = task(jobs.record)


@pytest.fixture(autouse=True)
def backends(settings):
    settings.TASKS = {"default": STAGED, "worker": WORKER}
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": "idempotency.contrib.tasks.TasksBackend"}}


def staged():
    job = StagedJob.objects.get()
    return job.job_name, job.job_args, job.queue


def test_a_task_is_staged_with_the_transaction_and_not_without_it():
    with transaction.atomic():
        record.enqueue(1, "label")
        transaction.set_rollback(True)
    assert not StagedJob.objects.exists()
    with pytest.raises(NoOpenTransaction):
        record.enqueue(1, "label")
    with transaction.atomic():
        result = record.using(queue_name="mail").enqueue(1, "label")
    assert staged() == ("tests.kit.jobs.record", [1, "label"], "mail")
    assert result.id == str(StagedJob.objects.get().pk)
    assert not result.is_finished


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {"user": 1}, {"user": 1}),
        ((1,), {"label": "x"}, {"user": 1, "label": "x"}),
        ((), {}, []),
    ],
)
def test_arguments_keep_their_names(args, kwargs, expected):
    with transaction.atomic():
        record.enqueue(*args, **kwargs)
    assert StagedJob.objects.get().job_args == expected


def note(first, /, *more, **rest):
    """Leave what it was called with."""
    called_with.append((first, more, rest))


def note_by_name(first, **rest):
    """Leave what it was called with."""
    called_with.append((first, rest))


called_with = []


@pytest.mark.parametrize(("args", "kwargs"), [((1, 2), {}), ((1,), {"more": 2, "rest": 3})])
def test_a_function_that_takes_anything_by_name_gets_what_it_was_given(args, kwargs):
    called_with.clear()
    function, name = (note_by_name, "note_by_name") if kwargs else (note, "note")
    with transaction.atomic():
        task(function).enqueue(*args, **kwargs)
    run_once(
        f"tests.jobs.test_tasks.{name}",
        StagedJob.objects.get().job_args,
        "00000000-0000-7000-8000-000000000002",
    )
    function(*args, **kwargs)
    assert called_with[0] == called_with[1]


@pytest.mark.parametrize("args", [(1,), (1, 2)])
def test_a_mix_of_arguments_that_cannot_be_told_by_name_is_refused(args):
    with pytest.raises(InvalidTask, match="'first' cannot be passed by name"), transaction.atomic():
        task(note).enqueue(*args, label="x")
    assert not StagedJob.objects.exists()


def test_run_after_is_when_the_job_is_due():
    later = timezone.now() + timedelta(hours=1)
    with transaction.atomic():
        record.using(run_after=later).enqueue(1)
    assert StagedJob.objects.get().run_at == later
    assert enqueue_once() == EnqueuePass()


def test_the_enqueuer_hands_it_to_the_backend_with_the_workers():
    with transaction.atomic():
        result = record.using(queue_name="mail").enqueue(1)
    assert enqueue_once() == EnqueuePass(handed_over=1)
    row = DBTaskResult.objects.get()
    assert (row.task_path, row.backend_name, row.queue_name) == (
        "idempotency.contrib.tasks.run_staged",
        "worker",
        "mail",
    )
    assert row.args_kwargs["args"] == ["tests.kit.jobs.record", [1], result.id, "default"]


def test_the_worker_runs_a_function_that_is_a_task():
    user = UserFactory()
    for _ in range(2):
        run_once("tests.jobs.test_tasks.record", [user.pk], "00000000-0000-7000-8000-000000000001")
    assert AuditRecord.objects.count() == 1


def test_what_cannot_be_staged_is_refused():
    with pytest.raises(InvalidTask, match="priority"):
        record.using(priority=5)
    with pytest.raises(InvalidTask, match="context"):
        task(takes_context=True)(takes_context)
    with pytest.raises(TypeError, match="JSON"), transaction.atomic():
        record.enqueue(object())


def takes_context(context):
    """Nothing."""


def test_a_backend_without_workers_behind_it_is_named(settings):
    settings.TASKS = {"default": {**STAGED, "OPTIONS": {}}}
    with transaction.atomic():
        record.enqueue(1)
    assert enqueue_once() == EnqueuePass(refused=1)
    assert StagedJob.objects.get().last_error.startswith("ImproperlyConfigured")
    with pytest.raises(ImproperlyConfigured):
        _ = task_backends["default"].hands_to
    assert run_staged.name == "run_staged"


@pytest.mark.postgres
@pytest.mark.processes
def test_it_is_the_default_backend_from_the_start_of_the_process():
    """The task of this very package asks for the default backend while its module is imported."""
    code = (
        f"import tests.settings; tests.settings.TASKS = {{'default': {STAGED!r}, 'worker':"
        f" {WORKER!r}}}\nimport django; django.setup()\nfrom tests.jobs.test_tasks import record;"
        " print(type(record.get_backend()).__name__)"
    )
    with start(python=code) as process:
        output, errors = process.communicate(timeout=60)
    assert (output, errors) == ("StagedBackend\n", "")
