"""Claims, fences and expiry, without HTTP."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models.functions import Now

from idempotency._engine import decisions, fence, phased_run, rows
from idempotency._engine.advisory_locks import lock_parameters
from idempotency._engine.claims import ClaimOutcome
from idempotency._engine.dialects import HISTORY_LIMIT
from idempotency._engine.transactions import durable_transaction
from idempotency.exceptions import LockLost
from idempotency.jobs import stage_job
from idempotency.models import IdempotencyKey, StagedJob
from tests.factories import IdempotencyKeyFactory
from tests.kit.ageing import expire_lock, lock_end, make_older, past_the_retention
from tests.kit.claims import claim, claim_as_completer, claim_plain, finish, request
from tests.kit.database import default_isolation, statements
from tests.kit.threads import all_at_once
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_new_key_is_claimed_with_one_statement() -> None:
    with statements() as seen:
        found = claim()
    assert (found.outcome, found.key.attempts, found.key.recovery_point) == (
        ClaimOutcome.CLAIMED,
        1,
        "started",
    )
    assert len(seen) == (1 if connection.vendor == "postgresql" else 2)


@pytest.mark.postgres
def test_of_claims_in_a_race_one_wins() -> None:
    """50 keys, 8 rivals for each: in many of these races the loser's snapshot is older than the
    winner's row."""
    for number in range(50):
        found = all_at_once(lambda rival, number=number: claim(request(f"key-{number}")).outcome, 8)
        assert sorted(found, key=str) == [ClaimOutcome.CLAIMED] + [ClaimOutcome.IN_PROGRESS] * 7


def test_a_locked_key_is_refused_with_the_rest_of_its_lock() -> None:
    claim()
    expire_lock(30)
    refused = claim()
    assert refused.outcome is ClaimOutcome.IN_PROGRESS
    assert 55 < refused.lock_seconds < 60.01


def test_a_key_locked_91_seconds_ago_is_taken_over_with_another_token() -> None:
    first = claim().key
    expire_lock()
    second = claim()
    assert (second.outcome, second.key.pk, second.key.attempts) == (
        ClaimOutcome.CLAIMED,
        first.pk,
        2,
    )
    assert second.key.claim_token != first.claim_token


@pytest.mark.postgres
def test_takeover_at_once_on_a_database_that_is_repeatable_read_by_default() -> None:
    for turn in range(40):
        claim(request(f"key-{turn}"))
    expire_lock()

    def client(number: int) -> list[ClaimOutcome]:
        with default_isolation("repeatable read"):
            return [claim(request(f"key-{turn}")).outcome for turn in range(40)]

    for outcomes in zip(*all_at_once(client, 8), strict=True):
        assert sorted(outcomes, key=str) == [ClaimOutcome.CLAIMED] + [ClaimOutcome.IN_PROGRESS] * 7
    assert set(IdempotencyKey.objects.values_list("attempts", flat=True)) == {2}


@pytest.mark.postgres
def test_completers_at_one_key_on_a_database_that_is_repeatable_read_by_default() -> None:
    keys = [claim(request(f"key-{turn}")).key for turn in range(40)]
    expire_lock()

    def completer(number: int) -> list[bool]:
        with default_isolation("repeatable read"):
            return [claim_as_completer(key) is not None for key in keys]

    assert [sum(claimed) for claimed in zip(*all_at_once(completer, 8), strict=True)] == [1] * 40


@pytest.mark.parametrize(
    "change",
    [
        lambda key: fence.advance(key, "paid", using="default"),
        lambda key: fence.renew(key, using="default"),
        lambda key: fence.finish(key, fence.StoredResponse(200, {}, b""), using="default"),
        lambda key: fence.mark_stuck(key, "code", "reason", using="default"),
        lambda key: rows.read_own(key, using="default"),
    ],
)
def test_the_fence_stops_whoever_lost_the_key(change: Any) -> None:
    late = claim().key
    expire_lock()
    winner = claim().key
    before = IdempotencyKey.objects.values().get()
    with pytest.raises(LockLost):
        change(late)
    fence.release(late, "late", using="default")
    assert IdempotencyKey.objects.values().get() == before
    finish(winner)


def test_a_mismatch_is_told_before_anything_else() -> None:
    key = claim().key
    other = request(fingerprint="v1:two")
    assert claim(other).outcome is ClaimOutcome.MISMATCH
    fence.mark_stuck(key, "code", "reason", using="default")
    assert claim(other).outcome is ClaimOutcome.MISMATCH
    assert claim().outcome is ClaimOutcome.STUCK


def test_scopes_do_not_see_each_other() -> None:
    claim(request(scope="user:1", fingerprint="v1:one"))
    assert claim(request(scope="user:2", fingerprint="v1:two")).outcome is ClaimOutcome.CLAIMED


def test_length_prefixes_keep_locks_of_different_keys_apart() -> None:
    def locks(scope: str, key: str) -> Any:
        return lock_parameters(scope, key, "v1:one")["lock"]

    assert locks("user:1", "23") != locks("user:12", "3")


def test_an_expired_key_is_new_again_and_its_row_stays_for_whoever_points_at_it() -> None:
    old = claim().key
    finish(old)
    entry = Entry.objects.create(name="ride", idempotency_key=old)
    past_the_retention()
    found = claim(request(fingerprint="v1:two"))
    assert (found.outcome, found.key.attempts) == (ClaimOutcome.CLAIMED, 1)
    assert found.key.pk != old.pk
    entry.refresh_from_db()
    assert entry.idempotency_key_id == old.pk
    old.refresh_from_db()
    assert old.scope == f"expired:{old.pk}"


def test_expiry_counts_from_the_end_not_from_the_creation() -> None:
    finish(claim().key)
    make_older(200 * 3600, "created_at")
    make_older(71 * 3600, "finished_at")
    assert claim().outcome is ClaimOutcome.FINISHED


def test_an_unfinished_key_never_expires_by_itself() -> None:
    key = claim().key
    IdempotencyKey.objects.update(created_at=Now() - timedelta(days=99), locked_until=None)
    assert claim().key.pk == key.pk


def test_the_plain_claim_retires_an_expired_key_with_its_own_transaction() -> None:
    old = claim().key
    finish(old)
    past_the_retention()
    with transaction.atomic():
        found = claim_plain()
        transaction.set_rollback(True)
    assert found.outcome is ClaimOutcome.CLAIMED
    old.refresh_from_db()
    assert old.scope == "user:1"


@pytest.mark.postgres
def test_a_replay_writes_nothing_and_takes_no_transaction_id() -> None:
    finish(claim().key)
    for look in (claim, claim_plain):
        with transaction.atomic(), connection.cursor() as cursor:
            assert look().outcome is ClaimOutcome.FINISHED
            cursor.execute(
                "SELECT pg_current_xact_id_if_assigned(), (SELECT count(*) FROM pg_locks WHERE"
                " locktype = 'advisory' AND pid = pg_backend_pid())"
            )
            assert cursor.fetchone() == (None, 0)


def test_the_history_keeps_the_last_events() -> None:
    for _ in range(HISTORY_LIMIT + 5):
        fence.release(claim().key, "again", using="default")
    history = IdempotencyKey.objects.get().history
    assert len(history) == HISTORY_LIMIT
    assert history[-1]["event"] == "error"
    assert {"at", "event", "detail"} == set(history[0])


def test_an_error_is_kept_as_both_databases_take_it() -> None:
    fence.release(
        claim().key, "NUL \x00, lone surrogate \udc80, and " + "endless " * 1000, using="default"
    )
    key = IdempotencyKey.objects.get()
    assert key.last_error.startswith("NUL , lone surrogate ?, and endless")
    assert len(key.last_error) == 2000
    assert len(key.history[-1]["detail"]) == 200


def test_giving_up_spares_a_key_that_somebody_holds() -> None:
    key = claim().key
    assert decisions.give_up(key.pk, "code", "reason", using="default") is False
    expire_lock()
    assert decisions.give_up(key.pk, "code", "reason", using="default") is True
    assert decisions.give_up(key.pk, "other", "reason", using="default") is False
    assert IdempotencyKey.objects.get().stuck_code == "code"


@pytest.mark.parametrize(
    "broken",
    [
        {"recovery_point": "finished"},
        {"response_code": 200},
        {"finished": True, "response_code": 600},
        {"finished": True, "recovery_point": "paid"},
        {"stuck_code": "code"},
        {"stuck_at": Now()},
        {"locked_until": lock_end()},
        {"idempotency_key": ""},
        {"scope": ""},
    ],
)
def test_the_schema_refuses_a_state_that_cannot_be(broken: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        IdempotencyKeyFactory(**broken)


def test_keys_are_case_sensitive() -> None:
    claim(request("Key", fingerprint="v1:one"))
    assert claim(request("key", fingerprint="v1:two")).outcome is ClaimOutcome.CLAIMED


@pytest.mark.postgres
def test_concurrent_runs_of_different_keys_that_stage_a_job_do_not_fail_each_other() -> None:
    """PostgreSQL tracks reads by index page, on which each run has read and written what the others
    have."""
    held = [claim(request(f"key-{number}")).key for number in range(8)]
    written = threading.Barrier(len(held))

    def last_phase(number: int) -> None:
        with durable_transaction("serializable", using="default"):
            token = phased_run.current_key.set(held[number])
            stage_job("rides_demo.jobs.send_ride_receipt")
            phased_run.current_key.reset(token)
            finish(held[number])
            written.wait(60)

    all_at_once(last_phase, len(held))
    assert IdempotencyKey.objects.finished().count() == StagedJob.objects.count() == len(held)


@pytest.mark.postgres
def test_a_row_that_has_moved_is_found_by_its_id() -> None:
    key = claim().key
    IdempotencyKey.objects.update(remote_addr="127.0.0.2")
    fence.advance(key, "paid", using="default")
    key.recovery_point = "paid"
    with transaction.atomic():
        fence.renew(key, using="default")
        transaction.set_rollback(True)
    finish(key)
    assert IdempotencyKey.objects.get().recovery_point == "finished"


def test_a_level_that_is_none_opens_no_transaction() -> None:
    with (
        pytest.raises(ValueError, match="isolation must be one of 'read committed'"),
        durable_transaction("x", using="default"),
    ):
        pass
