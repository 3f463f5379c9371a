"""A protected view inside a transaction of a middleware or of a decorator: a plain view is a
savepoint of it."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import InternalError, OperationalError, connection, connections, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.test import RequestFactory
from django.views.decorators.csrf import csrf_exempt
from pytest_django import Settings
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import signals
from idempotency.decorators import idempotent
from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.signals import RequestOutcome
from tests.kit.asgi import ask, run
from tests.kit.database import statements
from tests.kit.serving import Sender, View, another_client
from tests.kit.threads import Gate, background, elsewhere
from tests.kit.views import Counted, create, in_transaction, phased, plain
from tests.models import Account, Entry

Serve = Callable[..., None]


class Middleware:
    """A middleware with a transaction around each request, in which it writes before and after the
    view."""

    def __init__(self) -> None:
        #: Called with the response, in the transaction.
        self.end: Callable[[HttpResponseBase], object] = lambda response: None
        self.begin: Callable[[], object] = lambda: None

    def __call__(self, get_response: View) -> View:
        def run(request: HttpRequest) -> HttpResponseBase:
            with transaction.atomic():
                self.begin()
                Entry.objects.create(name="audit")
                response = get_response(request)
                self.end(response)
            return response

        return run


@pytest.fixture
def middleware(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Middleware:
    """Return the middleware, which is installed as the innermost."""
    found = Middleware()
    monkeypatch.setitem(globals(), "installed", found)
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.installed"]
    return found


def roll_back(response: HttpResponseBase) -> None:
    transaction.set_rollback(True)


def roll_back_from_400(response: HttpResponseBase) -> None:
    """Do as django-reversion does."""
    if response.status_code >= 400:
        transaction.set_rollback(True)


def rows() -> tuple[int, int, int]:
    """Return the numbers of entries of the middleware and of the view, and of keys."""
    entries = [Entry.objects.filter(name=name).count() for name in ("audit", "made")]
    return entries[0], entries[1], IdempotencyKey.objects.count()


# One unit


def test_key_writes_and_response_commit_with_the_transaction(
    serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    serve(view=plain(work := Counted()))
    first, second = sender.send(), sender.send()
    assert (first.status_code, second.content, second["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    assert sender.send(body={"a": 2}).status_code == 422
    assert (work.runs, rows()) == (1, (3, 1, 1))


def test_they_vanish_with_the_transaction_and_a_retry_runs(
    serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    serve(view=plain(work := Counted()))
    middleware.end = roll_back
    assert sender.send().status_code == 201
    assert rows() == (0, 0, 0)
    middleware.end = lambda response: None
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert (work.runs, rows()) == (2, (2, 1, 1))


@pytest.mark.parametrize(
    "decorate", [transaction.atomic, transaction.atomic()], ids=["bare", "called"]
)
def test_a_decorator_outside_is_an_outer_transaction_too(
    decorate: Any, serve: Serve, sender: Sender
) -> None:
    serve(view=decorate(plain(work := Counted())))
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert (work.runs, rows()) == (1, (0, 1, 1))


@pytest.mark.parametrize("status", [401, 403, 503])
def test_an_answer_that_is_not_stored_rolls_back_the_view_alone(
    status: int, serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        request.session["left"] = "by the view"
        create(request)
        return HttpResponse(status=status)

    serve(view=plain(work))
    assert sender.send().status_code == status
    assert rows() == (1, 0, 0)
    assert "left" not in sender.client.session


def test_an_exception_rolls_back_the_view_alone(
    serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        create(request)
        raise OSError("on purpose")

    serve(view=plain(work))
    assert sender.send().status_code == 500
    assert rows() == (1, 0, 0)


def test_a_job_of_the_view_is_staged_with_the_transaction(
    serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        stage_job("tests.kit.jobs.anything", {})
        return create(request)

    serve(view=plain(work))
    middleware.end = roll_back
    sender.send()
    assert not StagedJob.objects.exists()
    middleware.end = lambda response: None
    sender.send()
    sender.send()
    assert StagedJob.objects.count() == 1


def test_a_repeat_in_the_same_transaction_is_a_replay(sender: Sender) -> None:
    view = plain(work := Counted())

    def request() -> HttpRequest:
        made = RequestFactory().post("/", headers={"Idempotency-Key": "key-1"})
        made.user = sender.user
        return made

    with transaction.atomic():
        first, second = view(request()), view(request())
    assert (second.content, second["Idempotent-Replayed"]) == (first.content, "true")
    assert (work.runs, rows()) == (1, (0, 1, 1))


@pytest.mark.postgres
def test_an_async_view_behind_asgi_is_a_savepoint_too(
    serve: Serve, middleware: Middleware, transactional_db: None
) -> None:
    async def work(request: HttpRequest) -> HttpResponse:
        await Entry.objects.acreate(name="made")
        return HttpResponse(status=201)

    serve(view=csrf_exempt(idempotent(scope=lambda request: "anybody")(work)))

    async def scenario() -> None:
        middleware.end = roll_back
        assert [(await ask("/view/", "key-1"))[0] for _ in range(2)] == [201, 201]
        middleware.end = lambda response: None
        assert "Idempotent-Replayed" not in (await ask("/view/", "key-1"))[1]
        assert "Idempotent-Replayed" in (await ask("/view/", "key-1"))[1]

    run(scenario)
    assert rows() == (2, 1, 1)


# Answers of errors


def refused(request: Any) -> Response:
    Entry.objects.create(name="made")
    raise ValidationError("no")


def missing(request: Any) -> Response:
    Entry.objects.create(name="made")
    raise Http404


def returned(request: Any) -> Response:
    """Return the answer to an exception that was caught: the handler has marked the transaction for
    rollback."""
    Entry.objects.create(name="made")
    response: Response = request.parser_context["view"].handle_exception(ValidationError("no"))
    return response


@pytest.mark.parametrize("atomic_requests", [True, False])
@pytest.mark.parametrize(("work", "status"), [(refused, 400), (missing, 404)])
def test_the_rollback_of_rest_framework_does_not_take_the_key_of_a_stored_answer(
    work: Any,
    status: int,
    atomic_requests: bool,
    serve: Serve,
    sender: Sender,
    middleware: Middleware,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its exception handler calls ``set_rollback()`` if the database has ATOMIC_REQUESTS."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic_requests)
    runs = Counted(work)

    class Orders(APIView):
        @idempotent
        def post(self, request: Any) -> Any:
            return runs(request)

    serve(view=Orders.as_view())
    answers = [sender.send() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status, status]
    assert "Idempotent-Replayed" in answers[1]
    assert (runs.runs, rows()) == (1, (2, 0, 1))


@pytest.mark.parametrize("outer", [True, False])
def test_a_returned_answer_after_its_rollback_is_stored_without_the_writes(
    outer: bool,
    serve: Serve,
    sender: Sender,
    settings: Settings,
    middleware: Middleware,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    if not outer:
        settings.MIDDLEWARE = settings.MIDDLEWARE[:-1]
    runs = Counted(returned)

    class Orders(APIView):
        @idempotent
        def post(self, request: Any) -> Any:
            return runs(request)

    serve(view=Orders.as_view())
    first, second = sender.send(), sender.send()
    assert (first.status_code, second.content, second["Idempotent-Replayed"]) == (
        400,
        first.content,
        "true",
    )
    assert (runs.runs, rows()[1:]) == (1, (0, 1))


def test_a_transaction_that_is_rolled_back_from_400_takes_the_key_of_a_400(
    serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    middleware.end = roll_back_from_400
    serve(view=plain(work := Counted(lambda request: HttpResponse(status=400))))
    assert [sender.send().status_code for _ in range(2)] == [400, 400]
    assert (work.runs, rows()) == (2, (0, 0, 0))


# Conflicts


@pytest.mark.postgres
def test_a_duplicate_is_refused_while_the_transaction_is_open(
    serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    gate = Gate()
    middleware.end = lambda response: gate.wait_here()
    serve(view=plain(work := Counted(), wait_seconds=30))
    with background(another_client(sender).send) as first:
        gate.wait_until_reached()  # The view has returned, and its transaction is open.
        begun = time.monotonic()
        # In a thread of its own: a request in the main thread never waits.
        second, other = (
            elsewhere(partial(another_client(sender).send, body=body)).status_code
            for body in ({"a": 1}, {"a": 2})
        )
        assert time.monotonic() - begun < 20
        gate.open()
        assert first.result().status_code == 201
    assert (second, other, work.runs) == (409, 422, 1)
    assert sender.send()["Idempotent-Replayed"] == "true"


@pytest.mark.postgres
def test_a_serialization_failure_goes_outward_unchanged(
    serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    account = Account.objects.create(name="shared")
    raised: list[BaseException] = []

    def work(request: HttpRequest) -> HttpResponse:
        elsewhere(lambda: Account.objects.update(balance=5))
        account.balance = 7
        account.save()
        return create(request)

    view = plain(counted := Counted(work))

    def noting(request: HttpRequest) -> HttpResponseBase:
        try:
            return view(request)
        except OperationalError as error:
            raised.append(error)
            raise

    middleware.begin = lambda: connection.cursor().execute(
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
    )
    serve(view=noting)
    assert sender.send().status_code == 500
    assert [error.__cause__.sqlstate for error in raised] == ["40001"]
    assert (counted.runs, rows()) == (1, (1, 0, 0))


@pytest.mark.postgres
def test_a_key_that_was_committed_after_the_snapshot_is_a_serialization_failure(
    serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    """Never a second run."""
    other = another_client(sender)

    def begin() -> None:
        middleware.begin = lambda: None
        connection.cursor().execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        Entry.objects.count()  # The snapshot is taken.
        assert elsewhere(other.send).status_code == 201

    middleware.begin = begin
    serve(view=plain(work := Counted()))
    sender.client.raise_request_exception = True
    with pytest.raises(OperationalError) as raised:
        sender.send()
    assert raised.value.__cause__.sqlstate == "40001"  # type: ignore[union-attr]
    assert (work.runs, IdempotencyKey.objects.count()) == (1, 1)
    assert sender.send()["Idempotent-Replayed"] == "true"


@pytest.mark.postgres
def test_an_isolation_that_the_transaction_has_is_accepted_and_another_one_is_refused(
    serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    serve(view=plain(Counted(), isolation="serializable"))
    assert sender.send().status_code == 500
    assert not IdempotencyKey.objects.exists()
    middleware.begin = lambda: connection.cursor().execute(
        "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"
    )
    assert sender.send().status_code == 201


# The transaction of the caller stays as it was


@pytest.mark.postgres
def test_the_time_limits_of_the_transaction_stay(
    serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    limits = "idle_in_transaction_session_timeout", "lock_timeout", "statement_timeout"
    found: list[list[str]] = []

    def note(*_: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {', '.join(f'current_setting({name!r})' for name in limits)}")
            found.append(list(cursor.fetchone()))

    middleware.begin, middleware.end = note, note
    serve(view=plain(Counted()))
    assert sender.send().status_code == 201
    assert found[0] == found[1]


@pytest.mark.postgres
def test_a_first_request_adds_four_statements_and_a_replay_three(sender: Sender) -> None:
    view = plain(lambda request: HttpResponse(status=201))

    def sent() -> list[str]:
        request = RequestFactory().post("/", headers={"Idempotency-Key": "key-2"})
        request.user = sender.user
        with transaction.atomic(), statements() as made:
            view(request)
        return [query["sql"].split()[0] for query in made.captured_queries]

    assert sent() == ["SAVEPOINT", "WITH", "UPDATE", "RELEASE"]
    assert sent() == ["SAVEPOINT", "WITH", "RELEASE"]


@pytest.mark.postgres
def test_two_keys_in_one_transaction_do_not_deadlock(sender: Sender) -> None:
    """Each of two transactions holds one key and asks for the other's: both are refused at once."""
    view = plain(lambda request: HttpResponse(status=201))
    gates = Gate(), Gate()

    def send(name: str) -> int:
        request = RequestFactory().post("/", headers={"Idempotency-Key": name})
        request.user = sender.user
        return view(request).status_code

    def crosswise(own: int) -> list[int]:
        with transaction.atomic():
            statuses = [send(f"key-{own}")]
            gates[own].wait_here()
            return [*statuses, send(f"key-{1 - own}")]

    with background(partial(crosswise, 0)) as first, background(partial(crosswise, 1)) as second:
        for gate in gates:
            gate.wait_until_reached()
        gates[0].open()
        assert first.result(20) == [201, 409]
        gates[1].open()
        assert second.result(20)[0] == 201


# Announced after COMMIT


@pytest.fixture
def announced() -> Iterator[list[tuple[str, bool]]]:
    """Yield the signals that are sent, each with whether a transaction was open."""
    found: list[tuple[str, bool]] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        def note(outcome: RequestOutcome | None = None, **kwargs: Any) -> None:
            found.append((f"{name} {outcome}" if outcome else name, connection.in_atomic_block))

        getattr(signals, name).connect(note)
        yield
        getattr(signals, name).disconnect(note)

    with (
        noted("key_claimed"),
        noted("key_finished"),
        noted("key_replayed"),
        noted("request_answered"),
    ):
        yield found


def test_signals_and_counts_follow_the_commit(
    serve: Serve, sender: Sender, middleware: Middleware, announced: list[tuple[str, bool]]
) -> None:
    serve(view=plain(Counted()))
    middleware.end = roll_back
    sender.send()
    assert not announced
    middleware.end = lambda response: None
    sender.send()
    assert announced == [
        ("key_claimed", False),
        ("key_finished", False),
        ("request_answered ran", False),
    ]
    announced.clear()
    sender.send()
    assert [name for name, _ in announced] == ["key_replayed", "request_answered replayed"]


@pytest.mark.parametrize(("lease", "lines"), [(1, 1), (90, 0)])
def test_a_transaction_that_outlives_the_lease_is_logged(
    lease: int,
    lines: int,
    serve: Serve,
    sender: Sender,
    middleware: Middleware,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings.IDEMPOTENCY = {"LOCK_TIMEOUT_SECONDS": lease}
    middleware.end = lambda response: time.sleep(1.1)
    serve(view=plain(create))
    with caplog.at_level(logging.WARNING, "idempotency"):
        assert sender.send().status_code == 201
    key = IdempotencyKey.objects.get()
    logged = [
        record for record in caplog.records if getattr(record, "key_hash", "") == key.key_hash
    ]
    assert len(logged) == lines
    assert all(f"{__name__}.Middleware.__call__" in record.getMessage() for record in logged)


# Refused


def refusal(sender: Sender, **sent: Any) -> str:
    """Send a request, and return the text of the error that it raises."""
    sender.client.raise_request_exception = True
    with pytest.raises(RuntimeError) as raised:
        sender.send(**sent)
    return str(raised.value)


def test_a_phased_view_is_refused_and_the_nearest_function_is_named(
    serve: Serve, sender: Sender, middleware: Middleware
) -> None:
    serve(view=phased(work := Counted()))
    assert f"{__name__}.Middleware.__call__" in refusal(sender)
    assert (work.runs, IdempotencyKey.objects.count()) == (0, 0)


def test_a_thousand_keys_of_one_transaction_are_the_most(sender: Sender) -> None:
    """More locks could exhaust the server's table for all sessions."""
    view = plain(lambda request: HttpResponse(status=201), scope=lambda request: "anybody")

    def send(number: int) -> int:
        return view(
            RequestFactory().post("/", headers={"Idempotency-Key": f"key-{number}"})
        ).status_code

    with transaction.atomic():
        assert {send(number) for number in range(999)} == {201}
        with transaction.atomic():
            assert send(999) == 201
            transaction.set_rollback(True)  # It releases the locks of the key.
        assert send(999) == 201
        with pytest.raises(RuntimeError, match="1,000"):
            send(1000)
        assert send(0) == 201  # a replay
    assert IdempotencyKey.objects.count() == 1000
    with transaction.atomic():
        assert send(1000) == 201


def test_with_confirmed_replication_it_is_refused(
    serve: Serve, sender: Sender, middleware: Middleware, settings: Settings
) -> None:
    settings.IDEMPOTENCY = {"CONFIRM_REPLICATED": "storage"}
    serve(view=plain(work := Counted()))
    assert "CONFIRM_REPLICATED" in refusal(sender)
    assert work.runs == 0


def test_the_transaction_of_atomic_requests_is_refused(
    serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Django opens it around an unprotected view that calls a protected one."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    view = plain(work := Counted())

    def calling(request: HttpRequest) -> HttpResponseBase:
        return view(request)

    serve(view=calling, excluded=transaction.non_atomic_requests(lambda request: view(request)))
    assert "ATOMIC_REQUESTS" in refusal(sender)
    assert work.runs == 0
    assert sender.send("/excluded/").status_code == 201


def test_under_atomic_requests_the_transaction_of_a_middleware_is_one(
    serve: Serve, sender: Sender, middleware: Middleware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    serve(view=plain(work := Counted()))
    assert [sender.send().status_code for _ in range(2)] == [201, 201]
    assert (work.runs, rows()) == (1, (2, 1, 1))


def test_without_autocommit_it_is_refused(sender: Sender) -> None:
    """Django's block is then no transaction of its own, and calls no hooks at its end."""
    request = RequestFactory().post("/", headers={"Idempotency-Key": "key-1"})
    request.user = sender.user
    transaction.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match="autocommit"), transaction.atomic():
            plain(create)(request)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert not IdempotencyKey.objects.exists()


@pytest.mark.postgres
def test_work_that_makes_the_transaction_of_the_caller_read_only_is_no_outage(
    serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponseBase:
        connection.cursor().execute("SET TRANSACTION READ ONLY")
        return create(request)

    serve(view=in_transaction(plain(work)))
    sender.client.raise_request_exception = True
    with pytest.raises(InternalError):
        sender.send()
