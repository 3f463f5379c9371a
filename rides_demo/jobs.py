"""Jobs of the service; the RQ worker runs them."""

from django.core.mail import send_mail
from django.db import transaction

from rides_demo.models import RIDE_AMOUNT, Receipt, Ride
from rides_demo.sharding import shard_of_request


def send_ride_receipt(ride_id: int, shard: str = "default") -> None:
    """Create the receipt of the ride and send it by e-mail, once for any number of deliveries.

    The receipt is unique per ride and is inserted first. A concurrent delivery waits for that
    insert, then finds the receipt. The e-mail is sent before COMMIT: a crash between the two
    repeats the e-mail and never loses it. ``shard`` is the alias of the database of the ride.
    """
    shard_of_request.set(shard)
    ride = Ride.objects.select_related("user").get(pk=ride_id)
    with transaction.atomic(using=shard):
        receipt, created = Receipt.objects.get_or_create(
            ride=ride, defaults={"email": ride.user.email}
        )
        if created:
            text = (
                f"Thank you for flying Rocket Rides.\n\n${RIDE_AMOUNT / 100:.2f}, charge"
                f" {ride.stripe_charge_id}\n"
            )
            send_mail(f"Receipt for your ride {ride.pk}", text, None, [receipt.email])
