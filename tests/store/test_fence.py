"""Updates of a claimed key, without HTTP: what they write, and that only the run with the lock can
make them."""

import logging
import threading
from copy import copy
from functools import partial
from typing import Any

import pytest
from django.db import transaction

from idempotency import _watchdog
from idempotency._engine import decisions, events, fence, rows
from idempotency._engine.hung import watched_key
from idempotency._engine.transactions import durable_transaction
from idempotency.exceptions import LockLost
from idempotency.models import IdempotencyKey
from tests.factories import IdempotencyKeyFactory
from tests.kit.ageing import expire_lock
from tests.kit.claims import claim, claim_plain, finish

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_key_that_is_gone_is_read_as_none() -> None:
    key = claim().key
    IdempotencyKey.objects.all().delete()
    assert rows.read(key.pk, using="default") is None
    with pytest.raises(LockLost):
        rows.read_own(key, using="default")


def test_finishing_frees_the_lock_and_keeps_the_answer() -> None:
    key = claim().key
    fence.finish(key, fence.StoredResponse(201, {"A": "b"}, b"body"), using="default")
    row = IdempotencyKey.objects.get()
    assert (
        row.locked_until,
        row.response_code,
        row.response_headers,
        bytes(row.response_body),
    ) == (
        None,
        201,
        {"A": "b"},
        b"body",
    )
    assert [(event["event"], event["detail"]) for event in row.history][-1] == (
        "finished",
        "status 201",
    )


def test_a_plain_key_is_finished_at_the_time_that_its_claim_wrote() -> None:
    """Another time would move the row in the index of finished keys."""
    with transaction.atomic():
        key = claim_plain().key
        claimed_at = IdempotencyKey.objects.get().finished_at
        finish(key)
    assert IdempotencyKey.objects.get().finished_at == claimed_at


@pytest.mark.parametrize("last", [True, False], ids=["sent with COMMIT", "alone"])
def test_a_fenced_update_counts_as_progress_of_its_run(last: bool) -> None:
    """The watchdog of a loop ends a process whose run makes no progress."""
    key = claim().key
    with watched_key(key):
        run = _watchdog._runs[threading.get_ident()]
        run.progressed -= run.limit_seconds
        assert run.hangs
        with durable_transaction(None, using="default") as own:
            fence.renew(key, using="default", last_of=own if last else None)
        assert not run.hangs


def test_the_third_run_that_hangs_makes_the_key_stuck() -> None:
    location = "shop/views.py:7"
    for hangs in (1, 2, 3):
        key: Any = claim().key
        mark = partial(decisions.mark_hung, key, location, delay_seconds=30, using="default")
        assert not mark(), "its lock is valid"
        expire_lock()
        assert mark() is (hangs == 3)
        row = IdempotencyKey.objects.get()
        assert (row.hangs, row.last_error) == (hangs, f"The run hung at {location}.")
        with pytest.raises(LockLost):
            finish(key)
    assert row.stuck_code == "hung"
    assert row.stuck_reason == f"3 runs hung. The last one hung at {location}."


def test_a_run_that_does_not_know_of_its_commit_cannot_write_over_it() -> None:
    """The run has an older recovery point than the row, but its token is still valid."""
    key = claim().key
    fence.advance(key, "paid", using="default")
    assert key.recovery_point == "started"
    for change in (lambda: fence.advance(key, "paid", using="default"), lambda: finish(key)):
        with pytest.raises(LockLost):
            change()
    assert IdempotencyKey.objects.get().recovery_point == "paid"


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 199 + "…"),
        ("OSError: down\nsee below", "OSError: down …"),
    ],
)
def test_a_text_that_the_history_cuts_ends_with_a_sign(error: str, detail: str) -> None:
    key = claim().key
    fence.release(key, error, using="default")
    row = IdempotencyKey.objects.get()
    assert (row.history[-1]["detail"], row.last_error) == (detail, error)


def test_what_is_finished_is_neither_released_nor_stuck() -> None:
    key = claim().key
    finish(key)
    fence.release(key, "late", using="default")
    assert decisions.give_up(key.pk, "code", "reason", using="default") is False
    with pytest.raises(LockLost):
        fence.mark_stuck(key, "code", "reason", using="default")
    row = IdempotencyKey.objects.get()
    assert (row.last_error, row.stuck_code, row.history[-1]["event"]) == ("", "", "finished")


def test_a_release_says_what_went_wrong_and_frees_the_lock() -> None:
    key = claim().key
    fence.release(key, "first line\nsecond line", using="default")
    row = IdempotencyKey.objects.get()
    assert (row.locked_until, row.last_error) == (None, "first line\nsecond line")
    assert (row.history[-1]["event"], row.history[-1]["detail"]) == ("error", "first line …")


def test_a_release_that_comes_late_is_logged_with_the_hash_of_the_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = claim().key
    expire_lock(91)
    claim()
    with caplog.at_level(logging.INFO, "idempotency"):
        fence.release(late, "late", using="default")
    (record,) = caplog.records
    assert record.key_hash == late.key_hash
    assert late.key_hash in record.getMessage()


def test_a_key_that_gets_stuck_is_logged_with_its_code(caplog: pytest.LogCaptureFixture) -> None:
    key = claim().key
    with caplog.at_level(logging.WARNING, "idempotency"):
        fence.mark_stuck(key, "a code", "the reason", using="default")
        events.announce_stuck(key.pk, None, using="default")
    (record,) = caplog.records
    assert all(part in record.getMessage() for part in (key.key_hash, "a code", "the reason"))


def test_no_reason_is_a_reason() -> None:
    fence.mark_stuck(claim().key, "code", "", using="default")
    assert IdempotencyKey.objects.get().stuck_reason


def test_a_claimed_key_is_not_saved_past_its_fence() -> None:
    key = claim().key
    key.recovery_point = "elsewhere"
    for one in (key, copy(key)):
        with pytest.raises(RuntimeError, match="bypass its fence"):
            one.save()
        with pytest.raises(RuntimeError, match="must not be deleted"):
            one.delete()
    assert IdempotencyKey.objects.get().recovery_point == "started"
    IdempotencyKeyFactory().save()  # a row that is not claimed
