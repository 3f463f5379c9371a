"""CONFIRM_REPLICATED with standbys: one that does not exist, one that is cut off, and one that
answers.

The servers are copies of the tests' own server, so that they have its tables.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest
from django.conf import settings as django_settings
from django.db import OperationalError, connection, transaction
from django.http import HttpRequest, HttpResponse
from pytest_django import Settings

from idempotency._engine import replication
from idempotency._engine.claims import claim_by_id
from idempotency.enqueuer import enqueue_once
from idempotency.exceptions import NotReplicated
from idempotency.inbox import process_once
from idempotency.models import IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.monitoring.doctor import diagnose
from rides_demo.processes.embedded import socket_folder
from tests.factories import IdempotencyKeyFactory, StagedJobFactory
from tests.kit.servers import Standby
from tests.kit.serving import Sender, View, another_client, problem
from tests.kit.threads import WAIT_SECONDS, Gate, in_background
from tests.kit.views import Counted, both_kinds, create, phased, plain, two_phases
from tests.kit.waiting import eventually
from tests.models import Entry

pytestmark = [pytest.mark.postgres, pytest.mark.processes, pytest.mark.django_db(transaction=True)]

Kind = Callable[..., View]
Serve = Callable[..., None]

#: Cancel the waits of all sessions, or terminate the sessions.
END_WAITS = "SELECT count(pg_{}_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="t", dir=django_settings.TEST_FOLDER))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def server(folder: Path, django_db_setup: None) -> Iterator[Standby]:
    """Run a server of this module with the database of the tests, without synchronous standbys."""
    if "RIDES_TEST_POSTGRES" not in os.environ:
        pytest.skip("the server is not the tests' own")
    copy = Standby(folder / "primary", socket_folder(django_settings.TEST_FOLDER / "postgres"))
    copy.start()
    copy.execute("SELECT pg_promote()")
    yield copy
    copy.stop()


@pytest.fixture
def primary(
    server: Standby, transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Standby]:
    """Let the connections of the test go to the server of this module; it waits for no standby at
    the end."""
    connection.close()
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "HOST", str(server.sockets))
        yield server
        wait_for(server, "")
        for model in (Entry, IdempotencyKey, ProcessedMessage, StagedJob):
            model.objects.all().delete()
        connection.close()


@pytest.fixture
def confirming(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.IDEMPOTENCY = {"CONFIRM_REPLICATED": True}
    monkeypatch.setattr(replication, "DEADLINE_SECONDS", 0.5)


@pytest.fixture
def client(primary: Standby) -> Sender:
    """Return a client whose user is on the server of this module."""
    return Sender()


def wait_for(server: Standby, names: str) -> None:
    """Let the commits of a server wait for the standbys with these names; ``nobody`` is none of
    them."""
    server.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    server.execute("SELECT pg_reload_conf()")
    if names == "*":
        eventually(lambda: server.execute("SELECT sync_state FROM pg_stat_replication") == "sync")
    else:
        # The checkpointer puts the names into effect, later than a session shows them.
        eventually(lambda: a_commit_waits(server) is bool(names))


def a_commit_waits(server: Standby) -> bool:
    """Return whether a commit of nothing waits for a standby; its wait is cancelled."""
    commit = in_background(
        lambda: server.execute("SELECT pg_logical_emit_message(true, 'test', '')")
    )
    eventually(lambda: commit.done() or waiting(server))
    waits = not commit.done()
    while not commit.done():
        cancel(server)
    return waits


def waiting(server: Standby) -> list[int]:
    """Return the sessions whose commit waits for a standby."""
    pids: list[int] = (
        server.execute("SELECT array_agg(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        or []
    )
    return pids


def cancel(server: Standby, end: str = "cancel") -> None:
    """Cancel the waits of all sessions, or ``terminate`` the sessions."""
    server.execute(END_WAITS.format(end))


def is_unconfirmed(answer: HttpResponse) -> bool:
    return (answer.status_code, problem(answer)["code"]) == (503, "not_replicated") and int(
        answer["Retry-After"]
    ) >= 1


class Held:
    """Work that waits at a gate before it returns, so that the test can change what its COMMIT
    waits for."""

    def __init__(self) -> None:
        self.gate = Gate()

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = create(request)
        self.gate.wait_here()
        return response


def end_in_a_cancelled_wait(
    client: Sender, held: Held, primary: Standby, end: str = "cancel"
) -> HttpResponse:
    """Send a request, cancel the wait of its last COMMIT, or ``terminate`` its session, and return
    its answer."""
    running = in_background(another_client(client).send)
    held.gate.wait_until_reached()
    wait_for(primary, "nobody")
    held.gate.open()
    eventually(lambda: waiting(primary))
    cancel(primary, end)
    return running.result(WAIT_SECONDS)


@both_kinds
def test_a_replay_that_no_standby_confirms_is_a_503_at_the_deadline(
    kind: Kind, serve: Serve, client: Sender, primary: Standby, confirming: None
) -> None:
    serve(view=kind(Counted()))
    assert client.send().status_code == 201
    wait_for(primary, "nobody")
    assert is_unconfirmed(client.send())
    eventually(lambda: not waiting(primary))  # No session is left behind.


@pytest.mark.sample
@both_kinds
def test_a_cancelled_wait_is_no_success_and_its_retry_is_none_either(
    kind: Kind, serve: Serve, client: Sender, primary: Standby, confirming: None, settings: Settings
) -> None:
    serve(view=kind(work := Counted(held := Held())))
    assert is_unconfirmed(end_in_a_cancelled_wait(client, held, primary))
    assert Entry.objects.count() == 1  # A failover would lose it.
    assert is_unconfirmed(client.send())
    settings.IDEMPOTENCY = {}
    again = client.send()
    assert (again.status_code, again["Idempotent-Replayed"], work.runs) == (201, "true", 1)


@both_kinds
def test_without_the_setting_a_cancelled_wait_passes_for_a_success(
    kind: Kind, serve: Serve, client: Sender, primary: Standby
) -> None:
    serve(view=kind(held := Held()))
    assert end_in_a_cancelled_wait(client, held, primary).status_code == 201


@pytest.mark.parametrize(
    ("end", "confirm", "code"),
    [
        ("cancel", True, "not_replicated"),
        ("terminate", True, "database_unavailable"),
        ("terminate", False, "database_unavailable"),
    ],
)
def test_a_claim_whose_wait_was_cut_short_is_released(
    end: str,
    confirm: bool,
    code: str,
    serve: Serve,
    client: Sender,
    primary: Standby,
    settings: Settings,
) -> None:
    settings.IDEMPOTENCY = {"CONFIRM_REPLICATED": confirm}
    serve(view=two_phases(first := Counted(), lambda request: HttpResponse(status=201)))
    wait_for(primary, "nobody")
    running = in_background(another_client(client).send)
    eventually(lambda: waiting(primary))
    cancel(primary, end)
    answer = running.result(WAIT_SECONDS)
    assert (answer.status_code, problem(answer)["code"]) == (503, code)
    assert (IdempotencyKey.objects.in_flight().count(), first.runs) == (1, 0)
    wait_for(primary, "")
    eventually(lambda: not IdempotencyKey.objects.in_flight().exists())
    assert client.send().status_code == 201


def test_a_claim_of_the_completer_whose_wait_was_cut_short_is_released(
    client: Sender, primary: Standby
) -> None:
    key = IdempotencyKeyFactory()
    wait_for(primary, "nobody")
    running = in_background(lambda: claim_by_id(key.pk, delay_seconds=60, using="default"))
    eventually(lambda: waiting(primary))
    primary.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    )
    with pytest.raises(OperationalError):
        running.result(WAIT_SECONDS)
    assert IdempotencyKey.objects.in_flight().exists()
    wait_for(primary, "")
    eventually(lambda: not IdempotencyKey.objects.in_flight().exists())


@pytest.mark.parametrize("end", ["cancel", "terminate"])
def test_a_run_whose_last_commit_is_not_confirmed_is_released_where_it_is_lost(
    end: str, serve: Serve, client: Sender, primary: Standby, confirming: None
) -> None:
    held, locked = Held(), []

    def second(request: HttpRequest) -> HttpResponse:
        locked.append(IdempotencyKey.objects.get())
        return held(request)

    serve(view=two_phases(lambda request: None, second))
    assert end_in_a_cancelled_wait(client, held, primary, end).status_code == 503
    assert IdempotencyKey.objects.finished().exists()
    # As after a failover to a server that has all but the last commit.
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = local")
    locked[0].save()
    Entry.objects.all().delete()
    assert IdempotencyKey.objects.in_flight().exists()
    wait_for(primary, "")
    eventually(lambda: not IdempotencyKey.objects.in_flight().exists())
    assert client.send().status_code == 201


@pytest.mark.parametrize("outer", [nullcontext, transaction.atomic])
def test_a_message_whose_commit_is_not_confirmed_is_delivered_again(
    outer: Callable[[], AbstractContextManager[None]],
    client: Sender,
    primary: Standby,
    confirming: None,
    settings: Settings,
) -> None:
    def deliver() -> bool:
        with outer(), process_once("stripe", "evt_1") as first:
            return first

    wait_for(primary, "nobody")
    delivery = in_background(deliver)
    eventually(lambda: waiting(primary))
    cancel(primary)
    for unconfirmed in (lambda: delivery.result(WAIT_SECONDS), deliver):
        with pytest.raises(NotReplicated):
            unconfirmed()
    settings.IDEMPOTENCY = {}
    assert not deliver()


#: The jobs that the slow backend got, and what it does meanwhile.
taken: list[object] = []
meanwhile: list[Callable[[], object]] = []


def take_slowly(job: StagedJob) -> None:
    """Take a job."""
    taken.append(job.pk)
    for act in meanwhile:
        act()


take_slowly.lease_seconds = 600  # type: ignore[attr-defined]


@pytest.fixture
def leased(primary: Standby, settings: Settings) -> Iterator[StagedJob]:
    """Yield a staged job, whose backend has a lease. Without a standby, its commits pass."""
    backends = {"*": f"{__name__}.take_slowly"}
    settings.IDEMPOTENCY = {"CONFIRM_REPLICATED": "storage", "ENQUEUERS": backends}
    taken.clear()
    StagedJobFactory()
    yield StagedJob.objects.get()
    meanwhile.clear()


def test_a_job_that_no_standby_confirms_is_not_claimed(leased: StagedJob, primary: Standby) -> None:
    wait_for(primary, "nobody")
    with pytest.raises(NotReplicated):
        enqueue_once()
    assert (taken, StagedJob.objects.get().run_at) == ([], leased.run_at)


def test_a_claim_that_is_not_confirmed_is_not_handed_over(
    leased: StagedJob, primary: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirm, is_set = replication.confirm, threading.Event()

    def then_nobody(using: str) -> None:
        confirm(using)
        wait_for(primary, "nobody")
        is_set.set()

    with monkeypatch.context() as patch:
        patch.setattr(replication, "confirm", then_nobody)
        running = in_background(enqueue_once)
        assert is_set.wait(WAIT_SECONDS)  # The function above has waits of its own.
        eventually(lambda: waiting(primary))
        cancel(primary)
        with pytest.raises(NotReplicated):
            running.result(WAIT_SECONDS)
    assert taken == []
    assert StagedJob.objects.get().run_at > leased.run_at, "due again at the end of the lease"


@pytest.mark.parametrize("end", ["cancel", "terminate"])
@pytest.mark.parametrize("after", ["on the same server", "after a failover"])
def test_a_job_whose_result_is_not_confirmed_is_handed_over_once(
    end: str, after: str, leased: StagedJob, primary: Standby
) -> None:
    rows, is_set = list[StagedJob](), threading.Event()
    meanwhile.append(lambda: rows.append(StagedJob.objects.get()))
    meanwhile.append(lambda: wait_for(primary, "nobody"))
    meanwhile.append(is_set.set)
    running = in_background(enqueue_once)
    assert is_set.wait(WAIT_SECONDS)
    eventually(lambda: waiting(primary))
    cancel(primary, end)
    with pytest.raises((NotReplicated, OperationalError)):
        running.result(WAIT_SECONDS)
    wait_for(primary, "")
    if after == "after a failover":  # The new server has all but the last commit.
        rows[0].save(force_insert=True)
    enqueue_once()
    assert (taken, StagedJob.objects.count()) == ([leased.pk], 0)


@pytest.fixture
def standby(primary: Standby, folder: Path) -> Iterator[Standby]:
    """Run a synchronous standby of the server of this module."""
    server = Standby(folder / "standby", primary.sockets)
    server.start()
    wait_for(primary, "*")
    yield server
    server.stop()


@contextmanager
def cut_off(standby: Standby) -> Iterator[None]:
    """Let the standby receive nothing in the block."""
    (receiver,) = [
        child
        for child in psutil.Process(standby.pid).children()
        if "walreceiver" in " ".join(child.cmdline())
    ]
    receiver.suspend()
    try:
        yield
    finally:
        receiver.resume()


def test_a_replay_needs_a_standby_that_answers(
    serve: Serve, client: Sender, standby: Standby, confirming: None
) -> None:
    serve(plain=plain(Counted()), phased=phased(Counted()))
    urls = ("/plain/", "/phased/")
    first = [client.send(url, key=url) for url in urls]
    assert [answer.status_code for answer in first] == [201, 201]
    assert [client.send(url, key=url).content for url in urls] == [
        answer.content for answer in first
    ]
    with cut_off(standby):
        assert all(is_unconfirmed(client.send(url, key=url)) for url in urls)
    assert [client.send(url, key=url)["Idempotent-Replayed"] for url in urls] == ["true", "true"]


def test_the_doctor_finds_a_commit_that_does_not_wait_for_the_disk_of_the_standby(
    client: Sender, standby: Standby
) -> None:
    found = {}
    for value in ("local", "remote_write", "on", "remote_apply"):
        with connection.cursor() as cursor:
            cursor.execute(f"SET synchronous_commit = {value}")
        found[value] = "not_replicated" in {finding.code for finding in diagnose().findings}
    assert found == {"local": True, "remote_write": True, "on": False, "remote_apply": False}
