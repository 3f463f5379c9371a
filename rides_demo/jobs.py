"""The work that follows a ride, done by the RQ worker."""

from django.core.mail import send_mail
from django.db import transaction

from rides_demo.models import RIDE_AMOUNT, Receipt, Ride


def send_ride_receipt(ride_id: int) -> None:
    """Write the receipt of the ride and send it by e-mail: once, however often the job is delivered.

    The row is unique per ride and is written first; a second delivery, even at the same moment, waits on it and finds it. The
    e-mail goes out before COMMIT: a crash between the two repeats the e-mail rather than losing it, and there is still
    one receipt.
    """
    ride = Ride.objects.select_related("user").get(pk=ride_id)
    with transaction.atomic():
        receipt, created = Receipt.objects.get_or_create(ride=ride, defaults={"email": ride.user.email})
        if created:
            text = f"Thank you for flying Rocket Rides.\n\n${RIDE_AMOUNT / 100:.2f}, charge {ride.stripe_charge_id}\n"
            send_mail(f"Receipt for your ride {ride.pk}", text, None, [receipt.email])
