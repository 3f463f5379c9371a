"""A middleware has set the tenant of the session, and the session is lost: the rest of the request
runs in no other session."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from idempotency.decorators import idempotent
from idempotency.phases import atomic_phase
from tests.kit.duplicates import waiting_requests
from tests.kit.outages import cut_this_connection
from tests.kit.serving import Sender, View, another_client
from tests.kit.threads import Gate, in_background
from tests.kit.views import both_kinds
from tests.kit.waiting import eventually
from tests.models import Entry

Kind = Callable[..., View]
Serve = Callable[..., None]

pytestmark = pytest.mark.postgres


def _set_tenant(request: HttpRequest) -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('app.tenant', 'a', false)")
    return "scope"


def _tenant() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('app.tenant', true)")
        return str(cursor.fetchone()[0] or "")


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


@pytest.mark.parametrize(
    "lose",
    [
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

    @idempotent(recovery_points=[], scope=_set_tenant)
    def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        if losses:
            losses.pop()(key)
        with atomic_phase(key) as phase:
            tenants.append(_tenant())
            phase.set_response(HttpResponse(status=201))
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 503
    assert sender.send().status_code == 201
    assert tenants == ["a"]


@both_kinds
def test_no_retry_in_the_process_runs_in_a_new_session(
    kind: Kind, serve: Serve, sender: Sender
) -> None:
    """The connection is lost after a serialization failure, so the ROLLBACK fails."""
    tenants: list[str] = []

    def work(request: HttpRequest) -> HttpResponse:
        tenants.append(_tenant())
        if len(tenants) == 1:
            try:
                with connection.cursor() as cursor:
                    cursor.execute(
                        "DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$"
                    )
            finally:
                cut_this_connection()
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
