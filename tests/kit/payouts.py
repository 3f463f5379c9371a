"""Pilots of Rocket Rides, and the command that pays them."""

from datetime import UTC, date, datetime, timedelta
from datetime import time as time_of_day

import pytest
from django.core.management import call_command

from rides_demo.models import Pilot, Ride
from rides_demo.sandbox.server import Sandbox

#: A day that is over.
DAY = datetime.now(UTC).date() - timedelta(days=2)
TRANSFERS = "/v1/transfers"


@pytest.fixture
def pilots(sandbox: Sandbox, transactional_db: None) -> list[Pilot]:
    """Three pilots with accounts at Stripe."""
    names = ("amelia", "bessie", "charles")
    return [Pilot.objects.create(name=name, stripe_account_id=f"acct_{name}") for name in names]


def date_rides(day: date = DAY) -> None:
    """Let all rides be of this day."""
    Ride.objects.update(created_at=datetime.combine(day, time_of_day(), UTC))


def pay(*days: date) -> None:
    call_command("pay_pilots", "--day", *map(str, days or [DAY]))
