"""Rocket Rides pays its pilots: one row and one transfer for each pilot and day."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.core.management import CommandError
from django.db import connection

from idempotency.completer import complete_key
from idempotency.exceptions import KeyReused, StuckCode
from idempotency.models import IdempotencyKey
from rides_demo.models import Payout, Pilot
from rides_demo.operations import key_of, pay_pilot
from tests.kit.payouts import DAY, TRANSFERS, date_rides, pay, pilots  # noqa: F401
from tests.kit.rides import jane, joe, sandbox  # noqa: F401

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def flown(jane, joe, pilots):
    """Four rides of a day that is over, and one of a card that was declined."""
    for _ in range(4):
        assert jane.book().status_code == 201
    assert joe.book().status_code == 402
    date_rides()


def made(sandbox):
    return sorted((one["destination"], one["amount"]) for one in sandbox.account.transfers.values())


def rows():
    payouts = Payout.objects.values_list("pilot__stripe_account_id", "cents", "stripe_transfer_id")
    return sorted(payouts)


def is_consistent(sandbox):
    transfers = sandbox.account.transfers.values()
    return rows() == sorted((one["destination"], one["amount"], one["id"]) for one in transfers)


def test_each_pilot_is_paid_once_for_the_charged_rides_of_the_day(flown, sandbox):
    for _ in range(2):
        pay()

    paid = made(sandbox)
    assert sorted(cents for _, cents in paid) == [1400, 1400, 2800]
    assert len({account for account, _ in paid}) == 3
    assert is_consistent(sandbox)
    assert not IdempotencyKey.objects.filter(request_path="rides.pay_pilot").unfinished().exists()


def test_a_day_without_rides_pays_nobody(flown, sandbox, capsys):
    pay(DAY - timedelta(days=1))

    assert "0 pilots have earned $0.00" in capsys.readouterr().out
    assert made(sandbox) == []


def test_a_day_that_is_not_over_is_refused(flown, sandbox):
    with pytest.raises(CommandError, match="when it is over"):
        pay(DAY, datetime.now(UTC).date())
    assert made(sandbox) == []


def test_a_pilot_with_a_ride_that_is_still_being_booked_waits(flown, jane, sandbox, capsys):
    sandbox.faults.replace([{"fault": "down", "count": 1}])
    assert jane.book(key="late").status_code == 503
    date_rides()

    with pytest.raises(CommandError, match="Not paid yet: 1"):
        pay()
    assert "1 rides are still being booked" in capsys.readouterr().out
    assert len(made(sandbox)) == 2

    assert jane.book(key="late").status_code == 201
    pay()
    assert sum(cents for _, cents in made(sandbox)) == 5 * 1400


@pytest.mark.parametrize("fault", ["cut_before", "cut_after", "500_before", "500_after", "429"])
def test_after_a_failure_of_stripe_the_completer_makes_the_same_transfer(flown, sandbox, fault):
    sandbox.faults.replace([{"fault": fault, "path": TRANSFERS, "count": 1}])

    with pytest.raises(CommandError, match="Not paid yet: 1"):
        pay()

    key = IdempotencyKey.objects.filter(request_path="rides.pay_pilot").unfinished().get()
    assert complete_key(key.pk) == "finished"
    assert (len(made(sandbox)), is_consistent(sandbox)) == (3, True)
    pay()
    assert len(made(sandbox)) == 3


def test_a_stored_failure_without_a_transfer_needs_a_person(flown, sandbox, capsys):
    sandbox.faults.replace([{"fault": "500_begun", "path": TRANSFERS, "count": 1}])

    for _ in range(2):
        with pytest.raises(CommandError, match="Not paid yet: 1"):
            pay()

    key = IdempotencyKey.objects.stuck().get()
    assert (key.stuck_code, "lists no transfer" in key.stuck_reason) == (
        StuckCode.ANSWER_REQUIRED,
        True,
    )
    assert len(made(sandbox)) == 2


def test_a_transfer_that_stripe_refuses_leaves_no_row(flown, sandbox, pilots, capsys):
    Pilot.objects.filter(pk=pilots[0].pk).update(stripe_account_id="closed")

    for _ in range(2):
        with pytest.raises(CommandError, match="Not paid yet: 1"):
            pay()
        assert "amelia: not paid: No such destination: 'closed'" in capsys.readouterr().out
    assert (len(made(sandbox)), is_consistent(sandbox)) == (2, True)


def test_another_sum_for_a_day_that_was_paid_is_refused(flown, sandbox, pilots):
    pay()
    with pytest.raises(KeyReused):
        pay_pilot.once(
            key_of(DAY, pilots[0]), pilot=pilots[0].pk, day=str(DAY), cents=9900, shard="default"
        )
    assert is_consistent(sandbox)


def test_two_commands_at_once_pay_each_pilot_once(flown, sandbox):
    sandbox.faults.replace([{"fault": "slow", "path": TRANSFERS, "seconds": 0.2}])

    def run():
        try:
            pay()
        finally:
            connection.close()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (len(made(sandbox)), is_consistent(sandbox)) == (3, True)
