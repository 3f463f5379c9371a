"""Code of the project breaks a transaction of a request and catches the error. Django then rolls
the transaction back without an error, so no response may be stored that says that it committed."""

from contextlib import suppress

import pytest
from django.db import DatabaseError, connection, transaction
from django.db.models.signals import post_delete, post_save
from django.http import HttpResponse

from idempotency import signals
from idempotency.models import DownstreamCall
from idempotency.phases import atomic_phase
from tests.factories import UserFactory
from tests.kit.breaking import BREAKS
from tests.kit.views import both_kinds, over_key, plain
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=BREAKS)
def break_transaction(request):
    """Return the way in which code of the project breaks a transaction."""
    return request.param


def test_no_receiver_rolls_the_intent_of_a_call_back(break_transaction, serve, sender):
    made = []

    def pay(key):
        with key.call("pay", at_most_once=True) as call:
            made.append(DownstreamCall.objects.count())
            if len(made) == 1:
                call.retryable()
                raise OSError
            call.record("paid")
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))

    for signal in (post_save, post_delete):
        signal.connect(break_transaction, sender=DownstreamCall)
    try:
        UserFactory()
        serve(view=over_key(pay))
        assert [sender.send().status_code for _ in range(2)] == [500, 201]
    finally:
        for signal in (post_save, post_delete):
            signal.disconnect(break_transaction, sender=DownstreamCall)
    assert made == [1, 1]


@both_kinds
def test_a_wrapper_that_breaks_the_transaction_behind_the_last_statement_is_told(
    kind, break_transaction, serve, sender
):
    def work(request):
        Entry.objects.create(name="booked")
        return HttpResponse(status=201)

    def wrapper(execute, sql, params, many, context):
        # As a slow-query log may do, whose own statement fails.
        result = execute(sql, params, many, context)
        if "idempotency_idempotencykey" in sql and sql.startswith("UPDATE"):
            break_transaction()
        return result

    serve(view=kind(work))
    with connection.execute_wrapper(wrapper):
        assert sender.send().status_code == 500
    assert not Entry.objects.exists()
    assert sender.send().status_code == 201


@pytest.mark.parametrize("signal", [signals.key_replayed, signals.request_answered])
def test_a_receiver_of_a_signal_rolls_no_transaction_of_the_caller_back(
    signal, break_transaction, serve, sender
):
    protected = plain(lambda request: HttpResponse(status=201))

    def view(request):
        with transaction.atomic():
            Entry.objects.create(name="order")
            return protected(request)

    serve(view=view)
    sender.send()
    signal.connect(break_transaction)
    try:
        assert sender.send().status_code == 201
    finally:
        signal.disconnect(break_transaction)
    assert Entry.objects.count() == 2


@pytest.mark.postgres
def test_a_transaction_that_is_lost_while_receivers_run_is_told(serve, sender):
    protected = plain(lambda request: HttpResponse(status=201))

    def view(request):
        with transaction.atomic():
            Entry.objects.create(name="order")
            return protected(request)

    def lose_session(**kwargs):
        with suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    serve(view=view)
    sender.send()
    signals.key_replayed.connect(lose_session)
    try:
        assert sender.send().status_code >= 500
    finally:
        signals.key_replayed.disconnect(lose_session)
        connection.close()
    assert Entry.objects.count() == 1
