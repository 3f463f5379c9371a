"""Repeats in the process: how often, after which waits, and what the log says."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection
from django.http import HttpRequest, HttpResponse

from idempotency._engine import attempts
from idempotency._engine.errors import SessionLost, WriterBusy
from idempotency.exceptions import KeyStuck, Unavailable
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.outages import time_out_this_session
from tests.kit.serving import Sender
from tests.kit.threads import elsewhere
from tests.kit.views import over_key, phased, phased_outside

pytestmark = pytest.mark.postgres


def conflict() -> None:
    """Raise a serialization failure of PostgreSQL."""
    with connection.cursor() as cursor:
        cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$")


def time_out() -> None:
    """Let the server end the session, and use it."""
    time_out_this_session()
    conflict()


@pytest.mark.parametrize(("fail", "error"), [(conflict, Unavailable), (time_out, SessionLost)])
@pytest.mark.django_db(transaction=True)
def test_a_statement_is_repeated_as_often_as_the_setting_says(
    fail: Callable[[], None], error: type[Exception], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.IDEMPOTENCY = {"SERIALIZATION_RETRIES": 2}
    course: list[Any] = []

    def wait(attempt: int) -> float:
        course.append(attempt)
        return 0

    def write() -> None:
        course.append("write")
        fail()

    monkeypatch.setattr(attempts, "_backoff_seconds", wait)
    with pytest.raises(error):
        attempts.repeat(write, using="default")
    assert course == ["write", 1, "write", 2, "write"]


def test_the_line_of_a_repeat_names_the_key_by_its_hash(
    serve: Any, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[int] = []

    def work(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        if len(runs) == 1:
            conflict()
        return HttpResponse(status=201)

    serve(view=phased(work))
    with caplog.at_level(logging.INFO, "idempotency"):
        assert sender.send().status_code == 201
    key = IdempotencyKey.objects.get()
    (record,) = (each for each in caplog.records if "run again" in each.getMessage())
    assert f"a view of key {key.key_hash} is run again" in record.getMessage()
    assert vars(record)["key_hash"] == key.key_hash


@pytest.fixture
def one_conflict() -> Iterator[Callable[[str], None]]:
    """Return a function that lets the first UPDATE of a column of the keys get a serialization
    failure."""

    def execute(statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    execute("CREATE SEQUENCE conflicts")
    execute(
        "CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF nextval('conflicts') = 1 THEN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001';"
        " END IF; RETURN NEW; END $$"
    )
    yield lambda column: execute(
        f"CREATE TRIGGER conflict BEFORE UPDATE OF {column} ON idempotency_idempotencykey"
        " FOR EACH ROW EXECUTE FUNCTION conflict()"
    )
    execute("DROP FUNCTION conflict CASCADE")
    execute("DROP SEQUENCE conflicts")


@pytest.mark.parametrize(
    ("column", "error"), [("last_error", OSError), ("stuck_code", KeyStuck("X"))]
)
@pytest.mark.django_db(transaction=True)
def test_a_conflict_at_the_end_of_a_run_costs_no_session(
    column: str, error: Any, one_conflict: Any, serve: Any, sender: Sender
) -> None:
    """A middleware may have set up the session, and a new one may not find the key."""
    sessions: list[Any] = []

    def work(request: HttpRequest) -> HttpResponse:
        sessions.append(connection.connection)
        raise error

    serve(view=phased_outside(work))
    one_conflict(column)
    sender.send()
    assert sessions == [connection.connection]
    key = IdempotencyKey.objects.get()
    assert (key.locked_until, bool(key.stuck_code)) == (None, column == "stuck_code")


@pytest.mark.django_db(transaction=True)
def test_a_view_is_not_run_again_in_another_session(serve: Any, sender: Sender) -> None:
    """The ROLLBACK of its phase has failed, and the new session lacks what a middleware has set."""
    runs: list[int] = []

    def first() -> None:
        pid = connection.connection.info.backend_pid
        try:
            conflict()
        except DatabaseError:
            elsewhere(
                lambda: connection.cursor().execute("SELECT pg_terminate_backend(%s, 9999)", [pid])
            )
            raise

    def body(key: Any) -> None:
        runs.append(1)
        with atomic_phase(key):
            first()

    serve(view=over_key(body))
    assert sender.send().status_code == 503
    assert runs == [1]


def test_a_statement_that_waited_for_the_writer_of_sqlite_is_not_repeated() -> None:
    """Each repeat would wait as long."""
    sent: list[int] = []

    def write() -> None:
        sent.append(1)
        raise OperationalError("database is locked")

    with pytest.raises(WriterBusy):
        attempts.repeat(write, using="default")
    assert sent == [1]


def test_a_wait_may_be_shorter_than_a_second() -> None:
    assert attempts.Wait(0.9).pause()
    assert not attempts.Wait(0).pause()
