"""Which functions a row of the table of staged jobs can run: those of the modules in JOB_MODULES,
and no others."""

import sys
from functools import partial
from types import SimpleNamespace
from uuid import uuid4

import pytest
from django.core.checks import run_checks
from django.db import ProgrammingError, transaction
from django.db.models.functions import Now

from idempotency import _outcomes, jobs
from idempotency.backends import MAX_ATTEMPTS
from idempotency.contrib.celery import CeleryBackend
from idempotency.contrib.rq import run_once
from idempotency.contrib.tasks import run_staged
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.exceptions import JobNotAllowed
from idempotency.jobs import call_job, stage_job
from idempotency.models import StagedJob
from rides_demo.models import AuditRecord
from tests.factories import StagedJobFactory, UserFactory
from tests.kit.brokers import queued
from tests.kit.celery_app import app as celery_app
from tests.kit.jobs import record
from tests.models import Entry  # noqa: F401 - a name that is not defined here

pytestmark = pytest.mark.django_db(transaction=True)

RECORD = "tests.kit.jobs.record"
RQ = "idempotency.contrib.rq.RQBackend"
QUERY = (
    "from django.db import connection\nwith connection.cursor() as c: c.execute('SELECT * FROM"
    " table_of_tomorrow')\n"
)
#: A function of no app, one that a module of an app has imported, something that is no function,
#: and what is not there.
FOREIGN = [
    "os.system",
    "django.contrib.auth.load_backend",
    "django.contrib.auth.tasks.load_backend",
    "idempotency.jobs.call_job",
    "rides_demo.models.Ride",
    "rides_demo.payments.charge",
    "django.core.management.call_command",
    "tests.kit.jobs.sync_to_async",
    "tests.jobs.test_job_modules.RECORD",
    "tests.jobs.test_job_modules.off_list",
    "tests.jobs.test_job_modules.off_list_in_use",
    "tests.jobs.test_job_modules.Entry",
    "tests.kit.jobs.missing",
    "tests.missing.record",
    "testsuite.record",
]

off_list = partial(sys.exit, 3)
on_list = partial(record, label="of a partial")


class Wrapper(SimpleNamespace):
    """An object that has a function, and runs another one."""

    def __call__(self, *args: object) -> object:
        return self.call(*args)


off_list_in_use = Wrapper(func=record, call=sys.exit)
off_list_in_use.__module__ = "sys"
in_wrapper = SimpleNamespace(func=record, call=sys.exit)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_function_that_is_not_on_the_list_is_neither_staged_nor_run(name):
    with pytest.raises(JobNotAllowed), transaction.atomic():
        stage_job(name)
    for worker in (run_once, run_staged.func):
        with pytest.raises(JobNotAllowed):
            worker(name, [], str(uuid4()))
    assert not StagedJob.objects.exists()


def test_a_module_that_is_not_on_the_list_is_not_imported(broker, settings):
    sys.modules.pop("this", None)
    for backend in (
        RQ,
        "idempotency.contrib.tasks.TasksBackend",
        "idempotency.contrib.celery.CeleryBackend",
    ):
        settings.IDEMPOTENCY = {"ENQUEUERS": {"*": backend}}
        StagedJobFactory(job_name="this.d")
        assert enqueue_once() == EnqueuePass(refused=1)
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    "name", [RECORD, *(f"tests.jobs.test_job_modules.{name}" for name in ("on_list", "in_wrapper"))]
)
def test_by_default_the_functions_of_modules_of_jobs_are_run(name):
    """Where an object has a function and a way to call it, the function that is checked is
    called."""
    call_job(name, [UserFactory().pk])
    assert AuditRecord.objects.count() == 1


@pytest.mark.parametrize(
    ("modules", "wide"),
    [
        (None, False),
        (["tests.kit.jobs", "tests.factories", "project.tasks"], False),
        (["tests"], True),
        (["os"], True),
        (["project"], True),
        (["django.contrib.auth"], True),
        (["django.tasks"], True),
        (["idempotency.jobs"], True),
    ],
)
def test_a_list_that_permits_more_than_jobs_is_a_warning_of_a_deploy(modules, wide, settings):
    settings.IDEMPOTENCY = {"JOB_MODULES": modules}
    found = [message.id for message in run_checks(include_deployment_checks=True)]
    assert ("idempotency.W019" in found) == wide
    assert "idempotency.W019" not in [message.id for message in run_checks()]


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        (["tests.kit.jobs"], True),
        (["rides_demo", "tests"], True),
        (["tests.kit.job"], False),
        (["rides_demo"], False),
    ],
)
def test_the_list_takes_the_place_of_the_installed_apps(modules, allowed, settings):
    settings.IDEMPOTENCY = {"JOB_MODULES": modules}
    user = UserFactory()
    if allowed:
        call_job(RECORD, [user.pk])
    else:
        with pytest.raises(JobNotAllowed, match="JOB_MODULES"):
            call_job(RECORD, [user.pk])
    assert AuditRecord.objects.count() == allowed


@pytest.mark.parametrize("backend", [RQ, "idempotency.contrib.celery.CeleryBackend"])
def test_a_module_that_exits_on_import_stops_no_other_queue(
    backend, broker, settings, tmp_path, monkeypatch
):
    """For example because the enqueuer lacks a variable of the environment that the web processes
    have."""
    (tmp_path / "jobs_that_exit.py").write_text("raise SystemExit('SHOP_KEY is not set')")
    monkeypatch.syspath_prepend(tmp_path)
    settings.IDEMPOTENCY = {
        "JOB_MODULES": ["jobs_that_exit", "rides_demo"],
        "ENQUEUERS": {"other": backend, "*": RQ},
    }
    StagedJobFactory(job_name="jobs_that_exit.job", queue="other")
    StagedJobFactory()
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    error = StagedJob.objects.get().last_error
    assert error.startswith("JobNotAllowed: ")
    assert error.endswith("SystemExit: SHOP_KEY is not set")


def test_a_default_module_of_celery_that_exits_does_not_hide_the_task_of_another(
    settings, tmp_path, monkeypatch
):
    def exit_on_import():
        raise SystemExit("SHOP_KEY is not set")

    (tmp_path / "tasks_of_a_shop.py").write_text(
        "from celery import shared_task\nfrom idempotency.contrib.celery import OnceTask\n"
        "@shared_task(base=OnceTask)\ndef receipt(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings.IDEMPOTENCY = {"JOB_MODULES": ["tasks_of_a_shop"]}
    monkeypatch.setattr(celery_app.loader, "import_default_modules", exit_on_import)
    try:
        CeleryBackend()._refuse_name("tasks_of_a_shop.receipt")
    finally:
        celery_app.tasks.pop("tasks_of_a_shop.receipt", None)


def test_the_default_modules_of_celery_are_imported_again_after_an_error_of_the_database(
    monkeypatch,
):
    """For example after the migration. Otherwise the names that they register would be unknown
    until the next restart."""
    calls = []

    def fail_once():
        calls.append(1)
        if len(calls) == 1:
            raise ProgrammingError("no such table: table_of_tomorrow")

    monkeypatch.setattr(celery_app.loader, "import_default_modules", fail_once)
    backend = CeleryBackend()
    for count, error in ((1, "table_of_tomorrow"), (2, "No Celery task"), (2, "No Celery task")):
        with pytest.raises(JobNotAllowed, match=error):
            backend._refuse_name("charge")
        assert len(calls) == count


@pytest.mark.parametrize(
    "source",
    [
        "class Unsayable(Exception):\n    def __str__(self): return None\nraise Unsayable",
        "class Lazy:\n    def __getattr__(self, name): raise RuntimeError(name)\njob = Lazy()",
    ],
)
def test_a_module_that_cannot_be_imported_stops_no_other_queue(
    source, broker, settings, tmp_path, monkeypatch
):
    (tmp_path / "jobs_of_a_shop.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jobs_of_a_shop", raising=False)
    settings.IDEMPOTENCY = {"JOB_MODULES": ["jobs_of_a_shop", "rides_demo"]}
    StagedJobFactory(job_name="jobs_of_a_shop.job", queue="other")
    StagedJobFactory()
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert StagedJob.objects.get().last_error.startswith(
        "JobNotAllowed: The job jobs_of_a_shop.job cannot be imported: "
    )


@pytest.mark.parametrize("backend", [RQ, "idempotency.contrib.celery.CeleryBackend"])
def test_a_module_whose_query_fails_on_import_stops_no_other_queue(
    backend, broker, settings, tmp_path, monkeypatch
):
    """For example because it is deployed before its migration."""
    (tmp_path / "jobs_that_query.py").write_text(QUERY)
    monkeypatch.syspath_prepend(tmp_path)
    settings.IDEMPOTENCY = {
        "JOB_MODULES": ["jobs_that_query", "rides_demo"],
        "ENQUEUERS": {"other": backend, "*": RQ},
    }
    StagedJobFactory()
    StagedJobFactory(job_name="jobs_that_query.job", queue="other")
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert "table_of_tomorrow" in StagedJob.objects.get().last_error


@pytest.mark.postgres
def test_a_module_that_hides_a_failed_query_is_imported_by_the_next_pass(
    broker, settings, tmp_path, monkeypatch
):
    monkeypatch.delitem(sys.modules, "jobs_that_hide", raising=False)
    (tmp_path / "jobs_that_hide.py").write_text(
        f"try:\n    exec({QUERY!r})\nexcept Exception: pass\ndef job(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings.IDEMPOTENCY = {"JOB_MODULES": ["jobs_that_hide", "rides_demo"]}
    StagedJobFactory()
    job = StagedJobFactory(job_name="jobs_that_hide.job")
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    StagedJob.objects.update(run_at=Now())
    assert enqueue_once() == EnqueuePass(handed_over=1)
    assert queued(broker)[1:] == [str(job.pk)]


def test_rows_staged_before_the_deploy_wait_for_one_that_allows_them(broker, settings):
    old, often = (
        StagedJobFactory(job_name=RECORD),
        StagedJobFactory(job_name=RECORD, refusals=MAX_ATTEMPTS, last_error="x"),
    )
    new = StagedJobFactory()
    settings.IDEMPOTENCY = {"JOB_MODULES": ["rides_demo.jobs"]}
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=2)
    assert queued(broker) == [str(new.pk)]
    assert set(StagedJob.objects.values_list("pk", "failed_at")) == {
        (old.pk, None),
        (often.pk, None),
    }
    assert enqueue_once() == EnqueuePass(), "they wait before they are offered again"
    settings.IDEMPOTENCY = {"JOB_MODULES": ["rides_demo.jobs", "tests.kit.jobs"]}
    StagedJob.objects.update(run_at=Now())
    assert enqueue_once() == EnqueuePass(handed_over=2)


def test_a_name_that_no_deploy_knows_within_three_days_is_given_up(broker):
    StagedJobFactory(
        job_name="tests.missing.record", refusals=_outcomes.NAME_MAX_ATTEMPTS - 1, last_error="x"
    )
    assert enqueue_once() == EnqueuePass(failed=1)
    assert "tests.missing.record" in StagedJob.objects.get().last_error


def only_errors(job):
    raise ValueError("it cannot be serialised")


@pytest.mark.parametrize(
    ("last_error", "counted"),
    [("JobNotAllowed: no deploy has it", 1), ("TypeError: JobNotAllowed:", 10)],
)
def test_refusals_of_a_name_do_not_count_towards_the_limit_of_other_errors(
    last_error, counted, settings
):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.only_errors"}}
    StagedJobFactory(refusals=MAX_ATTEMPTS - 1, last_error=last_error)
    enqueue_once()
    job = StagedJob.objects.get()
    assert (job.refusals, job.failed_at is None) == (counted, counted < MAX_ATTEMPTS)


def test_refusals_of_a_name_are_counted_together(broker):
    StagedJobFactory(
        job_name="tests.missing.record", refusals=20, last_error="JobNotAllowed: no deploy has it"
    )
    assert enqueue_once() == EnqueuePass(refused=1)
    assert StagedJob.objects.get().refusals == 21


def test_a_function_is_looked_up_once_for_all_jobs_of_a_batch(broker, monkeypatch):
    names = []

    def lookup(name):
        names.append(name)
        return function_of(name)

    function_of = jobs.function_of
    monkeypatch.setattr(jobs, "function_of", lookup)
    StagedJob.objects.bulk_create(
        StagedJobFactory.build_batch(20, job_name=RECORD) + StagedJobFactory.build_batch(20)
    )
    assert enqueue_once() == EnqueuePass(handed_over=40)
    assert sorted(names) == ["rides_demo.jobs.send_ride_receipt", RECORD]


def test_celery_takes_the_tasks_that_are_registered_whatever_their_module(broker, settings):
    settings.IDEMPOTENCY = {
        "ENQUEUERS": {"*": "idempotency.contrib.celery.CeleryBackend"},
        "JOB_MODULES": ["rides_demo.jobs"],
    }
    assert RECORD in celery_app.tasks
    with transaction.atomic():
        stage_job(RECORD, [1])
        stage_job("no.such.task")
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert StagedJob.objects.get(job_name="no.such.task").last_error.startswith("JobNotAllowed")
    assert not getattr(CeleryBackend, "runs_functions", False)
    broker.flushdb()


def take(job: StagedJob) -> None:
    """Take a job that leaves Django."""


def test_names_that_leave_django_are_names_of_their_consumer(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.take"}}
    with transaction.atomic():
        stage_job("orders.created.v1")
    assert enqueue_once() == EnqueuePass(handed_over=1)
