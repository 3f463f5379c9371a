"""The crash kit tests that a request or an operation has the same result if its process dies at any
place and it is run again.

::

    from idempotency.testing import Downstream, assert_survives

    @pytest.mark.django_db(transaction=True)
    def test_a_booking_survives(client, monkeypatch):
        bank = Downstream("bank", {"id": "ch_1"}, key="idempotency_key")
        monkeypatch.setattr("shop.views.charge_card", bank)
        assert_survives(lambda key: client.post(
            "/bookings", {"seats": 2}, headers={"Idempotency-Key": key}))

See ``docs/how-to/test-your-views.md``.
"""

from idempotency.testing.cases import Course, CrashTestCase, assert_survives, courses
from idempotency.testing.downstream import Downstream, downstream_call
from idempotency.testing.failures import Failure
from idempotency.testing.moved_time import age
from idempotency.testing.places import Place
from idempotency.testing.report import CannotProve, DoesNotSurvive, Report

__all__ = [
    "CannotProve",
    "Course",
    "CrashTestCase",
    "DoesNotSurvive",
    "Downstream",
    "Failure",
    "Place",
    "Report",
    "age",
    "assert_survives",
    "courses",
    "downstream_call",
]
