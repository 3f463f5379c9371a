"""The inbox: a message that is delivered twice takes effect once."""

from concurrent.futures import wait
from functools import partial

import pytest
from django.db import connection, transaction

from idempotency import inbox
from idempotency.exceptions import MessageInProgress
from idempotency.inbox import process_once
from idempotency.models import ProcessedMessage
from idempotency.transactions import durable_transaction
from rides_demo.models import AuditRecord
from tests.factories import AuditRecordFactory, UserFactory
from tests.kit.database import waits_for_a_lock
from tests.kit.threads import Gate, elsewhere, in_background
from tests.kit.waiting import eventually


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
    """Run a delivery that holds its transaction open until the test lets it go; the second one is patient."""
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
def test_a_transaction_around_it_keeps_its_own_limit():
    def limit():
        with connection.cursor() as cursor:
            cursor.execute("SHOW idle_in_transaction_session_timeout")
            return cursor.fetchone()[0]

    with process_once("stripe", "evt_1"):
        assert limit() == "1h"
    with durable_transaction(None, using="default"), process_once("stripe", "evt_2"):
        assert limit() == "90s"


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
@pytest.mark.parametrize(
    ("source", "message_id"), [("", "1"), ("s", ""), ("s" * 101, "1"), ("s", "1" * 256), ("s", "a\0"), ("s", 7)]
)
def test_what_cannot_be_kept_is_refused(source, message_id):
    with pytest.raises(ValueError, match="is a string of 1 to"), process_once(source, message_id):
        pytest.fail("this must not run")
