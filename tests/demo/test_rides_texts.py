"""The pilot gets a text once, though the service would send it twice."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

import pytest

from idempotency.models import IdempotencyKey
from rides_demo.models import Ride
from tests.kit.rides import jane, max_, sandbox  # noqa: F401

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def ride(jane):
    return Ride.objects.get(pk=jane.book().json()["ride"]["id"])


def texts(sandbox):
    return list(sandbox.account.messages.values())


def let(sandbox, fault):
    sandbox.faults.replace([{"fault": fault, "path": "/sms", "count": 1}])


def test_a_text_is_sent_once_and_its_answer_replayed(jane, sandbox, ride):
    first, second = (jane.send("POST", f"/rides/{ride.pk}/texts", key="text-1") for _ in range(2))
    assert (first.status_code, second.content) == (201, first.content)
    assert [text["to"] for text in texts(sandbox)] == [f"pilot of ride {ride.pk}"]


@pytest.mark.parametrize(("fault", "sent"), [("cut_after", 1), ("cut_before", 0)])
def test_a_text_that_may_have_been_sent_is_not_sent_again(jane, sandbox, ride, fault, sent):
    let(sandbox, fault)
    answers = [
        jane.send("POST", f"/rides/{ride.pk}/texts", key="text-1").status_code for _ in range(3)
    ]
    assert answers == [500, 409, 409]
    assert len(texts(sandbox)) == sent
    assert IdempotencyKey.objects.get(idempotency_key="text-1").stuck_code == "call_in_doubt"


def test_a_service_that_cannot_be_reached_is_asked_again(jane, sandbox, ride, settings):
    reachable, settings.STRIPE_API_BASE = settings.STRIPE_API_BASE, "http://127.0.0.1:1"
    answer = jane.send("POST", f"/rides/{ride.pk}/texts", key="text-1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "text_unavailable")
    settings.STRIPE_API_BASE = reachable
    assert jane.send("POST", f"/rides/{ride.pk}/texts", key="text-1").status_code == 201
    assert len(texts(sandbox)) == 1


def test_a_ride_of_another_rider_is_not_there(max_, sandbox, ride):
    assert max_.send("POST", f"/rides/{ride.pk}/texts", key="text-1").status_code == 404
    assert not texts(sandbox)
