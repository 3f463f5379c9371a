"""A connection to the database that is lost during a request: a 503, and the retry runs or
resumes."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest
from django.db import OperationalError, connection
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from idempotency._engine import fence
from idempotency._engine.errors import drop_connection
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.outages import cut_this_connection, time_out_this_session
from tests.kit.serving import Sender, View, problem
from tests.kit.threads import elsewhere
from tests.kit.views import Counted, both_kinds, create, phased, two_phases
from tests.kit.waiting import eventually
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]


def terminate_this_backend() -> None:
    """Let the database end the connection of this thread."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid = cursor.fetchone()[0]

    def terminate() -> None:
        # PgBouncer may give this thread the same session, which then ends itself.
        with suppress(OperationalError), connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s::int, 5000)", [pid])

    elsewhere(terminate)


CUTS = [
    terminate_this_backend,
    cut_this_connection,
]


def _unavailable(answer: HttpResponse) -> bool:
    return (answer.status_code, problem(answer)["code"], problem(answer)["retryable"]) == (
        503,
        "database_unavailable",
        True,
    )


@both_kinds
@pytest.mark.postgres
def test_a_claim_runs_on_the_connection_that_a_health_check_opens(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(create, scope=lambda request: "one"))
    sender.client.cookies.clear()  # Loading the session would check the connection.
    cut_this_connection()
    # The next connection sets both.
    connection.health_check_enabled, connection.health_check_done = True, False
    assert sender.send().status_code == 201


@both_kinds
@pytest.mark.postgres
@pytest.mark.parametrize("cut", CUTS)
def test_connection_lost_in_the_view_is_a_503(
    cut: Callable[[], None],
    kind: Kind,
    serve: Serve,
    sender: Sender,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        response = create(request)
        if counted.runs == 1:
            cut()
            Entry.objects.create(name="too late")
        return response

    serve(view=kind(counted := Counted(work)))
    assert _unavailable(sender.send())
    # The text of the driver, of a plain view too, whose body must not be stored.
    assert "the database 'default' cannot be reached: OperationalError: " in caplog.text
    assert (
        eventually(lambda: (answer := sender.send()).status_code != 409 and answer).status_code
        == 201
    )
    assert Entry.objects.count() == 1
    assert counted.runs == 2


@both_kinds
@pytest.mark.postgres
@pytest.mark.parametrize("cut", CUTS)
def test_connection_lost_at_the_end_of_the_view_is_a_503(
    cut: Callable[[], None], kind: Kind, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        response = create(request)
        if counted.runs == 1:
            cut()
        return response

    serve(view=kind(counted := Counted(work)))
    assert _unavailable(sender.send())
    assert (
        eventually(lambda: (answer := sender.send()).status_code != 409 and answer).status_code
        == 201
    )
    assert Entry.objects.count() == 1


@pytest.mark.postgres
@pytest.mark.parametrize("cut", CUTS)
def test_connection_lost_between_phases_is_a_503_and_the_retry_resumes(
    cut: Callable[[], None], serve: Serve, sender: Sender
) -> None:
    """A new connection lacks what a middleware has set for the session, such as the tenant."""
    calls = Counted(lambda request: cut() if calls.runs == 1 else None)
    serve(
        view=two_phases(
            first := Counted(), lambda request: HttpResponse(status=201), call=partial(calls, None)
        )
    )
    assert _unavailable(sender.send())
    assert sender.send().status_code == 201
    assert (first.runs, calls.runs) == (1, 2)


@pytest.mark.postgres
def test_connection_lost_between_calls_is_a_503(serve: Serve, sender: Sender) -> None:
    serve(view=_two_calls(cut_this_connection))
    assert _unavailable(sender.send())


@pytest.mark.postgres
def test_a_phase_replaces_a_session_that_timed_out_during_a_call(
    serve: Serve, sender: Sender
) -> None:
    """Otherwise each retry would repeat the call, and the request would never end."""
    calls = Counted(lambda request: time_out_this_session())
    serve(
        view=two_phases(
            first := Counted(), lambda request: HttpResponse(status=201), call=partial(calls, None)
        )
    )
    assert sender.send().status_code == 201
    assert (first.runs, calls.runs) == (1, 1)


@pytest.mark.postgres
def test_a_call_replaces_a_session_that_timed_out_during_another_call(
    serve: Serve, sender: Sender
) -> None:
    serve(view=_two_calls(time_out_this_session))
    assert sender.send().status_code == 201
    assert "second" in str(IdempotencyKey.objects.get().history)


def _two_calls(call: Callable[[], None]) -> View:
    @idempotent(recovery_points=["called"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        with key.call("first"):
            call()
        with key.call("second"):
            pass
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))
        return key.response()

    return view


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("lose", "status"), [(cut_this_connection, 503), (time_out_this_session, 201)]
)
@pytest.mark.parametrize("then", ["phase", "call"])
def test_after_a_connection_was_lost_in_an_at_most_once_call_a_retry_has_its_result(
    lose: Callable[[], None], status: int, then: str, serve: Serve, sender: Sender
) -> None:
    paid: list[int] = []
    ran: list[str] = []

    @idempotent(recovery_points=["paid"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        with key.call("payment", at_most_once=True) as call:
            if call.due:
                paid.append(1)
                lose()
                call.record("paid")
        if then == "call":
            with key.call("receipt"):
                ran.append("in a new session")
        with atomic_phase(key) as phase:
            ran.append("in a new session")
            phase.set_response(HttpResponse(call.result, status=201))
        return key.response()

    serve(view=view)
    assert sender.send().status_code == status
    assert bool(ran) is (status == 201)
    assert sender.send().content == b"paid"
    assert paid == [1]


@pytest.fixture
def lost_at_commit(transactional_db: None) -> Iterator[Callable[[], None]]:
    """Terminate the backend of each transaction that writes an entry, in its COMMIT; yield a
    function that stops this."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$"
        )
        cursor.execute(
            "CREATE CONSTRAINT TRIGGER dies AFTER INSERT ON tests_entry DEFERRABLE INITIALLY"
            " DEFERRED FOR EACH ROW EXECUTE FUNCTION die()"
        )

    def stop() -> None:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION IF EXISTS die() CASCADE")

    yield stop
    stop()


@both_kinds
@pytest.mark.postgres
def test_connection_lost_in_commit_is_no_success(
    kind: Kind, serve: Serve, sender: Sender, lost_at_commit: Callable[[], None]
) -> None:
    serve(view=kind(work := Counted()))
    assert _unavailable(sender.send())
    lost_at_commit()
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.finished().exists()
    assert sender.send().status_code == 201
    assert work.runs == 2


@pytest.mark.postgres
def test_a_release_that_fails_twice_is_tried_later(
    serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []
    release = fence.release

    def fail_twice(key: IdempotencyKey, error: str, *, using: str) -> None:
        tries.append(1)
        if len(tries) <= 2:
            raise OperationalError("the database is down")
        release(key, error, using=using)

    monkeypatch.setattr(fence, "release", fail_twice)
    serve(view=phased(lambda request: HttpResponse(status=503)))
    assert sender.send().status_code == 500, "a phase stores no 503"
    assert (
        "could not be released, retrying until its lock expires: the database is down"
        in caplog.text
    )
    assert eventually(lambda: not IdempotencyKey.objects.in_flight().exists())


@pytest.mark.postgres
def test_a_dropped_connection_does_not_go_back_to_a_pool(transactional_db: None) -> None:
    """With this option, ``close()`` of psycopg's connection returns it to the pool."""
    pooled = connection.copy("pooled")
    pool = {"min_size": 1, "max_size": 1, "close_returns": True}
    pooled.settings_dict = pooled.settings_dict | {
        "CONN_MAX_AGE": 0,
        "OPTIONS": pooled.settings_dict["OPTIONS"] | {"pool": pool},
    }
    try:
        pooled.ensure_connection()
        dropped = pooled.connection.info.backend_pid
        drop_connection(pooled)
        pooled.ensure_connection()
        assert pooled.connection.info.backend_pid != dropped
    finally:
        pooled.close()
        pooled.close_pool()
