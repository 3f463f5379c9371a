"""A middleware has set the tenant of the session, and the session is lost: the rest of the request
runs in no other session."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from threading import Timer
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, OperationalError, connection, connections, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from pytest_django import Settings

from idempotency import signals
from idempotency._engine import calls as calls_of_keys
from idempotency._engine.errors import drop_lost_connections
from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.exceptions import (
    InProgress,
    InterventionRequired,
    KeyStuck,
    Unavailable,
    Unfinished,
)
from idempotency.models import DownstreamCall, IdempotencyKey
from idempotency.operations import Operation, Rejected
from idempotency.phases import atomic_phase
from idempotency.testing import age
from tests import operations
from tests.kit.ageing import abandon
from tests.kit.duplicates import waiting_requests
from tests.kit.outages import cut_this_connection, time_out_this_session
from tests.kit.serving import Sender, View, another_client
from tests.kit.threads import Gate, elsewhere, in_background
from tests.kit.views import both_kinds, phased, phased_outside, plain
from tests.kit.waiting import eventually
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]

pytestmark = pytest.mark.postgres


def _set_tenant(request: HttpRequest) -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('app.tenant', 'a', false)")
    return "scope"


def _set_tenant_of_shard(request: HttpRequest) -> str:
    with connections["shard_b"].cursor() as cursor:
        cursor.execute("SELECT set_config('app.tenant', 'a', false)")
    return "scope"


def _tenant(alias: str = "default") -> str:
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT current_setting('app.tenant', true)")
        return str(cursor.fetchone()[0] or "")


def _answers(sender: Sender, number: int) -> list[int]:
    """Send the request several times. After each, close the connection to the other database if it
    was lost, as Django does at the end of a request."""
    found = []
    for _ in range(number):
        found.append(sender.send().status_code)
        connections["shard_b"].close_if_unusable_or_obsolete()
    return found


def _noting(
    tenants: list[str],
    *,
    before: Callable[[Any], object] = lambda key: None,
    alias: str = "default",
) -> View:
    """Return a phased view that calls ``before``, and notes the tenant in its phase."""

    @idempotent(recovery_points=[], scope=_set_tenant)
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        before(key)
        with atomic_phase(key) as phase:
            tenants.append(_tenant(alias))
            phase.set_response(HttpResponse(status=201))
        return key.response()

    return view


def _in_a_thread(status: Callable[[], int]) -> View:
    """Return a phased view whose phase stores a response in a thread of its own."""

    def store(key: Any) -> None:
        try:
            code = status()
            with atomic_phase(key) as phase:
                phase.set_response(HttpResponse(status=code))
        finally:
            connections.close_all()

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        with ThreadPoolExecutor(1) as threads:
            threads.submit(copy_context().run, store, key).result()
        return key.response()

    return view


def _fail_and_lose(alias: str) -> None:
    """Raise a serialization failure, and lose the connection, so that the ROLLBACK fails."""
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$")
    finally:
        cut_this_connection(alias)


def _lose_in_phase(key: Any) -> None:
    with suppress(OperationalError), atomic_phase(key) as phase:
        cut_this_connection()
        Entry.objects.create(name="lost")
        phase.no_op()


def _lose_in_phase_and_query(key: Any) -> None:
    _lose_in_phase(key)
    Entry.objects.count()


def _lose_in_transaction(key: Any) -> None:
    with suppress(OperationalError), transaction.atomic():
        cut_this_connection()
        Entry.objects.create(name="lost")


def _lose_shard_in_transaction() -> None:
    with suppress(OperationalError), transaction.atomic(using="shard_b"):
        cut_this_connection("shard_b")
        _tenant("shard_b")


def _lose_before_intent(key: Any) -> None:
    cut_this_connection()
    with suppress(OperationalError), key.call("pay", at_most_once=True):
        pass


def _lose_in_inner_call(key: Any) -> None:
    with key.call("outer", at_most_once=True) as outer:
        with key.call("inner", at_most_once=True) as inner:
            cut_this_connection()
            inner.record("done")
        outer.record("done")


def _lose_and_query_after_call(key: Any) -> None:
    with key.call("pay", at_most_once=True) as call:
        cut_this_connection()
        call.record("paid")
    assert _tenant() == "a"


def _lose_before_a_health_check(key: Any) -> None:
    """As after ``close_old_connections()`` with CONN_HEALTH_CHECKS."""
    cut_this_connection()
    # The next connection sets both.
    connection.health_check_enabled, connection.health_check_done = True, False


def _lose_and_call(key: Any) -> None:
    _lose_before_a_health_check(key)
    with key.call("pay"):
        raise AssertionError


def _lose_behind_a_health_check(key: Any) -> None:
    with key.call("pay"):
        _lose_before_a_health_check(key)
        Entry.objects.count()


@pytest.mark.parametrize(
    "lose",
    [
        _lose_behind_a_health_check,
        _lose_before_a_health_check,
        _lose_and_call,
        _lose_in_phase,
        _lose_in_phase_and_query,
        _lose_in_transaction,
        _lose_before_intent,
        _lose_in_inner_call,
        _lose_and_query_after_call,
    ],
)
def test_no_phase_runs_in_a_new_session(
    lose: Callable[[Any], None], serve: Serve, sender: Sender
) -> None:
    tenants: list[str] = []
    losses = [lose]
    serve(view=_noting(tenants, before=lambda key: losses and losses.pop()(key)))
    assert sender.send().status_code == 503
    assert sender.send().status_code == 201
    assert tenants == ["a"]


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_no_phase_runs_after_the_loss_of_a_session_that_was_opened_before_a_call(
    serve: Serve, sender: Sender
) -> None:
    losses = [_lose_shard_in_transaction]

    def before(key: Any) -> None:
        connections["shard_b"].close()
        _tenant("shard_b")
        with key.call("pay"):
            if losses:
                losses.pop()()

    serve(view=_noting(tenants := [], before=before, alias="shard_b"))
    assert _answers(sender, 2) == [503, 201]
    assert len(tenants) == 1


def test_no_phase_runs_in_a_new_session_after_a_receiver_has_lost_its_own(
    serve: Serve, sender: Sender
) -> None:
    tenants: list[str] = []

    def lose(**given: Any) -> None:
        signals.key_claimed.disconnect(lose)
        _lose_in_transaction(None)

    serve(view=_noting(tenants))
    signals.key_claimed.connect(lose)
    assert sender.send().status_code == 503
    assert sender.send().status_code == 201
    assert tenants == ["a"]


@both_kinds
def test_no_retry_in_the_process_runs_in_a_new_session(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    tenants: list[str] = []

    def work(request: HttpRequest) -> HttpResponse:
        tenants.append(_tenant())
        if len(tenants) == 1:
            _fail_and_lose("default")
        return HttpResponse(status=201)

    serve(view=kind(work, scope=_set_tenant))
    assert sender.send().status_code == 503
    assert tenants == ["a"]
    assert sender.send().status_code == 201


@both_kinds
def test_a_duplicate_that_waited_runs_in_its_own_session(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    gate, tenants = Gate(), list[str]()

    def work(request: HttpRequest) -> HttpResponse:
        tenants.append(_tenant())
        if len(tenants) == 1:
            gate.wait_here()
            raise RuntimeError("the first request fails")
        return HttpResponse(status=201)

    serve(view=kind(work, scope=_set_tenant, wait_seconds=30))
    running = in_background(another_client(sender).send)
    gate.wait_until_reached()
    waiting = in_background(another_client(sender).send)
    eventually(lambda: waiting_requests() == 1)
    gate.open()
    assert running.result().status_code == 500
    assert waiting.result().status_code == 201
    assert tenants == ["a", "a"]


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_no_retry_in_the_process_runs_in_a_new_session_of_another_database(
    serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants: list[str] = []
    monkeypatch.setitem(connections["shard_b"].settings_dict, "ATOMIC_REQUESTS", True)

    @idempotent(scope=_set_tenant_of_shard)
    def view(request: HttpRequest) -> HttpResponse:
        tenants.append(_tenant("shard_b"))
        if len(tenants) == 1:
            _fail_and_lose("shard_b")
        return HttpResponse(status=201)

    serve(view=view)
    assert sender.send().status_code == 503
    assert tenants == ["a"]


@both_kinds
def test_no_run_begins_after_a_loss_that_the_scope_has_hidden(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    tenants: list[str] = []

    def scope(request: HttpRequest) -> str:
        _set_tenant(request)
        if not tenants:
            tenants.append("lost")
            cut_this_connection()
            with suppress(OperationalError):
                Entry.objects.count()
        return "scope"

    def work(request: HttpRequest) -> HttpResponse:
        tenants.append(_tenant())
        return HttpResponse(status=201)

    serve(view=kind(work, scope=scope))
    assert sender.send().status_code == 503
    assert sender.send().status_code == 201
    assert tenants == ["lost", "a"]


@pytest.mark.parametrize("refusal", [Http404, PermissionDenied])
@pytest.mark.parametrize("kind", [plain, phased, phased_outside])
def test_an_error_that_the_view_makes_of_the_loss_is_not_stored(
    kind: Kind, refusal: type[Exception], serve: Serve, sender: Sender
) -> None:
    losses = [1]

    def work(request: HttpRequest) -> HttpResponse:
        if losses:
            losses.pop()
            try:
                with transaction.atomic():
                    cut_this_connection()
                    Entry.objects.create(name="lost")
            except DatabaseError:
                raise refusal from None
        return HttpResponse(status=201)

    serve(view=kind(work, scope=_set_tenant))
    assert sender.send().status_code >= 400
    key = IdempotencyKey.objects.first()
    assert key is None or (key.finished_at, key.refused_at) == (None, None)


@pytest.mark.parametrize("opened", ["by the scope", "by the view"])
@pytest.mark.parametrize("kind", [plain, phased, phased_outside])
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_an_error_that_the_view_returns_after_the_loss_of_another_database_is_not_stored(
    kind: Kind, opened: str, serve: Serve, sender: Sender
) -> None:
    losses = [1]
    connections["shard_b"].close()

    def work(request: HttpRequest) -> HttpResponse:
        _tenant("shard_b")
        if losses:
            losses.pop()
            cut_this_connection("shard_b")
        try:
            return HttpResponse(_tenant("shard_b"), status=422)
        except OperationalError:
            return HttpResponse(status=400)

    serve(view=kind(work, scope=_set_tenant_of_shard if opened == "by the scope" else _set_tenant))
    assert _answers(sender, 3) == [503, 422, 422]


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_an_error_of_a_view_that_lost_a_database_of_atomic_requests_is_not_stored(
    serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [1]
    connections["shard_b"].close()
    monkeypatch.setitem(connections["shard_b"].settings_dict, "ATOMIC_REQUESTS", True)

    @idempotent(scope=_set_tenant)
    def view(request: HttpRequest) -> HttpResponse:
        if losses:
            losses.pop()
            cut_this_connection("shard_b")
        try:
            return HttpResponse(_tenant("shard_b"), status=201)
        except OperationalError:
            raise Http404 from None

    serve(view=view)
    assert [sender.send().status_code for _ in range(2)] == [503, 201]


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_no_phase_runs_in_a_new_session_of_a_database_that_a_receiver_has_opened(
    serve: Serve, sender: Sender
) -> None:
    tenants: list[str] = []
    losses = [_lose_shard_in_transaction]

    def open_shard(**given: Any) -> None:
        _set_tenant_of_shard(HttpRequest())

    connections["shard_b"].close()
    serve(view=_noting(tenants, before=lambda _: losses and losses.pop()(), alias="shard_b"))
    signals.key_claimed.connect(open_shard)
    try:
        assert [sender.send().status_code for _ in range(2)] == [503, 201]
    finally:
        signals.key_claimed.disconnect(open_shard)
    assert tenants == ["a"]


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_phase_that_has_lost_a_session_of_another_database_commits_nothing(
    serve: Serve, sender: Sender
) -> None:
    """The view has opened the session before the phase."""
    losses = [_lose_shard_in_transaction]

    @idempotent(recovery_points=["between"])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        _set_tenant_of_shard(request)
        for point in key.phases():
            with atomic_phase(key) as phase:
                Entry.objects.create(name=point)
                if losses:
                    losses.pop()()
                if point == "between":
                    phase.set_response(HttpResponse(status=201))
                else:
                    phase.set_recovery_point("between")
        return key.response()

    connections["shard_b"].close()
    serve(view=view)
    assert sender.send().status_code == 503
    assert not Entry.objects.exists()
    assert sender.send().status_code == 201


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_view_continues_after_an_operation_that_another_database_has_refused(
    serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants: list[str] = []
    bank = operations.Bank()
    bank.before = lambda: tenants.append(_tenant("shard_b"))
    monkeypatch.setattr(operations, "bank", bank)
    connections["shard_b"].close()
    monkeypatch.setitem(connections["shard_b"].settings_dict, "HOST", "/nowhere")

    def charge(key: Any) -> None:
        with suppress(Unavailable):
            operations.charge.once("key", name="one", cents=1)

    serve(view=_noting(tenants, before=charge))
    assert sender.send().status_code == 201
    assert tenants == ["a"]


@pytest.mark.parametrize(
    "called", [operations.book, operations.book_in_shard], ids=["book", "book_in_shard"]
)
@pytest.mark.parametrize("kind", [plain, phased_outside])
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_view_knows_of_the_loss_in_an_operation_that_it_calls(
    kind: Kind,
    called: Operation[..., int],
    serve: Serve,
    sender: Sender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses, create = [cut_this_connection], Entry.objects.create
    connections["shard_b"].close()

    def create_of_tenant(**values: Any) -> Entry:
        return create(**values | {"name": _tenant("shard_b")})

    def work(request: HttpRequest) -> HttpResponse:
        _tenant("shard_b")
        if losses:
            losses.pop()("shard_b")
        try:
            called.once("inner", name="one")
        except (DatabaseError, Unavailable):
            return HttpResponse(status=400)
        return HttpResponse(status=422)

    monkeypatch.setattr(operations.Entry.objects, "create", create_of_tenant)
    serve(view=kind(work, scope=_set_tenant))
    assert _answers(sender, 2) == [503, 422]


@pytest.mark.parametrize("kind", [plain, phased_outside])
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_an_error_that_a_view_makes_of_a_read_only_database_is_stored(
    kind: Kind, serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No session was lost, and each retry would meet the same database."""

    def work(request: HttpRequest) -> HttpResponse:
        with suppress(Unavailable):
            operations.book_in_shard.once("inner", name="one")
        return HttpResponse(status=422)

    connections["shard_b"].close()
    options = connections["shard_b"].settings_dict["OPTIONS"]
    monkeypatch.setitem(options, "options", "-c default_transaction_read_only=on")
    serve(view=kind(work))
    assert sender.send().status_code == 422
    connections["shard_b"].close()


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_an_error_of_a_phase_in_another_thread_is_stored_after_an_earlier_loss(
    serve: Serve, sender: Sender
) -> None:
    serve(view=_in_a_thread(lambda: 422))
    _tenant("shard_b")
    cut_this_connection("shard_b")
    with pytest.raises(DatabaseError):
        _tenant("shard_b")
    drop_lost_connections()
    assert sender.send().status_code == 422


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_phase_knows_of_the_loss_in_an_operation_that_its_thread_has_called(
    serve: Serve, sender: Sender
) -> None:
    losses = [cut_this_connection]

    def status() -> int:
        _tenant("shard_b")
        if losses:
            losses.pop()("shard_b")
        try:
            operations.book.once("inner", name=_tenant("shard_b"))
        except (DatabaseError, Unavailable):
            with suppress(ValueError):
                operations.note.once("another", name="one", fails="breaks")
            return 400
        return 422

    serve(view=_in_a_thread(status))
    assert [sender.send().status_code for _ in range(2)] == [503, 422]


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (TimeoutError, Unfinished),
        (Unavailable, Unavailable),
        (KeyStuck, InterventionRequired),
        (None, Unavailable),
    ],
)
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_an_error_is_stored_after_an_operation_whose_session_timed_out(
    error: type[Exception] | None,
    first: type[Exception],
    serve: Serve,
    sender: Sender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each retry would meet the same limit."""
    bank = operations.Bank()
    monkeypatch.setattr(operations, "bank", bank)
    raised: list[type[Exception]] = []

    def time_out_during_call() -> None:
        time_out_this_session("shard_b")
        if error is not None:
            raise error

    def work(request: HttpRequest) -> HttpResponse:
        if error is None:
            time_out_this_session("shard_b")  # The claim finds it.
        else:
            bank.before = time_out_during_call
        for _ in range(2):
            try:
                operations.charge_in_shard.once("inner", name="one", cents=1)
            except (Unavailable, Unfinished, InterventionRequired) as failure:
                raised.append(type(failure))
        return HttpResponse(status=422)

    serve(view=plain(work))
    assert sender.send().status_code == 422
    assert raised[0] is first


def test_an_error_is_stored_after_slow_code_before_the_first_phase(
    serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        time_out_this_session()
        return HttpResponse(status=422)

    serve(view=phased_outside(work))
    assert sender.send().status_code == 422


def test_a_run_whose_session_timed_out_returns_the_response_of_the_run_that_took_over(
    serve: Serve, sender: Sender
) -> None:
    statuses = [404, 422]

    def work(request: HttpRequest) -> HttpResponse:
        status = statuses.pop()
        if statuses:
            age(IdempotencyKey.objects.get(), seconds=91)
            assert elsewhere(another_client(sender).send).status_code == 404
            time_out_this_session()
        return HttpResponse(status=status)

    serve(view=phased_outside(work))
    assert sender.send().status_code == 404


def test_a_new_session_that_does_not_find_the_key_counts_as_a_loss(
    serve: Serve,
    sender: Sender,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client does not get the error of the missing table, which is logged once."""

    def work(request: HttpRequest) -> HttpResponse:
        time_out_this_session()
        monkeypatch.setitem(
            connection.settings_dict["OPTIONS"], "options", "-c search_path=nowhere"
        )
        return HttpResponse(status=422)

    serve(view=phased_outside(work))
    try:
        assert sender.send().status_code == 503
    finally:
        monkeypatch.undo()
        connection.close()
    assert caplog.text.count("a new session cannot end the run: relation") == 1


@pytest.mark.parametrize(("seconds", "answers"), [(0.2, [201, 201]), (3, [503, 201])])
def test_the_result_of_a_call_is_more_important_than_the_session(
    seconds: float,
    answers: list[int],
    serve: Serve,
    sender: Sender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session has a short time limit for locks, and the row of the call is locked."""
    if seconds == 3:
        monkeypatch.setattr(calls_of_keys, "_FAILURES_IN_SESSION", 1)
    tenants: list[str] = []
    calls: list[str] = []
    gate = Gate()

    def lock() -> None:
        with transaction.atomic():
            DownstreamCall.objects.select_for_update().get()
            gate.wait_here()

    @idempotent(recovery_points=[], scope=_set_tenant)
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        with key.call("pay", at_most_once=True) as call:
            if call.due:
                calls.append("pay")
                with connection.cursor() as cursor:
                    cursor.execute("SET lock_timeout = '50ms'")
                in_background(lock)
                gate.wait_until_reached()
                Timer(seconds, gate.open).start()
                call.record("paid")
        with atomic_phase(key) as phase:
            tenants.append(_tenant())
            phase.set_response(HttpResponse(call.result, status=201))
        return key.response()

    serve(view=view)
    assert [(answer := sender.send()).status_code for _ in answers] == answers
    assert answer.content == b"paid"
    assert calls == ["pay"]
    assert tenants == ["a"]


def test_the_completer_runs_nothing_in_a_session_without_what_prepare_request_has_set(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    tenants: list[str] = []
    losses = [cut_this_connection]

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        if key.attempts == 1:
            return HttpResponse(status=503)
        with atomic_phase(key) as phase:
            tenants.append(_tenant())
            phase.set_response(HttpResponse(status=201))
        return key.response()

    def prepare(request: HttpRequest, key: Any) -> None:
        _set_tenant(request)
        if losses:
            losses.pop()()

    serve(view=view)
    assert sender.send().status_code == 503
    settings.IDEMPOTENCY = {"PREPARE_REQUEST": prepare}
    abandon()
    assert complete_once() == CompletePass(failed=1)
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert tenants == ["a"]


@pytest.mark.django_db(transaction=True)
def test_a_task_goes_on_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = operations.Bank()
    monkeypatch.setattr(operations, "bank", bank)
    bank.before = cut_this_connection
    with pytest.raises(Unavailable):
        operations.charge.once("key", name="one", cents=1)
    bank.before = lambda: None
    assert operations.charge.once("key", name="one", cents=1) == {"transfer": 0}


@pytest.mark.parametrize("state", ["new", "kept", "kept with health checks"])
@pytest.mark.django_db(transaction=True)
def test_a_task_stores_no_refusal_that_the_work_makes_of_a_loss(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(**values: Any) -> Entry:
        monkeypatch.undo()
        cut_this_connection()
        try:
            return Entry.objects.create(**values)
        except DatabaseError:
            raise Rejected("unknown") from None

    if state == "new":
        connection.close()
    else:  # as Django does at the beginning of a request
        connection.health_check_enabled = state == "kept with health checks"
        connection.health_check_done = False
    monkeypatch.setattr(operations.Entry.objects, "create", create)
    with pytest.raises(Unavailable):
        operations.book.once("key", name="one")
    results: list[object] = []

    def repeat() -> list[object]:
        with suppress(InProgress):  # The lost session may hold its locks for a moment.
            results.append(operations.book.once("key", name="one"))
        return results

    eventually(repeat)
    assert results == [Entry.objects.get().pk]


@pytest.mark.parametrize("refused", [Rejected("unknown"), None])
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_task_that_calls_again_does_not_meet_the_lost_session(
    refused: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Entry.objects.create

    def create_if_known(**values: Any) -> Entry:
        try:
            _tenant("shard_b")
        except DatabaseError as error:
            raise refused or error from None
        return create(**values)

    monkeypatch.setattr(operations.Entry.objects, "create", create_if_known)
    _set_tenant_of_shard(HttpRequest())
    cut_this_connection("shard_b")
    with pytest.raises(Unavailable):
        operations.book.once("key", name="one")
    assert operations.book.once("key", name="one") == Entry.objects.get().pk


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_task_runs_although_the_session_of_another_database_was_lost_before() -> None:
    _set_tenant_of_shard(HttpRequest())
    cut_this_connection("shard_b")
    with pytest.raises(OperationalError):
        _tenant("shard_b")
    assert operations.book.once("key", name="one") == Entry.objects.get().pk
    connections["shard_b"].close()


@pytest.mark.parametrize("alias", ["default", "shard_b"])
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_task_continues_after_a_loss_that_the_health_check_finds(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = operations.Bank()
    monkeypatch.setattr(operations, "bank", bank)
    bank.before = lambda: connections["shard_b"].cursor().execute("SELECT 1") and None
    lost = connections[alias]
    lost.ensure_connection()
    cut_this_connection(alias)
    lost.health_check_enabled, lost.health_check_done = True, False
    assert operations.charge.once("key", name="one", cents=1) == {"transfer": 0}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_task_does_not_finish_a_run_after_the_loss_of_another_database(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, tenants = operations.Bank(), list[str]()
    monkeypatch.setattr(operations, "bank", bank)
    bank.inside = lambda: tenants.append(_tenant("shard_b"))
    bank.before = _lose_shard_in_transaction
    _set_tenant_of_shard(HttpRequest())
    shard = connections["shard_b"]
    shard.health_check_enabled, shard.health_check_done = False, not kept
    with pytest.raises(Unavailable):
        operations.charge.once("key", name="one", cents=1)
    assert tenants == []


def test_a_completer_inside_a_request_runs_the_keys_after_a_loss(
    serve: Serve, sender: Sender
) -> None:
    runs: list[str] = []

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        if key.attempts == 1:
            return HttpResponse(status=503)
        runs.append(key.idempotency_key)
        if len(runs) == 1:
            cut_this_connection()
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))
        return key.response()

    def complete(request: HttpRequest) -> HttpResponse:
        done = complete_once()
        return HttpResponse(f"{done.finished} {done.failed}")

    serve(view=view, complete=complete)
    for key in ("first", "second", "third"):
        assert sender.send(key=key).status_code == 503
    abandon()
    assert sender.client.get("/complete/").content == b"2 1"
