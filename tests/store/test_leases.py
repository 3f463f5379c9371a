"""The lease of a key is stored in its row, so each view may have its own."""

from dataclasses import replace

import pytest
from pytest_django import Settings

from idempotency._engine import fence
from idempotency._engine.claims import ClaimOutcome
from idempotency.models import IdempotencyKey
from tests.kit.ageing import make_older
from tests.kit.claims import claim, claim_as_completer, request

pytestmark = pytest.mark.django_db(transaction=True)

LONG = replace(request(), lease_seconds=600)


def lease_of_row() -> float:
    """Return the length of the lock, in seconds, that the claim of the row has taken."""
    row = IdempotencyKey.objects.get()
    assert row.locked_until is not None
    return round((row.locked_until - row.last_run_at).total_seconds(), 2)


def test_a_claim_locks_the_key_for_its_lease() -> None:
    assert claim(LONG).key.lease_seconds == 600
    assert (IdempotencyKey.objects.get().lease_seconds, lease_of_row()) == (600, 600)
    make_older(598, "locked_until")
    waiting = claim(LONG)
    assert waiting.outcome is ClaimOutcome.IN_PROGRESS
    assert 0 < waiting.lock_seconds <= 2
    make_older(2, "locked_until")
    assert claim(LONG).outcome is ClaimOutcome.CLAIMED
    assert lease_of_row() == 600


@pytest.mark.parametrize("renew", ["advance", "renew", "begin_call"])
def test_each_renewal_extends_the_lock_by_the_lease_of_the_row(renew: str) -> None:
    key = claim(LONG).key
    make_older(500, "locked_until")
    match renew:
        case "advance":
            fence.advance(key, "paid", using="default")
        case "renew":
            fence.renew(key, using="default")
        case "begin_call":
            fence.begin_call(key, "call", using="default")
    assert 600 <= lease_of_row() < 660


def test_a_later_claim_may_have_another_lease() -> None:
    """A deploy has changed the option."""
    fence.advance(claim(LONG).key, "paid", using="default")
    make_older(601, "locked_until")
    assert claim(replace(LONG, lease_seconds=30)).outcome is ClaimOutcome.CLAIMED
    assert (IdempotencyKey.objects.get().lease_seconds, lease_of_row()) == (30, 30)


def test_the_completer_waits_for_two_and_a_half_leases_and_takes_the_lease_of_the_row() -> None:
    key = claim(LONG).key
    make_older(7200, "created_at", "last_run_at")
    make_older(1498, "locked_until")
    assert not IdempotencyKey.objects.abandoned().exists()
    assert claim_as_completer(key) is None
    make_older(3, "locked_until")
    assert IdempotencyKey.objects.abandoned().exists()
    taken = claim_as_completer(key)
    assert taken is not None
    assert (taken.lease_seconds, lease_of_row()) == (600, 600)


def test_the_completer_raises_a_lease_that_is_too_short_now(settings: Settings) -> None:
    key = claim(replace(LONG, lease_seconds=30)).key
    make_older(7200, "created_at", "last_run_at", "locked_until")
    settings.IDEMPOTENCY = {"LOCK_TIMEOUT_SECONDS": 300}
    taken = claim_as_completer(key)
    assert taken is not None
    assert (taken.lease_seconds, lease_of_row()) == (300, 300)


def test_an_expired_refused_key_is_claimed_as_a_new_one() -> None:
    refused = claim().key
    fence.refuse(refused, "status 429", using="default")
    make_older(73 * 3600, "created_at", "last_run_at", "refused_at", "expires_at")
    again = claim()
    assert again.outcome is ClaimOutcome.CLAIMED
    assert again.key.pk != refused.pk


def test_the_history_names_the_end_of_the_lease() -> None:
    claim(LONG)
    make_older(601, "locked_until", "last_run_at")
    ended = IdempotencyKey.objects.values_list("locked_until", flat=True).get()
    claim(LONG)
    lost = IdempotencyKey.objects.get().history[1]
    assert lost["event"] == "run lost"
    assert lost["at"][:22] == f"{ended:%Y-%m-%dT%H:%M:%S.%f}"[:22]
