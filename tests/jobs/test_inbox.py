"""The inbox: a message that is delivered twice takes effect once."""

import signal
import sqlite3
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext, suppress
from functools import partial

import pytest
from django.db import (
    DatabaseError,
    Error,
    IntegrityError,
    OperationalError,
    connection,
    transaction,
)
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext
from psycopg import IsolationLevel

from idempotency import inbox
from idempotency._engine import database_product
from idempotency._engine.transactions import durable_transaction
from idempotency.contrib import rq as rq_backend
from idempotency.exceptions import MessageInProgress
from idempotency.inbox import process_once
from idempotency.models import ProcessedMessage
from rides_demo.models import AuditRecord
from tests.factories import AuditRecordFactory, UserFactory
from tests.kit import commands
from tests.kit.breaking import BREAKS, breaks_behind
from tests.kit.database import waits_for_a_lock
from tests.kit.threads import Gate, elsewhere, in_background
from tests.kit.waiting import eventually
from tests.models import Account, Entry


def deliver(user, *, gate=None, fail=False):
    """Take one delivery of the message: leave a row, then wait at the gate."""
    with process_once("stripe", "evt_1") as first:
        if first:
            AuditRecordFactory(user=user)
            if gate:
                gate.wait_here()
            if fail:
                raise RuntimeError("on purpose")
        return first


@pytest.fixture
def first_delivery(monkeypatch):
    """Run a delivery that holds its transaction open until the test lets it go; the second one is
    patient."""
    monkeypatch.setattr(inbox, "WAIT_SECONDS", 60)
    gate, begun = Gate(), []

    def start(**options):
        user = UserFactory()
        begun.append(in_background(partial(deliver, user, gate=gate, **options)))
        gate.wait_until_reached()
        return user, gate, begun[0]

    yield start
    gate.open()
    wait(begun, 60)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_transaction_around_it_keeps_its_own_limit(settings):
    settings.IDEMPOTENCY = {
        **settings.IDEMPOTENCY,
        "INBOX_IDLE_SECONDS": 3600,
        "LOCK_TIMEOUT_SECONDS": 90,
    }

    def limit():
        with connection.cursor() as cursor:
            cursor.execute("SHOW idle_in_transaction_session_timeout")
            return cursor.fetchone()[0]

    with process_once("stripe", "evt_1"):
        assert limit() == "1h"
    with durable_transaction(None, using="default"), process_once("stripe", "evt_2"):
        assert limit() == "90s"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("block", [nullcontext, transaction.atomic])
def test_without_autocommit_it_is_refused(block):
    """Nothing would commit the effect: the consumer would acknowledge the message, and the
    connection would roll it back."""
    transaction.set_autocommit(False)
    try:
        with (
            pytest.raises(RuntimeError, match="set_autocommit"),
            block(),
            process_once("stripe", "evt_1"),
        ):
            Account.objects.create(name="jane")
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert not Account.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_the_second_delivery_is_told_so():
    user = UserFactory()
    assert [deliver(user), deliver(user), deliver(user)] == [True, False, False]
    assert AuditRecord.objects.count() == 1
    assert ProcessedMessage.objects.get().message_id == "evt_1"


@pytest.mark.django_db(transaction=True)
def test_a_failure_leaves_no_row_and_the_next_delivery_does_the_work():
    user = UserFactory()
    with pytest.raises(RuntimeError, match="on purpose"):
        deliver(user, fail=True)
    assert not AuditRecord.objects.exists()
    assert not ProcessedMessage.objects.exists()
    assert deliver(user) is True


@pytest.mark.django_db(transaction=True)
def test_sources_number_their_messages_each_for_itself():
    for source in ("stripe", "paypal"):
        with process_once(source, "1") as first:
            assert first
    with process_once("stripe", "1 ") as first:
        assert first


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_second_delivery_waits_for_the_first_and_does_nothing(first_delivery):
    user, gate, first = first_delivery()
    second = in_background(lambda: deliver(user))
    eventually(waits_for_a_lock)
    gate.open()
    assert (first.result(60), second.result(60)) == (True, False)
    assert AuditRecord.objects.count() == 1


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_second_delivery_is_refused_at_a_high_level_when_the_first_commits(first_delivery):
    """Its snapshot does not contain the row of the first."""

    def deliver_serializable():
        connection.ensure_connection()
        own = connection.connection
        before, own.isolation_level = own.isolation_level, IsolationLevel.SERIALIZABLE
        try:
            return deliver(user)
        finally:
            own.isolation_level = before  # A pool may keep the connection.

    user, gate, first = first_delivery()
    second = in_background(deliver_serializable)
    eventually(waits_for_a_lock)
    gate.open()
    assert first.result(60) is True
    with pytest.raises(MessageInProgress):
        second.result(60)
    assert deliver(user) is False
    assert AuditRecord.objects.count() == 1


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_second_delivery_does_the_work_when_the_first_fails(first_delivery):
    user, gate, first = first_delivery(fail=True)
    second = in_background(lambda: deliver(user))
    eventually(waits_for_a_lock)
    gate.open()
    with pytest.raises(RuntimeError):
        first.result(60)
    assert second.result(60) is True
    assert AuditRecord.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_second_delivery_is_refused_when_the_first_takes_too_long(first_delivery, monkeypatch):
    monkeypatch.setattr(inbox, "WAIT_SECONDS", 1)
    if connection.vendor == "sqlite":
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 1)
    user, gate, first = first_delivery()
    with pytest.raises(MessageInProgress):
        elsewhere(lambda: deliver(user))
    gate.open()
    assert first.result(60) is True
    assert deliver(user) is False
    assert AuditRecord.objects.count() == 1


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_refusal_in_an_outer_transaction_leaves_it_usable(first_delivery, monkeypatch):
    monkeypatch.setattr(inbox, "WAIT_SECONDS", 1)
    user, gate, first = first_delivery()
    with transaction.atomic():
        with pytest.raises(MessageInProgress), process_once("stripe", "evt_1"):
            pytest.fail("this delivery must not run")
        AuditRecordFactory(user=user, action="outer")
    gate.open()
    assert first.result(60) is True
    assert AuditRecord.objects.filter(action="outer").exists()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("own", ["0", "1234ms"])
def test_the_statements_of_the_block_keep_their_own_lock_timeout(own):
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [own])
        for _ in range(2):
            with process_once("stripe", "evt_1"):
                cursor.execute("SHOW lock_timeout")
                assert cursor.fetchone()[0] == own


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("citus", [False, True])
def test_the_wait_is_limited_on_the_workers_of_citus_too(citus, monkeypatch):
    monkeypatch.setattr(database_product, "is_citus", lambda connection: citus)
    with CaptureQueriesContext(connection) as captured:
        _first()
    # Django does not know each text that the server has prepared.
    texts = [query["sql"] or "" for query in captured]
    limits = [text for text in texts if text.startswith("SET LOCAL lock_timeout")]
    assert limits == (
        ["SET LOCAL lock_timeout = '5s'", "SET LOCAL lock_timeout = '0'"] if citus else []
    )


@pytest.mark.django_db(transaction=True)
def test_an_outer_transaction_takes_the_row_with_it():
    with transaction.atomic():
        with process_once("stripe", "evt_1") as first:
            assert first
        with process_once("stripe", "evt_1") as again:
            assert not again
        transaction.set_rollback(True)
    assert not ProcessedMessage.objects.exists()


@pytest.mark.django_db
def test_it_works_in_a_test_case():
    assert [once() for once in (_first, _first)] == [True, False]


def _first():
    with process_once("stripe", "evt_1") as first:
        return first


@pytest.mark.django_db
def test_what_is_just_short_enough_is_kept():
    with process_once("s" * 100, "1" * 255) as first:
        assert first


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("source", "message_id"),
    [("", "1"), ("s", ""), ("s" * 101, "1"), ("s", "1" * 256), ("s", "a\0"), ("s", 7)],
)
def test_what_cannot_be_kept_is_refused(source, message_id):
    with pytest.raises(ValueError, match="string of 1 to"), process_once(source, message_id):
        pytest.fail("this must not run")


def job_that_catches_its_error() -> str:
    """Write, then try what may be there already, as jobs do."""
    Entry.objects.create(name="work of the job")
    with suppress(IntegrityError):
        Account.objects.create(name="taken")
    return "done"


def job_that_catches_a_raw_error() -> str:
    """Write, then try a statement that fails."""
    Entry.objects.create(name="work of the job")
    with suppress(Error):
        connection.cursor().execute("SELECT 1 / 0")
    return "done"


def job_that_closes_its_connection() -> str:
    """Write, then leave no connection behind, as long-lived workers are told to."""
    Entry.objects.create(name="work of the job")
    connection.close()
    return "done"


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("job", "error"),
    [
        (job_that_catches_its_error, TransactionManagementError),
        (job_that_catches_a_raw_error, TransactionManagementError),
        (job_that_closes_its_connection, DatabaseError),  # a pool raises another one
    ],
)
def test_a_job_that_lost_its_transaction_fails_and_leaves_nothing(
    job: Callable[[], str], error: type[Exception]
) -> None:
    """It returned a value, but RQ must try it again."""
    Account.objects.create(name="taken")
    with pytest.raises(error):
        rq_backend.run_once(
            f"{__name__}.{job.__name__}", {}, "00000000-0000-7000-8000-00000000000a"
        )
    assert not Entry.objects.exists()
    assert not ProcessedMessage.objects.exists()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_message_that_lost_its_transaction_fails_and_the_next_delivery_is_the_first() -> None:
    taken = Account.objects.create(name="taken")

    def deliver() -> bool:
        with process_once("stripe", "evt_1") as first:
            job_that_catches_its_error()
        return first

    with pytest.raises(TransactionManagementError):
        deliver()
    assert not Entry.objects.exists()
    assert not ProcessedMessage.objects.exists()
    taken.delete()
    assert deliver()
    assert Entry.objects.count() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("end", ["ROLLBACK", "COMMIT"])
def test_a_block_that_ends_its_transaction_by_hand_fails(end: str) -> None:
    """What it writes afterwards is committed on SQLite, which begins no transaction by itself."""

    def legacy_job() -> None:
        with process_once("queue", "1"):
            connection.cursor().execute(end)

    with pytest.raises(TransactionManagementError, match="ended its transaction"):
        legacy_job()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_message_whose_work_rolls_back_by_itself_fails_and_leaves_nothing() -> None:
    def legacy_job() -> None:
        with process_once("queue", "1") as first:
            if first:
                connection.cursor().execute("ROLLBACK")
                Entry.objects.create(name="paid")

    for _ in range(2):
        with pytest.raises(TransactionManagementError):
            legacy_job()
        assert not Entry.objects.exists()
        assert not ProcessedMessage.objects.exists()


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_block_that_rolls_back_the_mark_of_its_message_fails() -> None:
    def legacy_job() -> None:
        with transaction.atomic():
            connection.cursor().execute("SAVEPOINT earlier")
            with process_once("queue", "1"):
                connection.cursor().execute("ROLLBACK TO SAVEPOINT earlier")

    with pytest.raises(TransactionManagementError, match="ended its transaction"):
        legacy_job()
    assert not ProcessedMessage.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_message_may_bring_another_one() -> None:
    with (
        process_once("queue", "1"),
        process_once("queue", "2"),
        transaction.atomic(),
        process_once("queue", "3") as third,
    ):
        assert third
    assert ProcessedMessage.objects.count() == 3


TAKE_AND_STAND_STILL = """
import django, sys, threading
django.setup()
from django.conf import settings
from idempotency.inbox import process_once
settings.IDEMPOTENCY = {"INBOX_IDLE_SECONDS": 1}
with process_once("queue", "1"):
    print("taken", flush=True)
    threading.Event().wait()
"""


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.processes
def test_a_delivery_that_stands_still_does_not_hold_its_message_for_ever() -> None:
    with commands.start(python=TAKE_AND_STAND_STILL) as process:
        assert process.stdout.readline() == "taken\n"
        process.send_signal(signal.SIGSTOP)
        with process_once("queue", "1") as first:
            assert first


@pytest.mark.parametrize(
    ("code", "is_held"), [(5, True), (6, True), (5 | 1 << 8, True), (4, False), (None, False)]
)
def test_a_writer_of_sqlite_holds_the_message(code, is_held):
    """The second byte of the code says why: here, another process recovers the journal."""
    error, cause = OperationalError(), sqlite3.OperationalError()
    error.__cause__ = cause
    if code is not None:
        cause.sqlite_errorcode = code
    assert inbox._is_held_by_another(error) is is_held


@pytest.mark.postgres
@pytest.mark.parametrize("break_transaction", BREAKS)
def test_a_wrapper_that_breaks_the_transaction_behind_its_last_statement_is_told(
    break_transaction, transactional_db
):
    user = UserFactory()
    with (
        breaks_behind("SELECT current_setting('idempotency.transaction'", break_transaction),
        pytest.raises(TransactionManagementError),
    ):
        deliver(user)
    assert not AuditRecord.objects.exists()
    assert deliver(user)
