"""The check of the payouts: compare the rides, the payouts and Stripe's list of transfers.

The check only reads and repairs nothing.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, date
from typing import NamedTuple

from idempotency.models import IdempotencyKey
from rides_demo import payments
from rides_demo.models import PILOT_AMOUNT, Payout, Pilot, Ride

#: The name of the operation.
OPERATION = "rides.pay_pilot"


class Transfer(NamedTuple):
    """A transfer, either listed by Stripe or derived from a payout."""

    id: str
    account: str
    cents: int


@dataclass
class PilotTotals:
    """The rides and the money of one pilot, over all days."""

    pilot: str
    days: int = 0
    rides: int = 0
    earned_cents: int = 0
    payouts: int = 0
    paid_cents: int = 0
    transfers: int = 0
    transferred_cents: int = 0


@dataclass
class PayoutResult:
    """The counts of a check. The first five must be 0."""

    #: Pilots who have earned something on a day, and have no payout with a transfer for it.
    unpaid_pilots: int
    #: Payouts of another sum than the pilot has earned that day.
    wrong_payouts: int
    #: Second and further transfers to a pilot for a day.
    double_transfers: int
    #: Transfers without their payout, and payouts without their transfer.
    unmatched_transfers: int
    unfinished_keys: int
    completer_payouts: int
    pilots: list[PilotTotals]
    findings: list[str]


class PayoutChecker:
    """Check the payouts of one simulation, whose keys begin with ``prefix``, in the database
    ``shard``."""

    def __init__(self, prefix: str, shard: str) -> None:
        self._shard = shard
        self._rides = Ride.objects.using(shard).filter(
            idempotency_key__idempotency_key__startswith=prefix, stripe_charge_id__isnull=False
        )
        self._pilots = list(Pilot.objects.using(shard).order_by("pk"))
        self._before = {transfer for transfer, _ in self._transfers()}

    def _transfers(self) -> list[tuple[Transfer, str]]:
        """Return the transfers to the pilots that Stripe lists, each with its group."""
        client = payments.stripe_client()
        return [
            (Transfer(one.id, pilot.stripe_account_id, one.amount), one.transfer_group or "")
            for pilot in self._pilots
            for one in client.v1.transfers.list(
                {"destination": pilot.stripe_account_id, "limit": 100}
            ).auto_paging_iter()
        ]

    def check(self, days: Collection[date]) -> PayoutResult:
        """Compare the rides of the days with the payouts, and the payouts with Stripe."""
        rides = Counter(
            (self._pilots[pk % len(self._pilots)], at.astimezone(UTC).date())
            for pk, at in self._rides.values_list("pk", "created_at")
            if self._pilots and at.astimezone(UTC).date() in days
        )
        payouts = Payout.objects.using(self._shard).filter(day__in=days).select_related("pilot")
        paid = {(payout.pilot, payout.day): payout for payout in payouts}
        listed = {
            transfer: group for transfer, group in self._transfers() if transfer not in self._before
        }
        recorded = {
            Transfer(payout.stripe_transfer_id, payout.pilot.stripe_account_id, payout.cents)
            for payout in paid.values()
            if payout.stripe_transfer_id
        }
        unpaid = [one for one in rides if one not in paid or paid[one].stripe_transfer_id is None]
        wrong = [one for one, payout in paid.items() if payout.cents != PILOT_AMOUNT * rides[one]]
        times = Counter((transfer.account, group) for transfer, group in listed.items())
        double = {one: count for one, count in times.items() if count > 1}
        unmatched = sorted(recorded ^ listed.keys())
        keys = IdempotencyKey.objects.using(self._shard).filter(
            request_path=OPERATION,
            idempotency_key__in=[f"{day}-{pilot.pk}" for day in days for pilot in self._pilots],
        )
        return PayoutResult(
            unpaid_pilots=len(unpaid),
            wrong_payouts=len(wrong),
            double_transfers=sum(double.values()) - len(double),
            unmatched_transfers=len(unmatched),
            unfinished_keys=keys.unfinished().count(),
            completer_payouts=keys.filter(completer_attempts__gt=0).count(),
            pilots=[self._totals(pilot, rides, paid, listed) for pilot in self._pilots],
            findings=[
                *(f"unpaid: {pilot} for {day}" for pilot, day in unpaid),
                *(
                    f"wrong payout: {pilot} got {paid[pilot, day].cents} cents for {day}, and has"
                    f" earned {PILOT_AMOUNT * rides[pilot, day]}"
                    for pilot, day in wrong
                ),
                *(
                    f"double: {count} transfers to {account} for {group}"
                    for (account, group), count in double.items()
                ),
                *(f"unmatched: {transfer}" for transfer in unmatched),
            ],
        )

    @staticmethod
    def _totals(
        pilot: Pilot,
        rides: Counter[tuple[Pilot, date]],
        paid: dict[tuple[Pilot, date], Payout],
        listed: Collection[Transfer],
    ) -> PilotTotals:
        flown = [count for (one, _), count in rides.items() if one == pilot]
        payouts = [payout.cents for (one, _), payout in paid.items() if one == pilot]
        transfers = [one.cents for one in listed if one.account == pilot.stripe_account_id]
        return PilotTotals(
            pilot.name,
            days=len(flown),
            rides=sum(flown),
            earned_cents=PILOT_AMOUNT * sum(flown),
            payouts=len(payouts),
            paid_cents=sum(payouts),
            transfers=len(transfers),
            transferred_cents=sum(transfers),
        )
