"""The connections to other databases that a hand-over uses: the state in which one job leaves them
fails no other job."""

from contextvars import ContextVar

import pytest
from django.db import connection, connections, transaction

from idempotency import _prompt
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.jobs import stage_job
from idempotency.models import StagedJob
from tests.factories import StagedJobFactory
from tests.kit.loops import looping
from tests.kit.threads import elsewhere
from tests.kit.waiting import eventually
from tests.models import Entry

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.django_db(transaction=True, databases=["default", "shard_b"]),
]


def end_sessions_of_shard_b():
    """End all sessions of the other database, as its restart does."""
    name = connections["shard_b"].settings_dict["NAME"]

    def end():
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s",
                [name],
            )

    elsewhere(end)


def lose_connection():
    end_sessions_of_shard_b()
    entered()


def leave_autocommit_off():
    connections["shard_b"].set_autocommit(False)


def begin():
    with connections["shard_b"].cursor() as cursor:
        cursor.execute("BEGIN")


def enter(job):
    """Take a job, as a queue whose table is in another database does."""
    for action in (lose_connection, leave_autocommit_off, begin):
        if job.job_name.endswith(action.__name__):
            entered()  # Opens the connection, if it is closed.
            action()
    Entry.objects.using("shard_b").create(name=str(job.pk))


def entered():
    return set(Entry.objects.using("shard_b").values_list("name", flat=True))


@pytest.fixture(autouse=True)
def settings_of_project(settings, monkeypatch):
    """Let the backend be ``enter``, in a project with persistent connections."""
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.enter"}}
    monkeypatch.setitem(connections["shard_b"].settings_dict, "CONN_MAX_AGE", None)
    yield settings
    connections["shard_b"].close()


@pytest.mark.parametrize("action", [lose_connection, leave_autocommit_off, begin])
def test_what_one_hand_over_does_to_a_connection_refuses_only_its_own_job(action):
    first, later = (
        StagedJobFactory(job_name=f"jobs.{action.__name__}"),
        StagedJobFactory.create_batch(3),
    )
    assert enqueue_once() == EnqueuePass(handed_over=3, refused=1)
    assert StagedJob.objects.get().pk == first.pk
    assert elsewhere(entered) == {str(job.pk) for job in later}


TENANT = ContextVar("tenant", default="none")
tenants = []


def enter_for_tenant(job):
    tenants.append(TENANT.get())
    TENANT.set(str(job.pk))


def test_a_hand_over_inherits_no_context_of_the_one_before(settings):
    settings.IDEMPOTENCY = {"ENQUEUERS": {"*": f"{__name__}.enter_for_tenant"}}
    tenants.clear()
    for queue in ("default", "default", "other"):
        StagedJobFactory(queue=queue)
    assert enqueue_once() == EnqueuePass(handed_over=3)
    assert [*tenants, TENANT.get()] == ["none"] * 4


def test_a_connection_that_was_lost_between_two_passes_refuses_no_job():
    for _ in range(2):
        StagedJobFactory()
        assert enqueue_once() == EnqueuePass(handed_over=1)
        end_sessions_of_shard_b()


def test_a_connection_that_is_lost_in_each_batch_of_a_long_pass_refuses_one_job_in_each():
    """Under a backlog, a pass of the loop does not end."""
    for _ in range(3):
        StagedJobFactory(job_name="jobs.lose_connection")
        StagedJobFactory.create_batch(4)
    counts = []
    with looping(lambda **given: enqueue_once(batch_size=5, **given), say=counts.append):
        eventually(lambda: sum(found.refused for found in counts) == 3)
    assert sum(found.handed_over for found in counts) == 12


def test_a_thread_that_hands_over_after_commit_opens_a_lost_connection_again(
    settings_of_project, monkeypatch
):
    settings_of_project.IDEMPOTENCY = settings_of_project.IDEMPOTENCY | {
        "HAND_OVER_AFTER_COMMIT": True
    }
    monkeypatch.setattr(_prompt, "LINGER_SECONDS", 1)
    for number in range(1, 4):
        with transaction.atomic():
            stage_job("tests.kit.jobs.anything")
        eventually(lambda: not StagedJob.objects.exists())
        assert len(elsewhere(entered)) == number
        end_sessions_of_shard_b()
    _prompt._movers["default"].join(60)
