"""A ride that was not finished within the retention costs nothing."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from idempotency._abandonment import settle
from idempotency.models import IdempotencyKey
from rides_demo import payments
from tests.kit.rides import jane, sandbox  # noqa: F401

pytestmark = pytest.mark.django_db(transaction=True)


def abandon(sandbox, phone, fault) -> IdempotencyKey:
    """Let the booking fail with ``fault``, and its client and the completer be silent for 73
    hours."""
    sandbox.faults.replace([{"fault": fault, "count": 1}])
    assert phone.book(key="gone").status_code == 503
    IdempotencyKey.objects.update(created_at=Now() - timedelta(hours=73))
    return IdempotencyKey.objects.get()


@pytest.mark.parametrize(("fault", "charged"), [("cut_after", 1), ("cut_before", 0)])
def test_what_stripe_has_charged_is_given_back(jane, sandbox, fault, charged):
    key = abandon(sandbox, jane, fault)

    assert settle(key.pk, using="default") is True

    charges = list(payments.stripe_client().v1.charges.list().auto_paging_iter())
    assert [charge.amount_refunded for charge in charges] == [2000] * charged
    answer = jane.book(key="gone")
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "ride_abandoned")
