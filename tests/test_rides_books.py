"""The simulator's books notice what is wrong, each mistake by itself; and its plans are repeatable."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

from collections import Counter

import pytest
from django.db.models.functions import Now

from idempotency.models import IdempotencyKey, StagedJob
from rides_demo import payments
from rides_demo.books import Ledger
from rides_demo.jobs import send_ride_receipt
from rides_demo.models import Receipt, Ride
from rides_demo.simulator import EVENTS, FAULTS, Plan
from tests.rides_fixtures import jane, joe, sandbox  # noqa: F401

pytestmark = pytest.mark.django_db


@pytest.fixture
def ledger(jane):
    jane.book(key="before-the-run")
    StagedJob.objects.all().delete()
    return Ledger("sim-", [jane.token])


@pytest.fixture
def booked(ledger, jane):
    """One ride under the key "sim-1", with everything done."""
    ride = jane.book(key="sim-1").json()["ride"]["id"]
    StagedJob.objects.all().delete()
    send_ride_receipt(ride)
    return {"sim-1": ride}


def charge(ride_id, key):
    client = payments.stripe_client()
    customer = Ride.objects.get(pk=ride_id).user.stripe_customer_id
    parameters = {"amount": 2000, "currency": "usd", "customer": customer, "metadata": {"ride_id": str(ride_id)}}
    return client.v1.charges.create(parameters, {"idempotency_key": key}).id


def test_books_in_which_everything_is_done_are_right(ledger, booked):
    books = ledger.check(booked, [])

    assert (books.right, books.findings) == (True, [])
    assert (books.keys, books.rides, books.charges, books.receipts) == (1, 1, 1, 1)
    assert books.line() == "double charges 0, lost rides 0, missing receipts 0, unfinished keys 0"
    assert ledger.at_rest()


def test_a_second_charge_of_a_ride_is_a_double_charge(ledger, booked):
    charge(booked["sim-1"], "another key")

    books = ledger.check(booked, [])

    assert (books.double_charges, books.unmatched_charges, books.right) == (1, 1, False)


def test_a_charge_that_stripe_does_not_know_is_unmatched(ledger, booked):
    Ride.objects.filter(pk=booked["sim-1"]).update(stripe_charge_id="ch_invented")

    assert ledger.check(booked, []).unmatched_charges == 2


@pytest.mark.parametrize("lose", ["the row", "its key", "another id"])
def test_a_ride_that_a_client_was_promised_and_that_is_not_there_is_lost(ledger, booked, lose):
    if lose == "the row":
        Receipt.objects.all().delete()
        Ride.objects.filter(pk=booked["sim-1"]).delete()
    elif lose == "its key":
        Ride.objects.update(idempotency_key=None)
    else:
        booked["sim-1"] += 1

    books = ledger.check(booked, [])

    assert (books.lost_rides, books.right) == (1, False)


def test_a_ride_without_a_receipt_misses_it(ledger, booked):
    Receipt.objects.all().delete()

    assert not ledger.at_rest()
    assert not ledger.wait_at_rest(0.01)
    books = ledger.check(booked, [])
    assert (books.missing_receipts, books.right) == (1, False)


def test_a_charged_ride_that_no_webhook_has_marked_as_paid_is_unpaid(ledger, booked):
    ledger.webhooks = True
    assert not ledger.at_rest()
    books = ledger.check(booked, [])
    assert (books.unpaid_rides, books.right) == (1, False)

    Ride.objects.filter(pk=booked["sim-1"]).update(paid_at=Now())

    assert ledger.at_rest()
    assert ledger.check(booked, []).right


def test_an_unfinished_key_is_one_and_a_stuck_one_is_listed(ledger, jane, sandbox):
    sandbox.faults.replace([{"fault": "down", "path": "/v1/charges", "count": 1}])
    jane.book(key="sim-2")
    books = ledger.check({}, [])
    assert (books.unfinished_keys, books.stuck_keys, books.right) == (1, 0, False)
    assert not ledger.at_rest()

    sandbox.faults.replace([{"fault": "500_begun", "count": 1}])
    jane.book(key="sim-2")
    jane.book(key="sim-2")

    books = ledger.check({}, [])
    assert (books.unfinished_keys, books.stuck_keys, books.right) == (0, 1, True)


def test_a_job_that_was_not_handed_over_is_left(ledger, jane):
    jane.book(key="sim-1")

    books = ledger.check({}, [])

    assert (books.staged_jobs, books.right) == (1, False)
    assert not ledger.at_rest()


def test_a_charge_behind_a_declined_answer_is_a_surplus(ledger, joe):
    joe.book(key="sim-1")
    assert ledger.check({}, []).right

    Ride.objects.filter(idempotency_key__response_code=402).update(stripe_charge_id="ch_wrong")

    assert ledger.check({}, []).surplus_rides == 1


def test_a_wrong_answer_makes_the_books_wrong(ledger, booked):
    assert not ledger.check(booked, ["wrong: a 500"]).right


def test_the_same_seed_is_the_same_plan_under_new_keys():
    one, two, other = Plan.draw(300, FAULTS, 7), Plan.draw(300, FAULTS, 7), Plan.draw(300, FAULTS, 8)

    assert [(b.kind, b.token, b.body) for b in one.bookings] == [(b.kind, b.token, b.body) for b in two.bookings]
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
