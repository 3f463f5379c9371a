"""Limits of time and outages: a run that a limit ended counts as a try, a run without a database
does not."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import Retry as CeleryRetry
from django.db import Error, connection
from rq import Retry
from rq.job import Job

from idempotency.contrib.celery import OnceTask
from idempotency.contrib.rq import RQBackend, run_once
from idempotency.enqueuer import enqueue_once
from idempotency.exceptions import MessageInProgress
from idempotency.inbox import process_once
from idempotency.models import ProcessedMessage
from rides_demo.models import AuditRecord
from tests.factories import StagedJobFactory, UserFactory
from tests.kit.brokers import Rq
from tests.kit.celery_app import app
from tests.kit.database import session_setting
from tests.kit.outages import allow_connections, writable_at_the_end
from tests.kit.threads import Gate, background
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

JOB_ID = "00000000-0000-7000-8000-000000000001"


def query_for_long() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(10)")


def work_for_long() -> None:
    threading.Event().wait(0.5)  # Longer than the limit, after which the server ends the session.
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def exceed_temporary_files() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL temp_file_limit = 0; SET LOCAL work_mem = '64kB'")
        cursor.execute(
            "SELECT count(*) FROM (SELECT g FROM generate_series(1, 200000) AS g ORDER BY g DESC)"
            " AS s"
        )


def use_a_closed_cursor() -> None:
    with connection.cursor() as cursor:
        pass
    cursor.execute("SELECT 1")


def lose_the_connection() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


def run_by_rq(job: Callable[[], None]) -> bool:
    """Run the job in the worker function of RQ. Return whether the run counts as a try."""
    try:
        asked = run_once(f"{__name__}.{job.__name__}", {}, JOB_ID)
    except Error:
        return True
    assert isinstance(asked, Retry)
    assert asked.max > 1000
    return False


def run_by_celery(job: Callable[[], None]) -> bool:
    """Run the job as a task without further tries. Return whether the run counts as a try."""
    task = app.task(job, base=OnceTask, name=f"tests.limits.{job.__name__}", max_retries=0)
    task.push_request(id=JOB_ID, called_directly=False, retries=0, is_eager=True)
    try:
        with pytest.raises((Error, CeleryRetry)) as raised:
            task()
    finally:
        task.pop_request()
    return raised.type is not CeleryRetry


WORKERS = [run_by_rq, run_by_celery]


@pytest.mark.parametrize("run", WORKERS)
@pytest.mark.parametrize(
    ("job", "limit"),
    [
        (query_for_long, "statement_timeout"),
        (query_for_long, "transaction_timeout"),
        (work_for_long, "transaction_timeout"),
        (work_for_long, "idle_in_transaction_session_timeout"),
        (exceed_temporary_files, "statement_timeout"),
        (use_a_closed_cursor, "statement_timeout"),
    ],
)
def test_a_run_that_a_limit_ends_counts_as_a_try(
    run: Callable[[Callable[[], None]], bool], job: Callable[[], None], limit: str
) -> None:
    """It would exceed the limit again, so without a limit of tries it would be retried for ever."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_settings WHERE name = %s", [limit])
        if not cursor.fetchone()[0]:
            pytest.skip("this server has no transaction_timeout")
        cursor.execute(f"SET {limit} = 200")
    try:
        assert run(job)
    finally:
        connection.close()
    assert not ProcessedMessage.objects.exists()


@pytest.mark.parametrize("run", WORKERS)
def test_a_run_whose_connection_is_lost_is_no_try(
    run: Callable[[Callable[[], None]], bool],
) -> None:
    assert not run(lose_the_connection)
    with writable_at_the_end():
        allow_connections(False)
        assert not run(lose_the_connection)


@pytest.mark.processes
def test_a_job_of_rq_outlives_an_outage_of_the_database(broker: Any, tmp_path: Path) -> None:
    """The staged row is gone, and RQ keeps the job only while it has tries left. The job also asks
    for a second run itself."""
    arguments = [UserFactory().pk, str(tmp_path / "mark")]
    job = StagedJobFactory(job_name="tests.kit.jobs.record_after_a_retry", job_args=arguments)
    enqueue_once()
    queue = Rq(broker)
    with queue.working(), writable_at_the_end():
        allow_connections(False)
        eventually(lambda: len(Job.fetch(str(job.pk), broker).results()) >= 3, 60)
        assert Job.fetch(str(job.pk), broker).retries_left == RQBackend.retry.max
        allow_connections(True)
        connection.close()
        eventually(AuditRecord.objects.exists, 60)
    assert AuditRecord.objects.count() == 1


@pytest.mark.parametrize("limit", ["statement_timeout", "lock_timeout", "transaction_timeout"])
def test_a_delivery_that_waits_longer_than_the_role_may_is_in_progress(limit: str) -> None:
    """It is refused so that it comes back, in place of an error that a queue counts and that a
    webhook answers with 500."""
    gate = Gate()

    def first() -> None:
        with process_once("stripe", "evt_1"):
            gate.wait_here()

    with background(first):
        gate.wait_until_reached()
        try:
            with (
                session_setting(limit, "200"),
                pytest.raises(MessageInProgress),
                process_once("stripe", "evt_1"),
            ):
                pass
        finally:
            gate.open()
    with process_once("stripe", "evt_1") as again:
        assert not again
