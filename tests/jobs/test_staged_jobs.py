"""What waits for the enqueuer and what it gave up on: ``backlog()``, ``manage.py staged_jobs``; a
function as a backend."""

import json
import time
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.utils import timezone

from idempotency import backends
from idempotency.enqueuer import Backlog, EnqueuePass, backlog, enqueue_once
from idempotency.models import StagedJob
from rides_demo.models import AuditRecord
from tests.factories import StagedJobFactory, UserFactory
from tests.kit.jobs import take

pytestmark = pytest.mark.django_db(transaction=True)


def failed(**values):
    return StagedJobFactory(
        failed_at=timezone.now(), refusals=10, last_error="ValueError: it cannot", **values
    )


def test_the_backlog_is_measured_from_when_jobs_were_due():
    assert backlog() == Backlog(oldest_seconds=0.0, due_jobs=0, failed_jobs=0)
    StagedJobFactory(run_at=timezone.now() - timedelta(minutes=5))
    StagedJobFactory()
    StagedJobFactory(run_at=timezone.now() + timedelta(hours=1))
    failed(run_at=timezone.now() - timedelta(days=1))
    waiting = backlog()
    assert (waiting.due_jobs, waiting.failed_jobs) == (2, 1)
    assert 300 <= waiting.oldest_seconds < 330


def test_stats_are_one_line_or_json(capsys):
    failed()
    call_command("staged_jobs", "stats")
    assert capsys.readouterr().out == "staged_jobs: 0 due, the oldest for 0.0 s, 1 failed\n"
    call_command("staged_jobs", "stats", "--json")
    wanted = {"oldest_seconds": 0.0, "due_jobs": 0, "failed_jobs": 1}
    assert json.loads(capsys.readouterr().out) == wanted


def test_list_shows_failed_jobs_first_with_their_errors(capsys):
    waiting, given_up = StagedJobFactory(), failed(job_name="shop.jobs.poison")
    call_command("staged_jobs", "list")
    first, second = capsys.readouterr().out.splitlines()
    assert (
        first
        == f"failed  {given_up.pk}  0 hand-overs  10 refusals  {given_up.queue}  shop.jobs.poison "
        " ValueError: it cannot"
    )
    assert second.startswith("due ")
    assert str(waiting.pk) in second
    call_command("staged_jobs", "list", "--failed", "--limit", "5")
    assert capsys.readouterr().out.splitlines() == [first]


def test_list_prints_nothing_on_which_a_terminal_acts(capsys):
    StagedJobFactory(
        failed_at=timezone.now(), last_error="ValueError: \x1b[2Jgone\x07 ü", queue="a\x1bb"
    )
    call_command("staged_jobs", "list")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isprintable()
    assert line.endswith("ValueError: \\x1b[2Jgone\\x07 ü")


def test_retry_makes_a_failed_job_due_again(capsys, settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": "tests.kit.jobs.take"}}
    job, other = failed(job_name="shop.jobs.mended", job_args=[UserFactory().pk]), failed()
    call_command("staged_jobs", "retry", str(job.pk))
    assert capsys.readouterr().out == "staged_jobs: 1 made due again\n"
    assert enqueue_once() == EnqueuePass(handed_over=1)
    assert AuditRecord.objects.count() == 1
    assert StagedJob.objects.get() == other


def test_purge_deletes_failed_jobs_alone(capsys):
    failed()
    failed()
    waiting = StagedJobFactory()
    with pytest.raises(CommandError, match="1 of the ids are not failed jobs"):
        call_command("staged_jobs", "purge", str(waiting.pk))
    call_command("staged_jobs", "purge", "--all")
    assert capsys.readouterr().out.endswith("staged_jobs: 2 deleted\n")
    assert StagedJob.objects.get() == waiting


@pytest.mark.parametrize(
    "arguments", [[], ["retry"], ["purge", "not-an-id"], ["purge", "--all", "x"], ["unknown"]]
)
def test_a_wrong_argument_changes_nothing(arguments, capsys):
    failed()
    with pytest.raises((SystemExit, CommandError)):
        call_command("staged_jobs", *arguments)
    assert StagedJob.objects.get().failed_at


def test_a_function_is_a_backend(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": "tests.kit.jobs.take"}}
    user = UserFactory()
    StagedJobFactory(job_args=[user.pk])
    StagedJobFactory(job_name="shop.jobs.poison")
    assert enqueue_once() == EnqueuePass(handed_over=1, refused=1)
    assert AuditRecord.objects.count() == 1
    assert StagedJob.objects.get().last_error == "ValueError: it cannot be serialised"


def stage_three():
    user = UserFactory()
    for _ in range(3):
        StagedJobFactory(job_args=[user.pk])


def take_slowly(job):
    """Take a job later than the time limit of a batch."""
    take(job)
    time.sleep(0.01)


def test_a_slow_broker_that_takes_each_job_gets_all_of_them_in_several_batches(
    settings, monkeypatch
):
    """Otherwise the transaction would outlive the database's patience. No broker is unavailable, so
    the pass does not fail."""
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.take_slowly"}}
    monkeypatch.setattr(backends, "BATCH_SECONDS", 0)
    stops = []
    stage_three()
    assert enqueue_once(stop=lambda: bool(stops.append(StagedJob.objects.count()))) == EnqueuePass(
        handed_over=3
    )
    assert stops == [3, 2, 1, 0], "one job in each batch"
    assert AuditRecord.objects.count() == 3


def test_a_job_that_was_not_offered_is_not_refused(settings, monkeypatch):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.take_slowly"}}
    monkeypatch.setattr(backends, "BATCH_SECONDS", 0)
    stage_three()
    answers = iter([False, True])
    assert enqueue_once(stop=lambda: next(answers)) == EnqueuePass(handed_over=1)
    due = StagedJob.objects.filter(run_at__lte=timezone.now())
    assert list(due.values_list("refusals", "hand_overs", "last_error")) == [(0, 0, "")] * 2


class IdleBackend:
    """A backend that offers no job."""

    def hand_over(self, queue, jobs):
        return {job.pk: backends.NotOffered() for job in jobs}


def test_a_backend_that_offers_nothing_ends_the_pass(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.IdleBackend"}}
    stage_three()
    with pytest.raises(backends.BrokerUnavailable, match="offered none of"):
        enqueue_once()
    assert set(StagedJob.objects.values_list("refusals", flat=True)) == {0}
