"""The outcome of each call of an operation: the signal, and the counts of the dashboard."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from django.core import mail
from django.db import transaction
from django.utils.translation import gettext_lazy

from idempotency import signals
from idempotency.admin import traffic
from idempotency.exceptions import (
    InterventionRequired,
    KeyReused,
    Rejected,
    Unavailable,
    Unfinished,
)
from idempotency.models import IdempotencyKey, TrafficCount
from idempotency.signals import RequestOutcome
from tests.models import Entry
from tests.operations import Bank, charge, note, pay, pay_without_undo

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _forget(transactional_db: None) -> Iterator[None]:
    traffic._counts.clear()
    yield
    traffic._counts.clear()


@pytest.fixture
def sent() -> Iterator[list[tuple[RequestOutcome, IdempotencyKey | None]]]:
    """Return the outcomes with their keys."""
    found: list[tuple[RequestOutcome, IdempotencyKey | None]] = []

    def receive(
        *, key: Any, request: Any, outcome: RequestOutcome, seconds: float, **kwargs: Any
    ) -> None:
        assert request is None
        assert 0 <= seconds < 60
        found.append((outcome, key))

    signals.request_answered.connect(receive)
    yield found
    signals.request_answered.disconnect(receive)


def outcomes(sent: list[tuple[RequestOutcome, IdempotencyKey | None]]) -> list[str]:
    return [outcome.value for outcome, _ in sent]


def test_a_plain_operation_has_one_outcome_for_each_call(sent: Any) -> None:
    note.once("key", name="one")
    note.once("key", name="one")
    with pytest.raises(KeyReused):
        note.once("key", name="two")
    with pytest.raises(ValueError, match="broken"):
        note.once("other", name="one", fails="breaks")
    for fails in ("raises", "returns"):
        for _ in range(2):
            with pytest.raises(Rejected):
                note.once(fails, name="one", fails=fails)
    refused = ["ran", "replayed"] * 2
    assert outcomes(sent) == ["ran", "replayed", "conflict", "failed", *refused]
    assert sent[0][1].idempotency_key == "key"
    assert sent[1][1] is None


def test_a_phased_operation_has_one_outcome_for_each_call(sent: Any, bank: Bank) -> None:
    pay.once("key", name="one", cents=900)
    pay.once("key", name="one", cents=900)
    with pytest.raises(Rejected):
        pay.once("declined", name="one", cents=402)
    with pytest.raises(ValueError, match="positive"):
        pay.once("failed", name="one", cents=0)
    with pytest.raises(InterventionRequired):
        pay_without_undo.once("stuck", name="one", cents=402)
    with pytest.raises(InterventionRequired):
        pay_without_undo.once("stuck", name="one", cents=402)
    assert outcomes(sent) == ["ran", "replayed", "ran", "failed", "conflict", "conflict"]


def test_a_refusal_may_have_a_lazy_translation_as_its_message(bank: Bank) -> None:
    def declines() -> None:
        raise Rejected("declined", gettext_lazy("The bank declined."))

    bank.before = declines
    for _ in range(2):
        with pytest.raises(Rejected, match="The bank declined"):
            charge.once("key", name="one", cents=900)
    assert (bank.requests, bank.transfers) == (1, {})


def test_a_refusal_without_a_message_shows_its_code(bank: Bank) -> None:
    def declines() -> None:
        raise Rejected("declined", cast(str, None))

    bank.before = declines
    for _ in range(2):
        with pytest.raises(Rejected) as refused:
            charge.once("key", name="one", cents=900)
        assert (str(refused.value), refused.value.message) == ("declined", "")


@pytest.mark.parametrize(
    ("error", "raised", "outcome"),
    [
        (Unavailable(), Unavailable, "failed"),
        (Unavailable(code="conflict"), Unavailable, "conflict"),
        (OSError("no route"), Unfinished, "failed"),
    ],
)
def test_a_lost_database_is_a_failure_and_not_a_conflict(
    sent: Any, bank: Bank, error: Exception, raised: type[Exception], outcome: str
) -> None:
    def fails() -> None:
        raise error

    bank.after = fails
    with pytest.raises(raised):
        charge.once("key", name="one", cents=900)
    assert outcomes(sent) == [outcome]


def test_an_operation_in_a_transaction_has_its_outcome_after_the_commit(sent: Any) -> None:
    with transaction.atomic():
        note.once("key", name="one")
        assert not sent
    assert outcomes(sent) == ["ran"]
    with transaction.atomic():
        note.once("key", name="one")
        with pytest.raises(ValueError):
            note.once("broken", name="three", fails="breaks")
        assert outcomes(sent) == ["ran"]
    assert outcomes(sent) == ["ran", "replayed", "failed"]
    with transaction.atomic():
        note.once("rolled back", name="two")
        transaction.set_rollback(True)
    assert outcomes(sent) == ["ran", "replayed", "failed"]
    assert Entry.objects.get().name == "one"


def test_a_process_without_requests_writes_its_counts_after_an_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(mail, "outbox")
    monkeypatch.setattr(traffic, "_next_write", 0.0)
    note.once("key", name="one")
    note.once("key", name="one")  # The next write is ten seconds later.
    assert [count.kind.partition(" ")[0] for count in TrafficCount.objects.all()] == ["ran"]
    assert traffic._counts.total() == 1


def test_counts_are_not_written_into_the_transaction_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(mail, "outbox")
    monkeypatch.setattr(traffic, "_next_write", 0.0)
    note.once("key", name="one")
    monkeypatch.setattr(traffic, "_next_write", 0.0)
    with transaction.atomic():
        note.once("key", name="one")
        assert traffic._counts.total() == 1
    transaction.set_autocommit(False)
    try:
        monkeypatch.setattr(traffic, "_next_write", 0.0)
        with pytest.raises(RuntimeError):
            note.once("other", name="one")
        assert traffic._counts.total() == 2
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
