"""A view that marks its transaction for rollback and returns a response.

``handle_exception()`` of Django REST framework sets the mark under ATOMIC_REQUESTS.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from psycopg.errors import SerializationFailure
from rest_framework import exceptions
from rest_framework.authentication import SessionAuthentication
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency.decorators import idempotent
from idempotency.http import not_stored
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.kit.serving import Sender
from tests.kit.views import Counted, both_kinds, create, plain
from tests.models import Account, Entry

Serve = Callable[..., None]


class Session(SessionAuthentication):
    """Takes the user of the session."""

    def enforce_csrf(self, request: Any) -> None:
        """Accept each request."""


@pytest.fixture(autouse=True, params=[True, False], ids=["ATOMIC_REQUESTS", "autocommit"])
def atomic_requests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run each test with ATOMIC_REQUESTS and without."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", request.param)
    return bool(request.param)


class Runs:
    """The number of runs of a view."""

    def __init__(self) -> None:
        self.count = 0


def handling(error: Exception, runs: Runs, **options: Any) -> Any:
    """Return a view that handles its own exception."""

    class Orders(APIView):
        authentication_classes = [Session]

        @idempotent(**options)
        def post(self, request: Any) -> HttpResponseBase:
            runs.count += 1
            try:
                if not options:
                    Entry.objects.create(name="made")
                raise error
            except exceptions.APIException as caught:
                return self.handle_exception(caught)  # type: ignore[no-any-return]

    return Orders.as_view()


@pytest.mark.parametrize(
    "error", [exceptions.ValidationError, exceptions.NotFound, exceptions.MethodNotAllowed("POST")]
)
@pytest.mark.parametrize("options", [{}, {"recovery_points": []}], ids=["plain", "phased"])
def test_a_stored_status_is_replayed(
    error: Any, options: Any, atomic_requests: bool, serve: Serve, sender: Sender
) -> None:
    raised = error() if isinstance(error, type) else error
    serve(view=handling(raised, runs := Runs(), **options))
    first, replayed = sender.send(), sender.send()
    assert (first.status_code, replayed.status_code) == (raised.status_code, raised.status_code)
    assert (replayed["Idempotent-Replayed"], replayed.content) == ("true", first.content)
    assert runs.count == 1
    # Without ATOMIC_REQUESTS, the framework rolls nothing back.
    assert Entry.objects.count() == (not options and not atomic_requests)


@pytest.mark.parametrize("error", [exceptions.PermissionDenied, exceptions.Throttled])
def test_another_status_is_not_stored(error: Any, serve: Serve, sender: Sender) -> None:
    serve(view=handling(error(), runs := Runs()))
    assert [sender.send().status_code for _ in range(2)] == [error.status_code] * 2
    assert (runs.count, Entry.objects.count(), IdempotencyKey.objects.count()) == (2, 0, 0)


def test_a_view_of_django_may_do_so_too(serve: Serve, sender: Sender) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        create(request)
        transaction.set_rollback(True)
        return HttpResponse("sold out", status=422)

    serve(view=plain(counted := Counted(work)))
    first, replayed = sender.send(), sender.send()
    assert (first.status_code, replayed.content, replayed["Idempotent-Replayed"]) == (
        422,
        first.content,
        "true",
    )
    assert (counted.runs, Entry.objects.count()) == (1, 0)


@pytest.mark.parametrize("status", [200, 201, 302])
def test_a_success_is_refused_with_words(status: int, serve: Serve, sender: Sender) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        create(request)
        transaction.set_rollback(True)
        return HttpResponse(status=status)

    serve(view=plain(work))
    sender.client.raise_request_exception = True
    with pytest.raises(DatabaseError, match=rf"status {status}, but .* marked for rollback"):
        sender.send()
    assert (Entry.objects.count(), IdempotencyKey.objects.count()) == (0, 0)


def test_a_success_after_the_handler_of_an_exception_is_refused(
    atomic_requests: bool, serve: Serve, sender: Sender
) -> None:
    class Orders(APIView):
        authentication_classes = [Session]

        @idempotent
        def post(self, request: Any) -> Response:
            self.handle_exception(exceptions.NotFound())
            return Response(status=201)

    serve(view=Orders.as_view())
    assert sender.send().status_code == (500 if atomic_requests else 201)


def test_the_writes_cannot_be_kept(serve: Serve, sender: Sender) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        transaction.set_rollback(True)
        return not_stored(HttpResponse(status=403), keep_writes=True)

    serve(view=plain(work))
    sender.client.raise_request_exception = True
    with pytest.raises(RuntimeError, match="keep_writes"):
        sender.send()


@pytest.mark.postgres
@pytest.mark.parametrize("status", [201, 409])
def test_a_caught_error_of_the_database_is_rolled_back(
    status: int, serve: Serve, sender: Sender
) -> None:
    """Without a transaction of its own, such a statement breaks the transaction of the view."""
    Account.objects.create(name="taken")

    def work(request: HttpRequest) -> HttpResponse:
        Entry.objects.create(name="made")
        try:
            Account.objects.create(name="taken")
        except IntegrityError:
            return HttpResponse("taken", status=status)
        raise AssertionError

    serve(view=plain(counted := Counted(work)))
    assert [sender.send().status_code for _ in range(2)] == (
        [409, 409] if status == 409 else [500, 500]
    )
    assert (counted.runs, Entry.objects.count()) == (1 if status == 409 else 2, 0)


@pytest.mark.postgres
@both_kinds
def test_a_caught_serialization_failure_is_retried(kind: Any, serve: Serve, sender: Sender) -> None:
    runs = []

    def work(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        Entry.objects.create(name="made")
        with suppress(OperationalError), transaction.mark_for_rollback_on_error("default"):
            if len(runs) == 1:
                raise OperationalError("conflict") from SerializationFailure()
        return HttpResponse(status=201 if len(runs) > 1 else 409)

    serve(view=kind(work))
    assert sender.send().status_code == 201
    assert (len(runs), Entry.objects.count()) == (2, 1)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
@pytest.mark.parametrize("status", [201, 404])
def test_the_mark_of_another_database_counts_too(
    status: int, serve: Serve, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings["shard_b"], "ATOMIC_REQUESTS", True)

    def work(request: HttpRequest) -> HttpResponse:
        Entry.objects.using("shard_b").create(name="made")
        Entry.objects.create(name="made")
        transaction.set_rollback(True, using="shard_b")
        return HttpResponse(status=status)

    serve(view=plain(counted := Counted(work)))
    assert [sender.send().status_code for _ in range(2)] == (
        [404, 404] if status == 404 else [500, 500]
    )
    assert counted.runs == (1 if status == 404 else 2)
    assert (Entry.objects.count(), Entry.objects.using("shard_b").count()) == (0, 0)


def test_a_phase_that_is_marked_for_rollback_is_refused_with_words(
    serve: Serve, sender: Sender
) -> None:
    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            with atomic_phase(key) as phase:
                create(request)
                transaction.set_rollback(True)
                phase.set_response(HttpResponse(status=404))
        return key.response()

    serve(view=view)
    sender.client.raise_request_exception = True
    with pytest.raises(DatabaseError, match="phase was marked for rollback"):
        sender.send()
    assert (Entry.objects.count(), IdempotencyKey.objects.in_flight().count()) == (0, 0)


def test_in_an_outer_transaction_the_response_is_stored_and_the_writes_are_not(
    serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        create(request)
        transaction.set_rollback(True)
        return HttpResponse(status=404)

    protected = plain(counted := Counted(work))

    def outer(request: HttpRequest) -> HttpResponseBase:
        with transaction.atomic():
            Account.objects.get_or_create(name="of the middleware")
            return protected(request)

    serve(view=transaction.non_atomic_requests(outer))
    assert [sender.send().status_code for _ in range(2)] == [404, 404]
    assert (counted.runs, Entry.objects.count(), Account.objects.count()) == (1, 0, 1)
