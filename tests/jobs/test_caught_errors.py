"""Code of the project breaks a transaction of the enqueuer and catches the error. Django then rolls
the transaction back without an error, so no job in it may count as handed over."""

import logging
import sys

import pytest
from django.db import connection, transaction
from django.db.models.signals import post_delete

from idempotency._boundary import drop_broken_connections
from idempotency.backends import MAX_ATTEMPTS, BrokerUnavailable, OneByOne
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.models import StagedJob
from rides_demo.models import User
from tests.factories import StagedJobFactory, UserFactory
from tests.kit.ageing import ago
from tests.kit.breaking import BREAKS, break_with_write, breaks_behind
from tests.kit.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)

#: The jobs that a backend got.
taken = []


@pytest.fixture(autouse=True, params=BREAKS)
def break_transaction(request, monkeypatch):
    """Set the way in which code of the project breaks a transaction."""
    monkeypatch.setattr(sys.modules[__name__], "break_now", request.param)
    return request.param


break_now = break_with_write


def write_down(job):
    """Take a job with a row of the user's table."""
    taken.append(job.pk)
    UserFactory(username=str(job.pk))
    if job.job_args.get("breaks"):
        break_now()


class BatchBackend:
    """A queue that takes a batch, in a table of the database."""

    def hand_over(self, queue, jobs):
        for job in jobs:
            write_down(job)
        return {}


class BrokerElsewhere(OneByOne):
    """A queue that is not in the database; a library around it writes all the same."""

    uses_database = False

    def hand_over_one(self, queue, job):
        write_down(job)


class ClosesConnection:
    """A queue in a table of the database, whose code closes the connection."""

    lease_seconds = 30

    def hand_over(self, queue, jobs):
        with transaction.atomic():
            UserFactory()
            connection.close()
        return {}


class ClosesConnectionElsewhere(ClosesConnection):
    """A queue that is not in the database."""

    uses_database = False


class ClosesBatch:
    """A queue that is not in the database, whose code closes the connection of the batch."""

    uses_database = False

    def hand_over(self, queue, jobs):
        taken.extend(job.pk for job in jobs)
        connection.close()
        return {}


class Unavailable:
    """A queue that takes no job, in a table of the database."""

    def hand_over(self, queue, jobs):
        break_now()
        return dict.fromkeys((job.pk for job in jobs), BrokerUnavailable("The table is locked."))


class RaisingLog(logging.Handler):
    """A log whose errors are raised."""

    def emit(self, record):
        raise OSError


class Down(BrokerElsewhere):
    """Another broker that cannot be reached."""

    def hand_over_one(self, queue, job):
        break_now()
        raise BrokerUnavailable("The broker is down.")


def lose_connection_and_broker(job):
    """Take a job, or lose both."""
    if way := job.job_args.get("breaks"):
        connection.close() if way == "close" else connection.connection.rollback()
        raise BrokerUnavailable("The broker is down.")
    taken.append(job.pk)


class OneAtATime:
    """A queue that refuses several jobs at once, and has a lease."""

    lease_seconds = 30

    def hand_over(self, queue, jobs):
        if len(jobs) > 1:
            raise ValueError("one at a time")
        taken.extend(job.pk for job in jobs)
        return {}


class LogInDatabase(logging.Handler):
    """A log that breaks the transaction, and hides the error."""

    def emit(self, record):
        break_now()


@pytest.fixture(autouse=True)
def backend(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.write_down"}}
    taken.clear()


@pytest.mark.parametrize("backend_name", ["write_down", "BatchBackend"])
def test_a_hand_over_that_was_rolled_back_is_refused(settings, backend_name):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.{backend_name}"}}
    first, breaking, last = (StagedJobFactory(job_args=args) for args in ({}, {"breaks": 1}, {}))
    assert enqueue_once() == EnqueuePass(handed_over=2, refused=1)
    refused = StagedJob.objects.get()
    assert (refused, "separate transaction.atomic()" in refused.last_error) == (breaking, True)
    assert {str(first.pk), str(last.pk)} == set(User.objects.values_list("username", flat=True))


def test_a_message_in_another_broker_is_sent_once_whatever_was_rolled_back(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.BrokerElsewhere"}}
    jobs = [StagedJobFactory(job_args=args) for args in ({}, {"breaks": 1})]
    assert enqueue_once() == EnqueuePass(handed_over=2)
    assert sorted(taken) == sorted(job.pk for job in jobs)


def test_a_job_whose_writes_were_lost_with_their_connection_stays_staged(settings):
    """The backend has a lease, so the transaction is its own."""
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.ClosesConnection"}}
    StagedJobFactory.create_batch(2, job_args={})
    assert enqueue_once().handed_over == 0
    assert (StagedJob.objects.count(), User.objects.count()) == (2, 0)


def test_messages_in_another_broker_are_sent_once_if_the_connection_is_closed(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.ClosesConnectionElsewhere"}}
    StagedJobFactory.create_batch(2, job_args={})
    assert enqueue_once() == EnqueuePass(handed_over=2)
    assert not StagedJob.objects.exists()


def test_no_other_queue_is_served_in_a_transaction_that_was_closed(settings):
    settings.IDEMPOTENCY = {
        "ENQUEUERS": {"a": f"{__name__}.ClosesBatch", "*": f"{__name__}.write_down"}
    }
    first = StagedJobFactory(job_args={}, queue="a", run_at=ago(minutes=1))
    second = StagedJobFactory(job_args={})
    # The closed session may hold its locks for a moment.
    eventually(lambda: enqueue_once() and not StagedJob.objects.exists())
    assert taken == [first.pk, second.pk]
    assert User.objects.count() == 1


def test_the_results_of_a_backend_that_took_nothing_count_whatever_was_rolled_back(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.Unavailable"}}
    StagedJobFactory(job_args={})
    with pytest.raises(BrokerUnavailable, match="The table is locked"):
        enqueue_once()
    assert StagedJob.objects.get().refusals == 0


def test_a_broker_that_is_down_refuses_no_job_whatever_was_rolled_back(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.Down"}}
    UserFactory()
    StagedJobFactory.create_batch(4, job_args={})
    with pytest.raises(BrokerUnavailable, match="The broker is down"):
        enqueue_once()
    assert set(StagedJob.objects.values_list("refusals", flat=True)) == {0}


@pytest.mark.parametrize("way", ["close", "roll back"])
def test_a_broker_and_a_transaction_that_are_lost_together_refuse_no_other_job(way, settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.lose_connection_and_broker"}}
    breaking = StagedJobFactory(job_args={"breaks": way}, run_at=ago(minutes=1))
    others = StagedJobFactory.create_batch(3, job_args={})
    eventually(lambda: enqueue_once() and StagedJob.objects.count() == 1)
    assert StagedJob.objects.get(refusals=1) == breaking
    assert sorted(taken) == sorted(job.pk for job in others)


def test_a_log_that_raises_changes_no_result_of_a_lease(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.OneAtATime"}}
    StagedJobFactory.create_batch(3, job_args={})
    logger, handler = logging.getLogger("idempotency"), RaisingLog()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        assert enqueue_once() == EnqueuePass(handed_over=3)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert len(taken) == 3


@pytest.mark.parametrize("handler", [LogInDatabase(), RaisingLog()])
def test_the_handler_of_a_log_rolls_no_batch_back(handler, settings):
    """A job of the batch fails. Its line is logged after the end of the transaction."""
    UserFactory()
    first = StagedJobFactory(job_args={})
    StagedJobFactory(job_args={}, job_name="no.such.job", queue="none", refusals=MAX_ATTEMPTS - 1)
    settings.IDEMPOTENCY = {"ENQUEUERS": {"default": f"{__name__}.write_down"}}
    logging.getLogger("idempotency").addHandler(handler)
    try:
        assert enqueue_once() == EnqueuePass(handed_over=1, failed=1)
    finally:
        logging.getLogger("idempotency").removeHandler(handler)
    assert (taken, StagedJob.objects.filter(failed_at__isnull=True).count()) == ([first.pk], 0)


def test_a_job_whose_deletion_was_rolled_back_is_not_handed_over_again(break_transaction):
    job = StagedJobFactory(job_args={})
    post_delete.connect(break_transaction)
    try:
        assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
        assert StagedJob.objects.get().last_error.startswith("NotDeleted:")
        StagedJob.objects.update(run_at=ago(minutes=1))
        enqueue_once()
    finally:
        post_delete.disconnect(break_transaction)
    assert taken == [job.pk]


class SendsOrRefuses(OneByOne):
    """Another broker that refuses the job that breaks."""

    uses_database = False

    def hand_over_one(self, queue, job):
        if job.job_args.get("breaks"):
            raise ValueError
        taken.append(job.pk)


@pytest.mark.postgres
def test_results_that_were_rolled_back_at_the_last_statement_are_written_again(settings):
    """Otherwise the same job would be sent again and again in one pass."""
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.SendsOrRefuses"}}
    sent, _ = (StagedJobFactory(job_args=args) for args in ({}, {"breaks": True}))
    with breaks_behind('UPDATE "idempotency_stagedjob"', break_now):
        assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert taken == [sent.pk]
    assert StagedJob.objects.get().refusals == 1


class LeavesOpen:
    """A queue in a table of the database, whose code forgets COMMIT."""

    lease_seconds = 30

    def hand_over(self, queue, jobs):
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")
        UserFactory()
        return {}


def test_a_batch_backend_that_leaves_a_transaction_open_has_its_jobs_refused(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.LeavesOpen"}}
    StagedJobFactory(), StagedJobFactory()
    assert enqueue_once() == EnqueuePass(refused=2)
    assert "left a transaction open on 'default'" in StagedJob.objects.first().last_error
    assert StagedJob.objects.count() == 2


@pytest.mark.postgres
@pytest.mark.parametrize(
    "way", ["lost", "half read", "half read after an error", "lost in a transaction"]
)
def test_a_connection_that_a_job_spoils_is_dropped_before_the_next_one(way):
    """psycopg's own methods note no error, and an iterator that is not read to its end holds a
    lock."""
    connection.ensure_connection()
    own = connection.connection
    connection.errors_occurred = way == "half read after an error"
    if way.startswith("half read"):
        rows = own.cursor().stream("SELECT generate_series(1, 100000)")
        next(rows)
    if way == "lost in a transaction":
        connection.set_autocommit(False)
        UserFactory()
    if way.startswith("lost"):
        own.close()
    left_open = ["default"] if way == "lost in a transaction" else []
    assert drop_broken_connections() == left_open
    assert connection.connection is not own
    assert not StagedJob.objects.exists()
