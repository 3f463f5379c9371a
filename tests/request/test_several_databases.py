"""A plain view that writes to a second database with ATOMIC_REQUESTS: the guarantees there, and the
responses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import Any

import pytest
from django.core.checks import Warning
from django.db import DatabaseError, IntegrityError, connections, models, transaction
from django.http import Http404, HttpRequest, HttpResponseBase, JsonResponse
from django.test.utils import isolate_apps
from django.urls import path

from idempotency.checks.views import check_views
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.kit.examples import blocks
from tests.kit.serving import Sender, problem
from tests.kit.threads import elsewhere
from tests.models import Account, Entry

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.django_db(transaction=True, databases=["default", "shard_b"]),
]

Serve = Callable[..., None]


@pytest.fixture(autouse=True)
def _atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["shard_b"], "ATOMIC_REQUESTS", True)


def entries() -> tuple[int, int]:
    """Return the numbers of entries in the key's database and in the other database."""
    return Entry.objects.using("default").count(), Entry.objects.using("shard_b").count()


def write_there() -> None:
    Entry.objects.using("shard_b").create(name="booking")


def write_there_unseen() -> None:
    """Write with psycopg itself, which passes no wrapper of Django."""
    connections["shard_b"].connection.execute("INSERT INTO tests_entry (name) VALUES ('booking')")


class Booking:
    """Work that writes to both databases, and calls ``first`` after the writes of the first run."""

    def __init__(
        self,
        first: Callable[[], object] = lambda: None,
        there: Callable[[], object] = write_there,
    ) -> None:
        self.first, self.there = first, there
        self.runs = 0

    def __call__(self, request: HttpRequest) -> JsonResponse:
        self.runs += 1
        Entry.objects.using("default").create(name="booking")
        self.there()
        if self.runs == 1:
            self.first()
        return JsonResponse({"booked": True}, status=201)


def break_reference(alias: str) -> None:
    """Violate a constraint that is checked at COMMIT."""
    Entry.objects.using(alias).create(name="broken", idempotency_key_id=-1)


def account(by: str, alias: str) -> None:
    """Create a row with the number of rows: two concurrent transactions that do this are not
    serializable."""
    Account.objects.using(alias).create(name=f"{by} sees {Account.objects.using(alias).count()}")


def rival(alias: str) -> None:
    """Call ``account`` on another connection, and commit first."""

    def run() -> None:
        with transaction.atomic(using=alias):
            connections[alias].cursor().execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            account("rival", alias)

    elsewhere(run)


@contextmanager
def at_the_end_of_the_checks(alias: str, event: Callable[[str], None]) -> Iterator[None]:
    """Call ``event`` when the constraints of both databases are checked, before the first COMMIT is
    sent."""
    events = iter([event])

    def watch(execute: Any, sql: str, *rest: Any) -> Any:
        result = execute(sql, *rest)
        if sql == "SET CONSTRAINTS ALL DEFERRED":
            next(events, lambda alias: None)(alias)
        return result

    with connections["shard_b"].execute_wrapper(watch):
        yield


def cut(alias: str) -> None:
    """End the session of this thread in the database."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()

    def end() -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])

    elsewhere(end)


@pytest.mark.parametrize("alias", ["default", "shard_b"])
def test_a_deferred_constraint_of_either_database_leaves_nothing_in_both(
    alias: str, serve: Serve, sender: Sender
) -> None:
    serve(view=idempotent(work := Booking(lambda: break_reference(alias))))
    assert sender.send().status_code == 500
    assert (entries(), IdempotencyKey.objects.count()) == ((0, 0), 0)
    answer = sender.send()
    assert (answer.status_code, "Idempotent-Replayed" in answer, work.runs) == (201, False, 2)
    assert entries() == (1, 1)


@pytest.mark.parametrize("how", ["lost", "broken", "marked", "ended"])
def test_a_transaction_there_that_cannot_commit_leaves_nothing_in_both(
    how: str, serve: Serve, sender: Sender
) -> None:
    def end() -> None:
        match how:
            case "lost":
                cut("shard_b")
            case "broken":
                # PostgreSQL executes the COMMIT of a broken transaction as ROLLBACK, without an
                # error.
                with suppress(DatabaseError):
                    connections["shard_b"].cursor().execute("SELECT 1/0")
            case "marked":
                with suppress(IntegrityError), transaction.atomic(using="shard_b", savepoint=False):
                    raise IntegrityError
            case "ended":
                connections["shard_b"].cursor().execute("ROLLBACK")

    serve(view=idempotent(work := Booking(end)))
    assert sender.send().status_code == (503 if how == "lost" else 500)
    connections["shard_b"].close()
    assert (entries(), IdempotencyKey.objects.count()) == ((0, 0), 0)
    assert (sender.send().status_code, work.runs, entries()) == (201, 2, (1, 1))


def test_a_commit_that_fails_there_is_tried_again_while_nothing_is_committed(
    serve: Serve, sender: Sender
) -> None:
    other = connections["shard_b"]
    other.cursor().execute("SET default_transaction_isolation = 'serializable'")
    try:
        serve(view=idempotent(work := Booking(lambda: account("view", "shard_b"))))
        with at_the_end_of_the_checks("shard_b", rival):
            assert sender.send().status_code == 201
    finally:
        other.close()
    assert (work.runs, entries()) == (2, (1, 1))
    assert Account.objects.using("shard_b").get().name == "rival sees 0"


@pytest.mark.parametrize("there", [write_there, write_there_unseen])
def test_once_another_database_has_committed_there_is_no_retry_inside_the_process(
    there: Callable[[], object], serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    serve(
        view=idempotent(isolation="serializable")(
            work := Booking(lambda: account("view", "default"), there)
        )
    )
    with at_the_end_of_the_checks("default", rival):
        answer = sender.send()
    assert (answer.status_code, problem(answer)["code"], answer["Retry-After"]) == (
        503,
        "database_unavailable",
        "1",
    )
    assert problem(answer)["retryable"] is True
    assert "COMMIT succeeded in ['shard_b'], but failed for the key in 'default'" in caplog.text
    assert (work.runs, entries(), IdempotencyKey.objects.count()) == (1, (0, 1), 0)
    again = sender.send()
    assert (again.status_code, "Idempotent-Replayed" in again) == (201, False)
    # exactly once in the key's database, at least once in the other
    assert (work.runs, entries()) == (2, (1, 2))
    assert sender.send()["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize(("alias", "left_there"), [("default", 1), ("shard_b", 0)])
def test_a_connection_that_is_cut_at_its_commit_is_no_success(
    alias: str, left_there: int, serve: Serve, sender: Sender
) -> None:
    serve(view=idempotent(work := Booking()))
    with at_the_end_of_the_checks(alias, cut):
        answer = sender.send()
    connections[alias].close()
    assert (answer.status_code, problem(answer)["code"], work.runs) == (
        503,
        "database_unavailable",
        1,
    )
    assert (entries(), IdempotencyKey.objects.count()) == ((0, left_there), 0)
    assert (sender.send().status_code, entries()) == (201, (1, left_there + 1))


def test_hooks_of_the_other_database_run_when_all_is_committed(
    serve: Serve, sender: Sender
) -> None:
    seen: list[Any] = []

    def hook() -> None:
        seen.append((elsewhere(entries), IdempotencyKey.objects.finished().count()))

    serve(view=idempotent(Booking(lambda: transaction.on_commit(hook, using="shard_b"))))
    assert sender.send().status_code == 201
    assert seen == [((1, 1), 1)]


@pytest.mark.parametrize("error", [OSError, Http404])
def test_a_hook_that_fails_undoes_nothing(
    error: type[Exception], serve: Serve, sender: Sender
) -> None:
    def hook() -> None:
        raise error

    serve(view=idempotent(work := Booking(lambda: transaction.on_commit(hook, using="shard_b"))))
    sender.send()
    again = sender.send()
    assert (again.status_code, again["Idempotent-Replayed"], work.runs, entries()) == (
        201,
        "true",
        1,
        (1, 1),
    )


def test_a_replay_asks_nothing_of_the_other_database(
    serve: Serve, sender: Sender, django_assert_num_queries: Any
) -> None:
    serve(view=idempotent(Booking()))
    sender.send()
    with django_assert_num_queries(0, connection=connections["shard_b"]):
        assert sender.send()["Idempotent-Replayed"] == "true"


def sent(alias: str, work: Callable[[], object]) -> list[str]:
    """Return the messages that libpq sent to the database during ``work``."""
    connections[alias].ensure_connection()
    server = connections[alias].connection.pgconn
    with TemporaryFile("w+") as lines:
        server.trace(lines.fileno())
        try:
            work()
        finally:
            server.untrace()
        lines.seek(0)
        return [line for line in lines if line.split("\t")[1] == "F"]


def test_nothing_is_sent_to_a_database_that_the_view_does_not_use(
    serve: Serve, sender: Sender
) -> None:
    serve(
        view=idempotent(
            lambda request: JsonResponse({"id": Entry.objects.create(name="made").pk}, status=201)
        )
    )
    sender.send(key="before")
    assert sent("shard_b", lambda: sender.send()) == []
    assert entries() == (2, 0)


def test_a_database_that_the_view_does_not_use_has_not_committed(
    serve: Serve, sender: Sender
) -> None:
    """The serialization failure at the COMMIT of the key is retried in the process."""
    failures = iter([True])

    def work(request: HttpRequest) -> JsonResponse:
        account("view", "default")
        if next(failures, False):
            rival("default")
        return JsonResponse({}, status=201)

    serve(view=idempotent(isolation="serializable")(work))
    assert sender.send().status_code == 201
    assert set(Account.objects.values_list("name", flat=True)) == {"rival sees 0", "view sees 1"}


def test_hooks_of_a_database_that_the_view_does_not_use_run_when_the_key_is_committed(
    serve: Serve, sender: Sender
) -> None:
    seen: list[int] = []

    def work(request: HttpRequest) -> JsonResponse:
        transaction.on_commit(
            lambda: seen.append(elsewhere(IdempotencyKey.objects.finished().count)), using="shard_b"
        )
        return JsonResponse({}, status=201)

    serve(view=idempotent(work))
    assert sender.send().status_code == 201
    assert seen == [1]


@pytest.mark.parametrize("way", ["copy", "psycopg"])
def test_statements_that_no_wrapper_sees_are_seen(way: str, serve: Serve, sender: Sender) -> None:
    """COPY, and statements on psycopg's own connection: their deferred constraints are checked
    before the first COMMIT."""

    def work(request: HttpRequest) -> JsonResponse:
        other = connections["shard_b"]
        if way == "psycopg":
            other.connection.execute(
                "INSERT INTO tests_entry (name, idempotency_key_id) VALUES ('broken', -1)"
            )
        else:
            with (
                other.cursor() as cursor,
                cursor.copy("COPY tests_entry (name, idempotency_key_id) FROM STDIN") as rows,
            ):
                rows.write_row(["broken", -1])
        Entry.objects.create(name="made")
        return JsonResponse({}, status=201)

    serve(view=idempotent(work))
    assert sender.send().status_code == 500
    assert (entries(), IdempotencyKey.objects.count()) == ((0, 0), 0)


def test_a_view_reads_from_a_database_that_takes_no_writes(serve: Serve, sender: Sender) -> None:
    """For example a replica whose settings are a copy of those of the primary."""

    def work(request: HttpRequest) -> JsonResponse:
        assert not Entry.objects.using("shard_b").exists()
        return JsonResponse({"id": Entry.objects.create(name="made").pk}, status=201)

    serve(view=idempotent(work))
    connections["shard_b"].cursor().execute("SET default_transaction_read_only = on")
    try:
        assert sender.send().status_code == 201
    finally:
        connections["shard_b"].close()
    assert sender.send()["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("left", [True, False])
def test_a_wrapper_that_the_view_leaves_stays(left: bool, serve: Serve, sender: Sender) -> None:
    other = connections["shard_b"]

    def own(execute: Any, *statement: Any) -> Any:
        return execute(*statement)

    def work(request: HttpRequest) -> JsonResponse:
        if left:
            other.execute_wrappers.append(own)
        else:
            other.execute_wrappers.clear()
        return JsonResponse({}, status=201)

    serve(view=idempotent(work))
    try:
        assert sender.send().status_code == 201
        assert other.execute_wrappers == ([own] if left else [])
    finally:
        other.execute_wrappers.clear()


@pytest.fixture
def book_order() -> Iterator[Any]:
    """Return the view of docs/how-to/shard-by-tenant.md whose write to the other database is
    guarded."""
    shop: dict[str, Any] = {
        "__name__": "tests.shop", "models": models, "Order": Entry, "JsonResponse": JsonResponse,
        "idempotent": idempotent, "path": path, "urlpatterns": [],
    }  # fmt: skip
    left_out = {"@login_required", "from shop.models import Booking"}
    with isolate_apps("tests"):
        for block in blocks("shard-by-tenant.md", "python"):
            if "Booking" in block:
                # Without the decorators of the shop's users, and with the models of the tests.
                lines = (line for line in block.splitlines() if line not in left_out)
                exec("\n".join(lines), shop)
        with connections["shard_b"].schema_editor() as editor:
            editor.create_model(shop["Booking"])
        yield shop["book_order"].__wrapped__
        with connections["shard_b"].schema_editor() as editor:
            editor.delete_model(shop["Booking"])


@pytest.mark.parametrize("atomic_requests", [True, False])
def test_the_guard_of_the_guide_lets_a_second_run_write_nothing_there(
    atomic_requests: bool,
    book_order: Any,
    serve: Serve,
    sender: Sender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(connections.settings["shard_b"], "ATOMIC_REQUESTS", atomic_requests)
    runs: list[int] = []

    def view(request: HttpRequest) -> HttpResponseBase:
        response: HttpResponseBase = book_order(request)
        runs.append(bookings.count())
        if len(runs) == 1 and not atomic_requests:
            cut("default")
        return response

    def send() -> Any:
        return sender.send(body="name=one", content_type="application/x-www-form-urlencoded")

    bookings = book_order.__globals__["Booking"].objects.using("shard_b")
    serve(view=idempotent(view))
    with at_the_end_of_the_checks("default", cut):
        assert send().status_code == 503
    assert (Entry.objects.count(), bookings.count()) == (0, 1)
    answers = [send() for _ in range(2)]
    assert [(answer.status_code, "Idempotent-Replayed" in answer) for answer in answers] == [
        (201, False),
        (201, True),
    ]
    assert (runs, Entry.objects.count(), bookings.count()) == ([1, 1], 1, 1)


def test_a_check_warns_of_atomic_requests_in_a_second_database(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned() -> list[Any]:
        return [
            message
            for message in check_views(None)
            if isinstance(message, Warning) and message.id == "idempotency.W010"
        ]

    serve(view=idempotent(Booking()), other=idempotent(Booking()))
    (warning,) = warned()
    assert "shard_b" in warning.msg
    assert "default" not in warning.msg
    serve(
        view=idempotent(
            transaction.non_atomic_requests(using="shard_b")(lambda request: JsonResponse({}))
        )
    )
    assert warned() == []
    serve(view=idempotent(recovery_points=["a"])(Booking()))
    assert warned() == []
    serve(view=idempotent(using="shard_b")(Booking()))
    assert warned() == []
    serve(view=idempotent(using=lambda request: "shard_b")(Booking()))
    assert warned() == []
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    assert len(warned()) == 1
