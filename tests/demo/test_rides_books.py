"""The simulator's consistency check finds each mistake by itself; and its plans are repeatable."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

from collections import Counter

import pytest
from django.db.models.functions import Now

from idempotency.models import IdempotencyKey, StagedJob
from rides_demo import payments
from rides_demo.jobs import send_ride_receipt
from rides_demo.models import Receipt, Ride
from rides_demo.simulator.consistency import Checker
from rides_demo.simulator.simulation import EVENTS, FAULTS, Plan
from tests.kit.rides import jane, joe, sandbox  # noqa: F401

pytestmark = pytest.mark.django_db


@pytest.fixture
def checker(jane):
    jane.book(key="before-the-run")
    StagedJob.objects.all().delete()
    return Checker("sim-", [jane.token])


@pytest.fixture
def booked(checker, jane):
    """One ride under the key "sim-1", with everything done."""
    ride = jane.book(key="sim-1").json()["ride"]["id"]
    StagedJob.objects.all().delete()
    send_ride_receipt(ride)
    return {"sim-1": ride}


def charge(ride_id, key):
    client = payments.stripe_client()
    customer = Ride.objects.get(pk=ride_id).user.stripe_customer_id
    parameters = {
        "amount": 2000,
        "currency": "usd",
        "customer": customer,
        "metadata": {"ride_id": str(ride_id)},
    }
    return client.v1.charges.create(parameters, {"idempotency_key": key}).id


def test_a_completed_booking_is_consistent(checker, booked):
    result = checker.check(booked, [])

    assert (result.consistent, result.findings) == (True, [])
    assert (result.keys, result.rides, result.charges, result.receipts) == (1, 1, 1, 1)
    assert (
        result.summary_line()
        == "double charges 0, lost rides 0, missing receipts 0, unfinished keys 0"
    )
    assert checker.is_idle()


def test_a_second_charge_of_a_ride_is_a_double_charge(checker, booked):
    charge(booked["sim-1"], "another key")

    result = checker.check(booked, [])

    assert (result.double_charges, result.unmatched_charges, result.consistent) == (1, 1, False)


def test_a_charge_that_stripe_does_not_know_is_unmatched(checker, booked):
    Ride.objects.filter(pk=booked["sim-1"]).update(stripe_charge_id="ch_invented")

    assert checker.check(booked, []).unmatched_charges == 2


@pytest.mark.parametrize("lose", ["the row", "its key", "another id"])
def test_a_ride_that_a_client_was_promised_and_that_is_not_there_is_lost(checker, booked, lose):
    if lose == "the row":
        Receipt.objects.all().delete()
        Ride.objects.filter(pk=booked["sim-1"]).delete()
    elif lose == "its key":
        Ride.objects.update(idempotency_key=None)
    else:
        booked["sim-1"] += 1

    result = checker.check(booked, [])

    assert (result.lost_rides, result.consistent) == (1, False)


def test_a_ride_without_a_receipt_misses_it(checker, booked):
    Receipt.objects.all().delete()

    assert not checker.is_idle()
    assert not checker.wait_until_idle(0.01)
    result = checker.check(booked, [])
    assert (result.missing_receipts, result.consistent) == (1, False)


def test_a_charged_ride_that_no_webhook_has_marked_as_paid_is_unpaid(checker, booked):
    checker.webhooks = True
    assert not checker.is_idle()
    result = checker.check(booked, [])
    assert (result.unpaid_rides, result.consistent) == (1, False)

    Ride.objects.filter(pk=booked["sim-1"]).update(paid_at=Now())

    assert checker.is_idle()
    assert checker.check(booked, []).consistent


def test_an_unfinished_key_is_one_and_a_stuck_one_is_listed(checker, jane, sandbox):
    sandbox.faults.replace([{"fault": "down", "path": "/v1/charges", "count": 1}])
    jane.book(key="sim-2")
    result = checker.check({}, [])
    assert (result.unfinished_keys, result.stuck_keys, result.consistent) == (1, 0, False)
    assert not checker.is_idle()

    sandbox.faults.replace([{"fault": "500_begun", "count": 1}])
    jane.book(key="sim-2")
    jane.book(key="sim-2")

    result = checker.check({}, [])
    assert (result.unfinished_keys, result.stuck_keys, result.consistent) == (0, 1, True)


def test_a_job_that_was_not_handed_over_is_left(checker, jane):
    jane.book(key="sim-1")

    result = checker.check({}, [])

    assert (result.staged_jobs, result.consistent) == (1, False)
    assert not checker.is_idle()


def test_a_charge_behind_a_declined_answer_is_a_surplus(checker, joe):
    joe.book(key="sim-1")
    assert checker.check({}, []).consistent

    Ride.objects.filter(idempotency_key__response_code=402).update(stripe_charge_id="ch_wrong")

    assert checker.check({}, []).surplus_rides == 1


def test_a_wrong_answer_is_an_inconsistency(checker, booked):
    assert not checker.check(booked, ["wrong: a 500"]).consistent


def test_the_same_seed_is_the_same_plan_under_new_keys():
    one, two, other = (
        Plan.draw(300, FAULTS, 7),
        Plan.draw(300, FAULTS, 7),
        Plan.draw(300, FAULTS, 8),
    )

    assert [(b.kind, b.token, b.body) for b in one.bookings] == [
        (b.kind, b.token, b.body) for b in two.bookings
    ]
    assert one.events == two.events != other.events
    assert [b.kind for b in one.bookings] != [b.kind for b in other.bookings]
    assert not {b.key for b in one.bookings} & {b.key for b in two.bookings}
    assert Counter(fault for _, fault in one.events) == EVENTS
    assert list(one.events) == sorted(one.events)
    assert all(0 <= at < 300 for at, _ in one.events)


def test_a_longer_run_loses_more_web_workers():
    assert len(Plan.draw(800, ["kill-web"], 7).events) == 10


def test_without_faults_every_booking_is_plain():
    plan = Plan.draw(50, (), 1)

    assert {booking.kind for booking in plan.bookings} == {"plain"}
    assert (plan.events, plan.crashes, plan.needs_sandbox) == ((), set(), False)
    assert not IdempotencyKey.objects.exists()
