"""What gunicorn serves after a bad deploy: the bug comes after the charge was made, so each booking
fails in the middle."""

from typing import NoReturn

from rides_demo.wsgi import application  # before the models: it loads the apps

# isort: split
from rides_demo import payments
from rides_demo.models import Ride

__all__ = ["application"]

_charge_ride = payments.charge_ride


def charge_and_stumble(ride: Ride, downstream_key: str) -> NoReturn:
    """Charge the ride and make nothing of the answer."""
    raise KeyError(
        f"{_charge_ride(ride, downstream_key)} is not in a table that this deploy forgot"
    )


payments.charge_ride = charge_and_stumble
