"""The payout of a pilot for a day, as an operation: one row and one transfer, however often and
from wherever it is called.

The command ``pay_pilots`` calls it, and the completer continues it after a crash.
"""

from collections import Counter
from datetime import date

from django.db.models import QuerySet

from idempotency.operations import Rejected, keyed, operation
from rides_demo import payments
from rides_demo.models import Payout, Pilot, Ride


def by_pilot(rides: QuerySet[Ride], shard: str) -> dict[Pilot, int]:
    """Return how many of the rides each pilot has, if any. The pilots take the rides in turn."""
    pilots = list(Pilot.objects.using(shard).order_by("pk"))
    turns = Counter(pk % len(pilots) for pk in rides.values_list("pk", flat=True)) if pilots else {}
    return {pilot: turns[turn] for turn, pilot in enumerate(pilots) if turns[turn]}


def key_of(day: date, pilot: Pilot) -> str:
    """Return the key of a payout: one for each pilot and day."""
    return f"{day}-{pilot.pk}"


def booked(*, pilot: int, day: str, cents: int, shard: str) -> None:
    """Insert the payout, in the first transaction. Its name is the recovery point after it."""
    Payout.objects.using(shard).create(pilot_id=pilot, day=day, cents=cents)


def transferred(key: str, *, pilot: int, day: str, cents: int, shard: str) -> str:
    """Make the transfer at Stripe; return its id. No transaction is open. The ``key`` is the same
    in each attempt, so Stripe makes one transfer."""
    payout = Payout.objects.using(shard).select_related("pilot").get(pilot_id=pilot, day=day)
    try:
        return payments.pay_out(payout, key)
    except payments.TransferRefused as refused:
        raise Rejected(refused.code, str(refused)) from refused


def unbooked(why: Rejected, *, pilot: int, day: str, cents: int, shard: str) -> None:
    """Delete the payout, in the transaction that stores a refusal of Stripe."""
    Payout.objects.using(shard).filter(pilot_id=pilot, day=day).delete()


@operation(
    "rides.pay_pilot",
    after=booked,
    call=keyed(transferred, valid_hours=payments.KEY_HOURS),
    undo=unbooked,
    retention_hours="forever",
    wait_seconds=5,
)
def pay_pilot(
    transfer_id: str, /, *, pilot: int, day: str, cents: int, shard: str
) -> dict[str, str]:
    """Store the id of the transfer, in the last transaction; return it as the result."""
    Payout.objects.using(shard).filter(pilot_id=pilot, day=day).update(
        stripe_transfer_id=transfer_id
    )
    return {"transfer": transfer_id}
