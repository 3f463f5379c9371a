"""A view whose transaction PostgreSQL ends at a time limit: what its client and the log are
told."""

from collections.abc import Callable

import pytest
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from pytest_django import Settings

from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender, View, problem
from tests.kit.threads import elsewhere
from tests.kit.views import Counted, both_kinds, create, plain
from tests.kit.waiting import eventually
from tests.models import Entry

pytestmark = pytest.mark.postgres
Kind = Callable[..., View]
Serve = Callable[..., None]
Work = Callable[[HttpRequest], HttpResponseBase]


def session() -> int:
    """Return the id of the server process of this thread, also behind a pooler."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    return int(pid)


def wait_until_the_session_is_ended() -> None:
    """Send nothing until PostgreSQL has ended the session of this thread."""
    pid = session()

    def is_gone() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [pid])
            return cursor.fetchone() == (0,)

    elsewhere(lambda: eventually(is_gone))


def write(request: HttpRequest) -> HttpResponseBase:
    """Write after the limit."""
    wait_until_the_session_is_ended()
    return create(request)


def return_a_response(request: HttpRequest) -> HttpResponseBase:
    """Send no statement after the limit."""
    Entry.objects.create(name="before")
    wait_until_the_session_is_ended()
    return HttpResponse(status=201)


def catch(request: HttpRequest) -> HttpResponseBase:
    """Catch the first error, and meet the closed connection while it is handled."""
    wait_until_the_session_is_ended()
    try:
        return create(request)
    except DatabaseError:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        raise


def run_into_the_limit(work: Work) -> Counted:
    """Return work whose first run is ``work``."""
    counted = Counted(lambda request: work(request) if counted.runs == 1 else create(request))
    return counted


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "one by one"])
@pytest.mark.parametrize("work", [write, return_a_response, catch])
@both_kinds
def test_a_view_that_sends_no_statement_for_too_long_is_told_so(
    kind: Kind, work: Work, merged: bool, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"MERGE_ROUND_TRIPS": merged}
    serve(view=kind(run_into_the_limit(work)))
    with connection.cursor() as cursor:
        cursor.execute("SET idle_in_transaction_session_timeout = '100ms'")
    answer = sender.send()
    told = problem(answer)
    assert (answer.status_code, told["code"], told["retryable"]) == (
        503,
        "time_limit_exceeded",
        False,
    )
    assert "Retry-After" not in answer
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.in_flight().exists()
    assert sender.send().status_code == 201
    assert Entry.objects.count() == 1


def test_the_log_names_the_view_and_the_limit(
    serve: Serve, sender: Sender, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.IDEMPOTENCY = {"LOCK_TIMEOUT_SECONDS": 1}
    serve(view=plain(run_into_the_limit(write)))
    assert problem(sender.send())["code"] == "time_limit_exceeded"
    (line,) = [
        record
        for record in caplog.records
        if record.name == "idempotency" and record.levelname == "ERROR"
    ]
    for named in (
        "tests.kit.views.Counted",
        "idle_in_transaction_session_timeout",
        "LOCK_TIMEOUT_SECONDS",
    ):
        assert named in line.getMessage()


@both_kinds
def test_a_limit_of_the_role_is_named(
    kind: Kind, serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    with connection.cursor() as cursor:
        # The second is new in PostgreSQL 17.
        names = ["idle_in_transaction_session_timeout", "transaction_timeout"]
        cursor.execute("SELECT name FROM pg_settings WHERE name = ANY(%s)", [names])
        known = [name for (name,) in cursor.fetchall()]
    for limit in known:
        serve(view=kind(run_into_the_limit(write)))
        with connection.cursor() as cursor:
            cursor.execute(f"SET {limit} = '100ms'")
        answer = sender.send(key=limit)
        assert (answer.status_code, problem(answer)["code"]) == (503, "time_limit_exceeded")
        assert f"exceeded {limit}" in caplog.text
        assert sender.send(key=limit).status_code == 201


def test_an_outage_stays_one(serve: Serve, sender: Sender) -> None:
    def lose(request: HttpRequest) -> HttpResponseBase:
        pid = session()

        def end() -> None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])

        elsewhere(end)
        return create(request)

    serve(view=plain(lose))
    answer = sender.send()
    assert (answer.status_code, problem(answer)["code"]) == (503, "database_unavailable")
