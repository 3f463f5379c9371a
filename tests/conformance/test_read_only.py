"""Number 52: a database that takes no writes: a standby, and a primary that was made read-only."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from idempotency.models import IdempotencyKey
from tests.kit.outages import make_read_only, writable_at_the_end
from tests.kit.servers import Standby
from tests.kit.serving import Sender, View, problem
from tests.kit.views import Counted, both_kinds, create, phased, plain, two_phases
from tests.kit.waiting import eventually
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]

pytestmark = pytest.mark.postgres


def is_unavailable(answer: HttpResponse) -> bool:
    """Whether the answer sends its client round again."""
    told = problem(answer)
    return (answer.status_code, told["code"], told["retryable"]) == (
        503,
        "database_unavailable",
        True,
    ) and (int(answer["Retry-After"]) >= 1)


def execute(statement: str) -> Any:
    """Run a statement on the connection of this thread."""
    with connection.cursor() as cursor:
        cursor.execute(statement)


def write(request: HttpRequest) -> HttpResponse:
    """Write an entry that points at no key."""
    Entry.objects.create(name="made")
    return HttpResponse(status=201)


@pytest.fixture(autouse=True)
def _writable_again(transactional_db: None) -> Iterator[None]:
    with writable_at_the_end():
        yield


@both_kinds
def test_52_request_to_a_read_only_database_is_a_503_and_the_view_does_not_run(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work := Counted(), scope=lambda request: "one"))
    assert sender.send(key="old").status_code == 201
    make_read_only(True)
    assert is_unavailable(sender.send())
    assert work.runs == 1
    make_read_only(False)
    assert [sender.send(key=key).status_code for key in ("key-1", "old")] == [201, 201]
    assert Entry.objects.count() == 2


@both_kinds
def test_52_read_only_connection_is_not_used_again(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(Counted(), scope=lambda request: "one"))
    execute("SET default_transaction_read_only = on")
    assert is_unavailable(sender.send())
    assert sender.send().status_code == 201


def test_52_database_made_read_only_between_two_phases_is_a_503_and_the_retry_resumes(
    serve: Serve, sender: Sender
) -> None:
    calls = Counted(
        lambda request: (
            execute("SET default_transaction_read_only = on") if calls.runs == 1 else None
        )
    )
    serve(view=two_phases(first := Counted(), write, call=partial(calls, None)))
    assert is_unavailable(sender.send())
    assert sender.send().status_code == 201
    assert (first.runs, calls.runs, Entry.objects.count()) == (1, 2, 2)


@both_kinds
def test_52_view_that_chooses_a_read_only_transaction_and_writes_is_a_server_error(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponseBase:
        execute("SET TRANSACTION READ ONLY")
        return create(request)

    serve(view=kind(work))
    assert sender.send().status_code == 500
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.in_flight().exists()


@pytest.fixture
def standby(short_folder: Path, transactional_db: None) -> Iterator[Standby]:
    """Run a standby of the server that the tests use."""
    if "RIDES_TEST_POSTGRES" not in os.environ:
        pytest.skip("the server is not the tests' own")
    connection.ensure_connection()
    server = Standby(short_folder / "standby", Path(connection.connection.info.host))
    server.start()
    yield server
    server.stop()


def test_52_standby_is_a_503_until_it_is_promoted(
    serve: Serve, sender: Sender, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {
        "plain": plain,
        "serializable": partial(plain, isolation="serializable"),
        "phased": phased,
    }
    serve(**{name: kind(Counted(), scope=lambda request: "one") for name, kind in kinds.items()})
    urls = [f"/{name}/" for name in kinds]
    assert [sender.send(url, key=f"{url}-old").status_code for url in urls] == [201] * 3
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_wal_lsn()::text")
        (written,) = cursor.fetchone()
    eventually(lambda: standby.execute(f"SELECT pg_last_wal_replay_lsn() >= '{written}'"))
    connection.close()
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "HOST", str(standby.sockets))
        for url in urls:
            assert is_unavailable(sender.send(url, key=f"{url}-new"))
            assert is_unavailable(sender.send(url, key=f"{url}-old"))
        standby.execute("SELECT pg_promote()")
        assert [
            sender.send(url, key=f"{url}-{which}").status_code
            for url in urls
            for which in ("new", "old")
        ] == [201] * 6
        assert Entry.objects.count() == 6
        connection.close()
