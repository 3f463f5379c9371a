"""The check of the payouts finds each mistake by itself, and killed commands leave none."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

import random

import pytest
from django.core.management import CommandError
from django.db.models import F
from django.db.models.functions import Now

from rides_demo import payments
from rides_demo.models import Payout, Ride
from rides_demo.simulator.paydays import KILL_PAY_PILOTS, Paydays
from rides_demo.simulator.payouts import PayoutChecker
from tests.kit.commands import environment
from tests.kit.payouts import DAY, TRANSFERS, date_rides, pay, pilots  # noqa: F401
from tests.kit.rides import jane, sandbox  # noqa: F401

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def booked(jane, pilots):
    """Four rides of a simulation, which are dated to a day that is over."""
    for number in range(4):
        assert jane.book(key=f"sim-{number}").status_code == 201
    date_rides()


@pytest.fixture
def checked(booked):
    """Return a function that checks the payouts, and returns the counts that must be 0."""
    checker = PayoutChecker("sim-", "default")

    def check():
        result = checker.check([DAY])
        return (
            result.unpaid_pilots,
            result.wrong_payouts,
            result.double_transfers,
            result.unmatched_transfers,
            result.unfinished_keys,
        )

    return check


def test_the_check_finds_nothing_when_each_pilot_is_paid(booked, checked):
    assert checked() == (3, 0, 0, 0, 0)
    pay()
    assert checked() == (0, 0, 0, 0, 0)


def test_the_table_of_the_report_has_a_row_for_each_pilot(booked):
    checker = PayoutChecker("sim-", "default")
    pay()
    result = checker.check([DAY])
    assert [row.pilot for row in result.pilots] == ["amelia", "bessie", "charles"]
    assert sum(row.rides for row in result.pilots) == 4
    for row in result.pilots:
        assert (row.days, row.payouts, row.transfers) == (1, 1, 1)
        assert row.earned_cents == row.paid_cents == row.transferred_cents


@pytest.mark.parametrize(
    ("break_one", "counts"),
    [
        (lambda payout: payout.delete(), (1, 0, 0, 1, 0)),
        (lambda payout: Payout.objects.update(stripe_transfer_id=None), (3, 0, 0, 3, 0)),
        (lambda payout: Payout.objects.update(cents=F("cents") + 1), (0, 3, 0, 6, 0)),
        (lambda payout: payments.pay_out(payout, "another key"), (0, 0, 1, 1, 0)),
    ],
    ids=["row lost", "transfer not recorded", "wrong sum", "paid twice"],
)
def test_the_check_finds_each_mistake(booked, checked, break_one, counts):
    pay()
    break_one(Payout.objects.select_related("pilot").first())
    assert checked() == counts


def test_the_check_finds_an_unfinished_payout(booked, checked, sandbox):
    sandbox.faults.replace([{"fault": "cut_after", "path": TRANSFERS, "count": 1}])
    with pytest.raises(CommandError):
        pay()
    assert checked() == (1, 0, 0, 1, 1)


@pytest.mark.postgres
@pytest.mark.processes
def test_killed_commands_leave_nothing_wrong(booked, sandbox, tmp_path, monkeypatch):
    """A payday with real processes, which are killed, then the last one."""
    for name, value in environment(
        DJANGO_SETTINGS_MODULE="rides_demo.settings",
        STRIPE_API_BASE=sandbox.url,
        LOCK_TIMEOUT_SECONDS="3",
    ).items():
        monkeypatch.setenv(name, value)
    checker = PayoutChecker("sim-", "default")
    Ride.objects.update(created_at=Now())
    paydays = Paydays(tmp_path, "sim-", ["default"], random.Random(1))

    assert set(paydays.hold()) == {KILL_PAY_PILOTS}
    paydays.finish()

    result = checker.check(paydays.days)
    assert result.findings == []
    assert (sum(row.transfers for row in result.pilots), result.unfinished_keys) == (3, 0)
    assert paydays.kills >= 1
