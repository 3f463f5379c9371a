"""Code of the project breaks a transaction of a request and catches the error. Django then rolls
the transaction back without an error, so no response may be stored that says that it committed."""

import logging
from asyncio import CancelledError
from contextlib import suppress
from functools import partial

import psycopg
import pytest
from django.core.signals import request_finished
from django.db import DatabaseError, connection, connections, transaction
from django.db.models.signals import post_delete, post_save
from django.http import HttpResponse
from django.test import TestCase

from idempotency import interventions, signals
from idempotency._engine.events import COUNTED, log_committed
from idempotency.decorators import idempotent
from idempotency.exceptions import KeyStuck
from idempotency.models import DownstreamCall, IdempotencyKey
from idempotency.phases import atomic_phase
from tests import operations
from tests.factories import UserFactory
from tests.kit.breaking import BREAKS, breaks_behind
from tests.kit.outages import cut_this_connection
from tests.kit.views import both_kinds, over_key, plain, two_phases
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


def test_a_replay_is_sent_although_its_transaction_was_broken(break_transaction, serve, sender):
    """It has written nothing, so it needs no COMMIT."""
    serve(view=plain(lambda request: HttpResponse(status=201)))
    sender.send()
    with breaks_behind("lock_seconds", break_transaction):
        assert sender.send().status_code == 201


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


def raw(statement, using="default"):
    """Send a statement that Django does not see; hide its error."""
    with suppress(psycopg.Error):
        connections[using].connection.execute(statement)


def test_no_call_is_made_whose_intent_was_rolled_back(break_transaction, serve, sender):
    made = []

    def pay(key):
        with key.call("pay", at_most_once=True) as call:
            made.append(DownstreamCall.objects.count())
            call.record("paid")
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))

    serve(view=over_key(pay))
    with breaks_behind('INSERT INTO "idempotency_downstreamcall"', break_transaction):
        assert sender.send().status_code == 500
    assert not made
    assert sender.send().status_code == 201
    assert made == [1]


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_no_response_is_stored_if_another_database_would_roll_back(serve, sender, monkeypatch):
    def work(request):
        Entry.objects.create(name="here")
        Entry.objects.using("shard_b").create(name="there")
        return HttpResponse(status=201)

    monkeypatch.setitem(connections.settings["shard_b"], "ATOMIC_REQUESTS", True)
    serve(view=plain(work))
    last = "SET CONSTRAINTS ALL DEFERRED"
    with breaks_behind(last, partial(raw, "SELECT 1/0", "shard_b"), "shard_b"):
        assert sender.send().status_code == 500
    assert sender.send().status_code == 201
    assert (Entry.objects.count(), Entry.objects.using("shard_b").count()) == (1, 1)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
@pytest.mark.parametrize("signal", [signals.key_claimed, signals.key_finished])
def test_a_receiver_at_commit_rolls_no_other_transaction_of_the_caller_back(signal):
    def receive(**kwargs):
        raw("SELECT 1/0", "shard_b")

    signal.connect(receive)
    try:
        with transaction.atomic("shard_b"):
            Entry.objects.using("shard_b").create(name="order")
            with transaction.atomic():
                operations.note.once("1", name="noted")
    finally:
        signal.disconnect(receive)
    assert (Entry.objects.count(), Entry.objects.using("shard_b").count()) == (1, 1)


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_what_receivers_do_changes_nothing_that_is_committed(serve, sender, caplog):
    hooks = []

    def close_other(**kwargs):
        connections["shard_b"].close()

    async def cancelled(**kwargs):
        raise CancelledError

    def work(key):
        with atomic_phase(key) as phase:
            transaction.on_commit(lambda: hooks.append(1))
            phase.set_response(HttpResponse(status=201))

    protected = over_key(work)

    def view(request):
        with transaction.atomic("shard_b"):
            Entry.objects.using("shard_b").create(name="order")
            return protected(request)

    sent = [signals.key_claimed, signals.phase_committed, signals.key_finished]
    serve(view=view)
    for receive in (close_other, cancelled):
        for signal in sent:
            signal.connect(receive)
    try:
        assert sender.send().status_code == 201
    finally:
        for receive in (close_other, cancelled):
            for signal in sent:
                signal.disconnect(receive)
    assert hooks == [1]
    assert Entry.objects.using("shard_b").count() == 1
    assert caplog.text.count("a receiver of a signal failed: CancelledError") == 3


@pytest.fixture
def sent():
    """Yield the list of the signals that a project has received, each with the point of its key."""
    got = []

    def receive(signal, key, **kwargs):
        assert not any(each.in_atomic_block for each in connections.all())
        got.append((signal, getattr(key, "recovery_point", None)))

    every = (
        *(signals.key_claimed, signals.phase_committed, signals.key_finished),
        *(signals.key_replayed, signals.request_answered),
    )
    for signal in every:
        signal.connect(receive)
    yield got
    for signal in every:
        signal.disconnect(receive)


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
@pytest.mark.parametrize("outer", ["default", "shard_b"])
@pytest.mark.parametrize("inner", ["default", "shard_b"])
@pytest.mark.parametrize("rolls_back", ["outer", "inner", ""])
def test_a_signal_waits_for_the_transactions_of_the_caller(rolls_back, inner, outer, sent):
    """First for that of the work: the signal must not tell of work that was rolled back."""
    with suppress(OSError), transaction.atomic(outer):
        with suppress(OSError), transaction.atomic(inner):
            for _ in range(2):
                operations.note.once("1", name="noted")
            if rolls_back == "inner":
                raise OSError
        if rolls_back == "outer":
            raise OSError
        assert not sent
    work, replay = [signals.key_claimed, signals.key_finished], [signals.key_replayed]
    done = IdempotencyKey.objects.exists()
    assert done == ({"outer": outer, "inner": inner}.get(rolls_back) != "default")
    if not rolls_back:
        answered = [signals.request_answered]
        assert [signal for signal, _ in sent] == [*work, *answered, *replay, *answered]
    elif not done:
        assert not set(work) & {signal for signal, _ in sent}


@pytest.mark.parametrize("outer", ["default", "shard_b"])
@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_signal_waits_once_for_each_transaction(outer):
    """A test calls the hooks inside the block; a database without autocommit calls none."""
    got = []
    signals.key_finished.connect(receive := lambda **kwargs: got.append(1))
    other = connections["shard_b"]
    if outer == "shard_b":
        other.set_autocommit(False)
    try:
        with transaction.atomic(outer):
            with TestCase.captureOnCommitCallbacks(execute=True):
                operations.note.once("1", name="noted")
            assert got == [1]
    finally:
        signals.key_finished.disconnect(receive)
        other.rollback()
        other.set_autocommit(True)


@pytest.mark.django_db(transaction=True, databases=["default", "shard_b"])
def test_a_signal_that_waited_has_the_key_as_it_was(serve, sender, sent):
    protected = two_phases(lambda request: None, lambda request: HttpResponse(status=201))

    def view(request):
        with transaction.atomic("shard_b"):
            return protected(request)

    serve(view=view)
    assert sender.send().status_code == 201
    assert [point for signal, point in sent if signal is signals.phase_committed] == [
        "between",
        "finished",
    ]


@pytest.mark.django_db(transaction=True)
def test_a_receiver_of_the_project_changes_nothing_that_the_app_counts(sent):
    outcomes = []
    count = lambda outcome, **kwargs: outcomes.append(outcome)  # noqa: E731
    COUNTED[signals.request_answered].connect(count)
    try:
        with transaction.atomic():
            for _ in range(2):
                operations.note.once("1", name="noted")
            transaction.set_rollback(True)
    finally:
        COUNTED[signals.request_answered].disconnect(count)
    assert (sent, outcomes) == ([], [signals.RequestOutcome.REPLAYED])


class RaisingLog(logging.Handler):
    """A log whose errors are raised."""

    def emit(self, record):
        raise OSError


def test_a_log_that_raises_changes_no_answer_and_drops_no_signal(serve, sender, monkeypatch):
    def work(key):
        raise KeyStuck("It waits for a decision.")

    def receive(key, **kwargs):
        told.append(key.stuck_reason)

    told = []
    serve(view=over_key(work))
    monkeypatch.setattr(logging.getLogger("idempotency"), "handlers", [RaisingLog()])
    signals.key_stuck.connect(receive)
    try:
        assert sender.send().status_code == 409
    finally:
        signals.key_stuck.disconnect(receive)
    assert told == ["It waits for a decision."]


def test_a_log_that_raises_drops_no_hook_of_the_caller(serve, sender, monkeypatch):
    def work(request):
        raise OSError

    hooks = []
    serve(view=over_key(work))
    sender.send()
    key = IdempotencyKey.objects.get()
    monkeypatch.setattr(logging.getLogger("idempotency"), "handlers", [RaisingLog()])
    with transaction.atomic():
        assert interventions.hand_back(key.pk, key.claim_token, by="jane")
        log_committed(partial(logging.getLogger("idempotency").warning, "done"), using="default")
        transaction.on_commit(lambda: hooks.append(1))
    assert hooks == [1]


@pytest.mark.postgres
def test_no_work_begins_in_a_transaction_that_other_code_left_open():
    """Its rollback would forget the key, and the next call would have another one."""
    operations.note.once("1", name="noted")
    raw("BEGIN")
    try:
        for call in (
            lambda: operations.charge.once("1", name="charged", cents=5),
            lambda: operations.note.once("2", name="noted"),
        ):
            with pytest.raises(RuntimeError, match="did not open is open on 'default'"):
                call()
    finally:
        raw("ROLLBACK")
    assert IdempotencyKey.objects.count() == 1


@pytest.mark.parametrize(
    ("place", "answers"), [("before a phase", [500, 201]), ("at the end", [503, 201])]
)
def test_what_a_view_begins_by_itself_takes_nothing_of_the_key_into_it(
    place, answers, serve, sender
):
    """The rollback of such a transaction would undo the release of the key."""
    left = [place]

    def begin(here):
        if here in left:
            left.clear()
            connection.connection.execute("BEGIN")

    def work(key):
        with key.call("pay", at_most_once=True) as call:
            if call.due:
                call.record("paid")
        begin("before a phase")
        with atomic_phase(key) as phase:
            phase.set_recovery_point("unused")

    def end(key):
        if place == "at the end" and left:
            begin(place)
            return HttpResponse(status=503)
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))
        return None

    @idempotent(recovery_points=["unused"])
    def view(request):
        key = request.idempotency_key
        for point in key.phases():
            if response := (work if point == "started" else end)(key):
                return response
        return key.response()

    serve(view=view)
    assert [sender.send().status_code for _ in answers] == answers
    assert DownstreamCall.objects.get().recorded_at is not None


def half_read(alias):
    """Return an iterator of psycopg, with whose lock the next statement would wait for ever."""
    rows = connections[alias].connection.cursor().stream("SELECT generate_series(1, 100000)")
    next(rows)
    return rows


def begin_and_write():
    connection.connection.execute("BEGIN")
    Entry.objects.create(name="receipt")


def write_without_autocommit():
    transaction.set_autocommit(False)
    Entry.objects.create(name="receipt")


def read_without_autocommit():
    write_without_autocommit()
    return half_read("default")


@pytest.mark.parametrize(
    "begin",
    [
        begin_and_write,
        write_without_autocommit,
        pytest.param(read_without_autocommit, marks=pytest.mark.postgres),
    ],
)
@pytest.mark.parametrize("error", [None, OSError])
def test_a_call_whose_block_leaves_a_transaction_open_is_in_doubt(begin, error, serve, sender):
    """A retry finds a recorded result, skips the block, and would not repeat its writes."""
    kept = []

    def work(key):
        with key.call("pay", at_most_once=True) as call:
            if call.due:
                kept.append(begin())
                call.record("paid")
                if error:
                    raise error
        raise AssertionError

    serve(view=over_key(work))
    assert [sender.send().status_code for _ in range(3)] == [500 if error else 409, 409, 409]
    assert not Entry.objects.exists()
    assert len(kept) == 1, "the call is not made again"
    key = IdempotencyKey.objects.get()
    assert key.stuck_code == "call_in_doubt"
    assert ("left it open" in key.stuck_reason) == (error is None)


@pytest.mark.postgres
def test_a_call_whose_transaction_was_lost_with_its_session_is_in_doubt(serve, sender):
    made = []

    def work(key):
        with key.call("pay", at_most_once=True) as call:
            if call.due:
                made.append(1)
                write_without_autocommit()
                call.record("paid")
                cut_this_connection()
                with suppress(DatabaseError):
                    Entry.objects.exists()
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))

    serve(view=over_key(work))
    assert sender.send().status_code >= 400
    assert [sender.send().status_code for _ in range(2)] == [409, 409]
    assert (made, Entry.objects.count()) == ([1], 0)
    assert IdempotencyKey.objects.get().stuck_code == "call_in_doubt"


@pytest.mark.parametrize("error", [None, OSError])
def test_a_call_that_took_no_effect_is_repeated_although_its_block_left_a_transaction_open(
    error, serve, sender
):
    made = []

    def work(key):
        with key.call("pay", at_most_once=True) as call:
            made.append(Entry.objects.count())
            if len(made) == 1:
                write_without_autocommit()
                call.retryable()
                if error:
                    raise error
            else:
                call.record("paid")
        with atomic_phase(key) as phase:
            phase.set_response(HttpResponse(status=201))

    serve(view=over_key(work))
    assert [sender.send().status_code for _ in range(2)] == [500, 201]
    assert made == [0, 0]


@pytest.mark.postgres
def test_a_transaction_that_was_left_open_fails_one_request_only(
    serve, client, sender, monkeypatch
):
    """Django closes no connection for it."""
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", None)
    serve(view=plain(lambda request: HttpResponse(status=201)))
    raw("BEGIN")
    assert sender.send().status_code == 500
    request_finished.send(sender=None)
    assert sender.send().status_code == 201


@pytest.mark.postgres
def test_a_block_that_raises_with_a_transaction_open_keeps_its_error(serve, sender):
    def work(key):
        with key.call("pay", at_most_once=True) as call:
            raw("BEGIN")
            call.record("paid")
            raise KeyStuck("Look.")

    serve(view=over_key(work))
    assert sender.send().status_code == 409
    assert IdempotencyKey.objects.get().stuck_code == "view_gave_up"


def test_an_operation_in_a_transaction_of_the_caller_tells_that_it_was_rolled_back(
    break_transaction,
):
    UserFactory()
    with transaction.atomic():
        Entry.objects.create(name="order")
        with (
            breaks_behind("UPDATE idempotency_idempotencykey", break_transaction),
            pytest.raises(DatabaseError),
        ):
            operations.note.once("1", name="noted")
        assert operations.note.once("1", name="noted")
    assert Entry.objects.count() == 2
