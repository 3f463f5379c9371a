"""BEGIN with the claim and the fence with COMMIT: as few round trips as a bare view, and the
results of single messages."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import (
    DatabaseError,
    DataError,
    Error,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.db.backends.signals import connection_created
from django.db.transaction import TransactionManagementError
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from psycopg.pq import ExecStatus
from pytest_django import Settings

from benchmarks import views as bench
from benchmarks.counts import create_table
from idempotency._engine import fence, round_trips, transactions
from idempotency._engine.transactions import durable_transaction
from idempotency._hidden import Hidden
from idempotency.enqueuer import EnqueuePass, enqueue_once
from idempotency.inbox import process_once
from idempotency.models import IdempotencyKey
from tests.kit.claims import claim
from tests.kit.cutting import CHUNK_BYTES, Cut, cutting_proxy
from tests.kit.database import messages
from tests.kit.serving import Sender
from tests.kit.tables import truncate
from tests.kit.threads import in_background
from tests.kit.views import Counted, View, both_kinds, phased, plain, two_phases
from tests.models import Entry

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]
Kind = Callable[..., View]
Serve = Callable[..., None]

#: The connections of psycopg whose statements a test has dropped.
LOST: list[Any] = []

merged_or_not = pytest.mark.parametrize("merged", [True, False], ids=["merged", "one by one"])


@pytest.fixture
def merge(settings: Settings) -> Callable[[bool], None]:
    """Return a function that sets MERGE_ROUND_TRIPS."""

    def put(merged: bool) -> None:
        settings.IDEMPOTENCY = {"MERGE_ROUND_TRIPS": merged}

    return put


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Forget the prepared statements, because a pool reuses the connection in other tests."""
    yield
    while LOST:
        prepared = vars(LOST.pop()).get("_idempotency_prepared")
        if prepared is not None:
            prepared.names.clear()
            prepared.losses = 0


@pytest.fixture
def bench_table() -> Iterator[None]:
    truncate(connection, IdempotencyKey)
    create_table()
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE bench_row")


@pytest.mark.parametrize(
    ("view", "key", "trips"),
    [
        (bench.bare, "", 3),
        (bench.plain, "", 3),
        (bench.plain, "again", 2),
        (bench.ride, "", 10),
        (bench.ride, "again", 1),
    ],
    ids=["bare", "plain, first", "plain, replay", "ride", "phased, replay"],
)
def test_round_trips(view: Any, key: str, trips: int, bench_table: None) -> None:
    # Statements are prepared after the fifth use, without an additional round trip.
    for _ in range(8):
        view(bench.request(key))
    assert messages(lambda: view(bench.request(key))) == trips


@pytest.mark.parametrize(
    ("view", "trips"), [(bench.plain, 3), (bench.ride, 10)], ids=["plain", "ride"]
)
def test_round_trips_under_stricter_limits(view: Any, trips: int, bench_table: None) -> None:
    """The first request finds the limits of the role, and the following ones expect them."""
    with connection.cursor() as cursor:
        for name in ("lock_timeout", "idle_in_transaction_session_timeout"):
            cursor.execute(f"SET {name} = '3s'")
    for _ in range(8):
        view(bench.request(""))
    assert messages(lambda: view(bench.request(""))) == trips
    connection.close()


@pytest.mark.parametrize(
    ("merged", "citus", "trips"), [(False, False, 5), (True, True, 5)], ids=["setting off", "Citus"]
)
def test_each_statement_is_a_round_trip(
    merged: bool,
    citus: bool,
    trips: int,
    merge: Callable[[bool], None],
    bench_table: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merge(merged)
    for name in (round_trips, transactions.database_product):
        monkeypatch.setattr(name, "is_citus", lambda connection: citus)
    bench.plain(bench.request())
    assert messages(lambda: bench.plain(bench.request())) == trips


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("deferrable", [True, False])
def test_begin_has_the_characteristics_that_the_project_has_set(
    read_only: bool, deferrable: bool
) -> None:
    connection.ensure_connection()
    own = connection.connection
    own.read_only, own.deferrable = read_only, deferrable
    try:
        with durable_transaction("serializable", using="default"), connection.cursor() as cursor:
            shown = []
            for name in ("read_only", "deferrable", "isolation"):
                cursor.execute(f"SHOW transaction_{name}")
                shown += cursor.fetchone()
    finally:
        own.read_only = own.deferrable = None
    on = {True: "on", False: "off"}
    assert shown == [on[read_only], on[deferrable], "serializable"]


def test_text_is_stored_in_the_encoding_that_the_session_has_now() -> None:
    key = claim().key
    with connection.cursor() as cursor:
        cursor.execute("SET client_encoding TO latin1")
    try:
        fence.release(key, "Füße", using="default")
    finally:
        with connection.cursor() as cursor:
            cursor.execute("RESET client_encoding")
    assert IdempotencyKey.objects.get().last_error == "Füße"


def lose_statements() -> None:
    """Let the server lose the prepared statements of this app. psycopg's own statements remain."""
    connection.ensure_connection()
    LOST.append(connection.connection)
    with connection.cursor() as cursor:
        cursor.execute("SELECT name FROM pg_prepared_statements WHERE name LIKE 'idempotency%%'")
        for (name,) in cursor.fetchall():
            cursor.execute(f"DEALLOCATE {name}")


def swallow(name: str) -> None:
    """Continue after an error in a savepoint."""
    Entry.objects.create(name=name)
    with suppress(Error), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT 1 / 0")


def roll_back(name: str) -> None:
    """Mark the transaction for rollback."""
    Entry.objects.create(name=name)
    transaction.set_rollback(True)


def break_transaction(name: str) -> None:
    """Continue after an error that broke the transaction."""
    Entry.objects.create(name=name)
    with suppress(Error), connection.cursor() as cursor:
        cursor.execute("SELECT 1 / 0")


def read_in_chunks(name: str) -> None:
    """Use a server-side cursor that locks rows; a cursor that is kept after the transaction cannot
    lock rows."""
    Entry.objects.create(name=name)
    assert [
        entry.name
        for entry in Entry.objects.filter(name=name).select_for_update().iterator(chunk_size=1)
    ] == [name]


def copy(name: str) -> None:
    """Use COPY."""
    with connection.cursor() as cursor, cursor.copy("COPY tests_entry (name) FROM STDIN") as rows:
        rows.write_row([name])


def several_texts(name: str) -> None:
    """Send several statements in one text."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO tests_entry (name) VALUES (%s); SELECT 7", [name])


def forget_prepared(name: str) -> None:
    """Lose the prepared statements before the last one."""
    Entry.objects.create(name=name)
    lose_statements()


def write_nothing(name: str) -> None:
    """Do nothing."""


KEPT = [swallow, read_in_chunks, copy, several_texts, forget_prepared]


@both_kinds
@merged_or_not
@pytest.mark.parametrize("work", [*KEPT, roll_back, break_transaction, write_nothing])
def test_what_a_view_does_has_the_same_result(
    work: Callable[[str], None],
    merged: bool,
    kind: Kind,
    serve: Serve,
    sender: Sender,
    merge: Callable[[bool], None],
) -> None:
    merge(merged)
    names: list[str] = []

    def respond(request: HttpRequest) -> HttpResponseBase:
        work(names[-1])
        return HttpResponse("done", status=201)

    serve(view=kind(respond))
    for number in range(8):
        names.append(f"entry {number}")
        answer = sender.send(key=f"key-{number}")
        stored = work in (*KEPT, write_nothing)
        assert (answer.status_code == 201) == stored
        assert Entry.objects.filter(name=names[-1]).count() == (work in KEPT)
        assert connection.get_autocommit()
        assert connection.connection.info.transaction_status == 0
        assert connection.connection.autocommit
        if stored:
            assert sender.send(key=f"key-{number}")["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize(
    ("threshold", "names"), [(None, [0, 0, 0, 0]), (0, [2, 2, 2, 2]), (2, [0, 0, 2, 2])]
)
def test_a_statement_is_prepared_after_the_uses_that_the_connection_names(
    threshold: int | None, names: list[int], serve: Serve, sender: Sender
) -> None:
    connection.close()
    connection.ensure_connection()
    connection.connection.prepare_threshold = threshold
    serve(view=plain(Counted()))
    found = []
    for number in range(4):
        sender.send(key=f"key-{number}")
        found.append(len(vars(connection.connection)["_idempotency_prepared"].names))
    connection.close()
    assert found == names


@both_kinds
def test_statements_that_the_server_has_lost_are_prepared_again(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    counted = Counted()
    serve(view=kind(counted))
    for number in range(30):
        if number % 10 == 9:
            lose_statements()
        assert sender.send(key=f"key-{number}").status_code == 201
    assert Entry.objects.count() == counted.runs == 30


def receive_a_message() -> None:
    with process_once("bank", str(uuid.uuid4())):
        """Do nothing."""


def test_a_rollback_of_a_message_does_not_drop_the_prepared_statements(
    serve: Serve, sender: Sender
) -> None:
    """psycopg drops all statements of a connection, if it has prepared one of them."""
    serve(view=plain(Counted()))
    for number in range(8):
        receive_a_message()
        sender.send(key=f"key-{number}")
    with suppress(ZeroDivisionError), transaction.atomic():
        receive_a_message()
        raise ZeroDivisionError
    assert sender.send(key="last").status_code == 201
    prepared = vars(connection.connection)["_idempotency_prepared"]
    assert (bool(prepared.names), prepared.losses) == (True, 0)


def test_a_pass_of_the_enqueuer_whose_statements_are_lost_succeeds() -> None:
    for _ in range(8):
        enqueue_once()
    lose_statements()
    assert enqueue_once() == EnqueuePass()


def test_a_connection_that_loses_its_statements_once_prepares_them_again(
    serve: Serve, sender: Sender
) -> None:
    serve(view=plain(Counted()))
    for number in range(24):
        sender.send(key=f"key-{number}")
        if number == 12:
            lose_statements()
    prepared = vars(connection.connection)["_idempotency_prepared"]
    assert (bool(prepared.names), prepared.losses) == (True, 1)


def test_a_connection_that_loses_its_statements_again_and_again_prepares_no_more(
    serve: Serve, sender: Sender
) -> None:
    serve(view=plain(Counted()))
    for number in range(40):
        sender.send(key=f"key-{number}")
        lose_statements()
    prepared = vars(connection.connection)["_idempotency_prepared"]
    assert (prepared.names, prepared.losses) == ({}, 2)


def test_a_connection_whose_server_has_the_statements_of_another_one_prepares_no_more(
    serve: Serve, sender: Sender
) -> None:
    """Like behind a pooler that changed the server: the names already exist there."""
    counted = Counted()
    serve(view=plain(counted))
    for number in range(8):
        sender.send(key=f"before-{number}")
    LOST.append(connection.connection)
    prepared = vars(connection.connection)["_idempotency_prepared"]
    claim, end = prepared.names
    del prepared.names[end]
    for number in range(4):
        assert sender.send(key=f"key-{number}").status_code == 201
    assert (list(prepared.names), prepared.losses) == ([claim], 2)
    assert counted.runs == 8 + 4 + 1
    assert Entry.objects.count() == 12


@merged_or_not
@both_kinds
def test_an_error_of_commit_is_not_taken_for_a_lost_lock(
    kind: Kind,
    merged: bool,
    serve: Serve,
    sender: Sender,
    merge: Callable[[bool], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The trigger fails at COMMIT with the SQLSTATE of a failed fenced statement."""
    merge(merged)
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION divide() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'by the trigger' USING ERRCODE = '22012'; END $$"
        )
        cursor.execute(
            "CREATE CONSTRAINT TRIGGER divide AFTER INSERT ON tests_entry DEFERRABLE INITIALLY"
            " DEFERRED FOR EACH ROW EXECUTE FUNCTION divide()"
        )
    serve(view=kind(Counted()))
    try:
        assert sender.send().status_code == 500
        assert "by the trigger" in caplog.text
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION divide CASCADE")
    assert Entry.objects.count() == 0
    assert sender.send().status_code == 201


@merged_or_not
@pytest.mark.parametrize("threshold", [5, 0])
def test_a_run_that_lost_its_lock_commits_nothing(
    threshold: int,
    merged: bool,
    serve: Serve,
    sender: Sender,
    merge: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This also holds if its last statement is prepared in the same message."""
    merge(merged)
    connection.close()
    connection.ensure_connection()
    if connection.connection.prepare_threshold is None:
        pytest.skip("a pooler keeps no prepared statements")
    monkeypatch.setattr(connection.connection, "prepare_threshold", threshold)

    def lose(request: HttpRequest) -> HttpResponseBase:
        Entry.objects.create(name="late")
        with connection.cursor() as cursor:  # Like a commit of another session.
            cursor.execute("UPDATE idempotency_idempotencykey SET claim_token = gen_random_uuid()")
        return HttpResponse(status=201)

    serve(view=phased(lose))
    assert sender.send().status_code == 409
    assert not Entry.objects.exists()
    assert not IdempotencyKey.objects.finished().exists()


def _cuts(length: int, step: int) -> list[Cut]:
    return [Cut(before=True), *(Cut(reply_bytes=number) for number in range(0, length + 1, step))]


@merged_or_not
@both_kinds
@pytest.mark.parametrize("step", [40, pytest.param(1, marks=pytest.mark.full)])
def test_a_connection_cut_around_commit_leaves_one_effect(
    step: int,
    kind: Kind,
    merged: bool,
    serve: Serve,
    sender: Sender,
    merge: Callable[[bool], None],
    short_folder: Path,
) -> None:
    merge(merged)
    serve(view=kind(Counted()))
    with cutting_proxy(short_folder) as proxy:
        for number in range(8):
            assert sender.send(key=f"before-{number}").status_code == 201
        proxy.cut = whole = Cut(reply_bytes=CHUNK_BYTES)
        sender.send(key="whole")
        for number, cut in enumerate(_cuts(whole.length, step)):
            proxy.cut = cut
            answers = [sender.send(key=f"key-{number}") for _ in range(3)]
            assert proxy.cut is None
            # Until the server notices the lost connection, its transaction holds the key.
            while "Idempotent-Replayed" not in answers[-1]:
                assert len(answers) < 1000
                answers.append(sender.send(key=f"key-{number}"))
            assert {answer.content for answer in answers if answer.status_code == 201} == {
                answers[-1].content
            }
            assert {answer.status_code for answer in answers} <= {201, 503, 409}
            assert (
                Entry.objects.filter(idempotency_key__idempotency_key=f"key-{number}").count() == 1
            )


@both_kinds
def test_a_garbled_reply_is_a_broken_connection(
    kind: Kind, serve: Serve, sender: Sender, short_folder: Path
) -> None:
    serve(view=kind(Counted()))
    with cutting_proxy(short_folder) as proxy:
        proxy.cut = Cut(reply_bytes=CHUNK_BYTES, garbled=True)
        answers = [sender.send() for _ in range(3)]
        assert proxy.cut is None
    assert answers[-1]["Idempotent-Replayed"] == "true"
    assert Entry.objects.count() == 1


def test_each_phase_of_a_run_whose_statements_are_lost_is_committed_once(
    serve: Serve, sender: Sender
) -> None:
    def forget(request: HttpRequest) -> HttpResponse:
        Entry.objects.create(name="between")
        lose_statements()
        return HttpResponse(status=201)

    serve(view=two_phases(forget, forget))
    for number in range(20):
        assert sender.send(key=f"key-{number}").status_code == 201
    assert Entry.objects.count() == 40


@both_kinds
def test_no_statement_uses_a_cursor(
    kind: Kind, serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cursor costs more processor time."""
    seen: list[str] = []
    execute = psycopg.Cursor.execute

    def note(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(query)
        return execute(self, query, *args, **kwargs)

    serve(view=kind(lambda request: HttpResponse(status=201)))
    monkeypatch.setattr(psycopg.Cursor, "execute", note)
    assert sender.send().status_code == 201
    assert seen != []
    assert [text for text in seen if "idempotency_idempotencykey" in text] == []


def test_a_statement_is_refused_where_django_refuses_its_own(transactional_db: None) -> None:
    connection.ensure_connection()
    of_this_thread = connections["default"]
    with pytest.raises(DatabaseError, match="thread"):
        in_background(lambda: round_trips.run(of_this_thread, "SELECT 1", Hidden({}))).result(10)
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            round_trips.run(connection, "SELECT 1", Hidden({}))


def test_an_error_that_the_server_has_not_sent_is_a_broken_connection(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libpq created the error itself, for example after invalid bytes: the error has no
    SQLSTATE."""
    connection.ensure_connection()
    own = connection.connection
    result = own.pgconn.make_empty_result(ExecStatus.FATAL_ERROR)
    assert isinstance(round_trips._error(own, result, None, None, {}), psycopg.OperationalError)
    monkeypatch.setattr(own, "wait", lambda generator: [result])
    with pytest.raises(OperationalError):
        round_trips.send(connection, ["SELECT 1"])
    connection.close()


def test_the_reason_for_which_the_server_closes_the_connection_is_told(
    transactional_db: None,
) -> None:
    connection.ensure_connection()
    end = "SELECT pg_terminate_backend(pg_backend_pid())"
    with pytest.raises(OperationalError) as raised:
        round_trips.run(connection, end, Hidden({}), before=["SELECT 1"])
    connection.close()
    assert isinstance(raised.value.__cause__, psycopg.errors.AdminShutdown)


def test_an_error_behind_the_first_statement_of_a_message_is_told(transactional_db: None) -> None:
    connection.ensure_connection()
    with pytest.raises(DataError):
        round_trips.send(connection, ["SELECT 1", "SELECT 1/0"])


@both_kinds
def test_an_error_of_a_prepared_statement_is_its_own(
    kind: Kind, serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    """Such an error does not mean that the server has lost the statement."""
    counted = Counted()
    serve(view=kind(counted))
    for number in range(8):
        assert sender.send(key=f"key-{number}").status_code == 201
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'by the trigger' USING ERRCODE = '23514'; END $$"
        )
        cursor.execute(
            "CREATE TRIGGER refuse BEFORE UPDATE ON idempotency_idempotencykey FOR EACH ROW "
            "WHEN (NEW.response_code IS NOT NULL) EXECUTE FUNCTION refuse()"
        )
    try:
        assert sender.send(key="refused").status_code == 500
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION refuse CASCADE")
    assert counted.runs == 9
    assert "by the trigger" in caplog.text


@pytest.mark.parametrize("of_phase", [False, True])
def test_an_interrupt_after_begin_leaves_no_open_transaction(
    of_phase: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal during the round trip is handled after it."""

    @contextmanager
    def interrupted(*args: object) -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(round_trips, "noted_in_log", interrupted)
        with (
            pytest.raises(KeyboardInterrupt),
            durable_transaction(None, using="default", of_phase=of_phase),
        ):
            raise AssertionError
    Entry.objects.create(name="reported as committed")
    connection.close()
    assert Entry.objects.count() == 1


def test_a_receiver_of_a_new_connection_has_a_transaction_of_its_own(
    serve: Serve, sender: Sender
) -> None:
    statuses = iter([503, 201])

    def receive(**kwargs: object) -> None:
        with transaction.atomic():
            Entry.objects.create(name="of the receiver")

    def lose(request: HttpRequest) -> str:
        connection.close()
        return "everybody"

    serve(view=plain(lambda request: HttpResponse(status=next(statuses)), scope=lose))
    connection.ensure_connection()
    connection_created.connect(receive)
    try:
        assert [sender.send().status_code for _ in range(2)] == [503, 201]
    finally:
        connection_created.disconnect(receive)
    assert Entry.objects.exists()


def test_an_interrupt_after_commit_does_not_skip_the_next_one(serve: Serve, sender: Sender) -> None:
    run = round_trips.run

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        row = run(*args, **kwargs)
        if kwargs.get("after"):
            # Like a signal that arrives before Django's COMMIT.
            monkeypatch.setattr(connection, "commit", raising)
        return row

    def raising() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    serve(view=plain(Counted()))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(round_trips, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sender.send()
    with transaction.atomic():
        Entry.objects.create(name="next")
    connection.close()
    assert Entry.objects.count() == 2
    assert sender.send()["Idempotent-Replayed"] == "true"


def test_an_interrupted_exchange_closes_the_connection(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.ensure_connection()
    own = connection.connection

    def interrupted(generator: Any, *args: Any) -> None:
        next(generator)
        raise KeyboardInterrupt

    monkeypatch.setattr(own, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        round_trips.run(connection, "SELECT %(one)s::int", Hidden({"one": 1}))
    assert own.closed
    connection.close()


@merged_or_not
@both_kinds
def test_a_hook_of_on_commit_has_transactions_of_its_own(
    kind: Kind, merged: bool, serve: Serve, sender: Sender, merge: Callable[[bool], None]
) -> None:
    merge(merged)

    def hook() -> None:
        with transaction.atomic():
            Entry.objects.create(name="of the hook")

    def respond(request: HttpRequest) -> HttpResponseBase:
        transaction.on_commit(hook)
        return HttpResponse(status=201)

    serve(view=kind(respond))
    assert sender.send().status_code == 201
    assert connection.connection.info.transaction_status == 0
    connection.close()
    assert Entry.objects.count() == 1


@both_kinds
def test_a_connection_that_the_view_closed_is_a_lost_one(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    def respond(request: HttpRequest) -> HttpResponseBase:
        Entry.objects.create(name="work")
        connection.connection.close()
        return HttpResponse(status=201)

    serve(view=kind(respond))
    assert sender.send().status_code == 503
    assert not Entry.objects.exists()


def test_a_statement_in_autocommit_that_the_server_has_lost_is_sent_again(
    serve: Serve, sender: Sender
) -> None:
    serve(view=phased(Counted()))
    for number in range(8):
        sender.send(key=f"key-{number}")
    lose_statements()
    assert sender.send(key="key-1")["Idempotent-Replayed"] == "true"
