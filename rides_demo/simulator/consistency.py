"""The consistency check of a simulation: compare client logs, database and Stripe.

The check only reads and repairs nothing.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from datetime import date
from typing import NamedTuple

from django.db import Error, connections
from django.db.models import Sum

from idempotency.models import IdempotencyKey, StagedJob
from rides_demo import payments
from rides_demo.models import RIDE_AMOUNT, AuditRecord, Receipt, Ride, User
from rides_demo.simulator.booking_clients import Outcome
from rides_demo.simulator.payouts import PayoutChecker, PilotTotals

POLL_SECONDS = 0.2
COORDINATES = ("origin_lat", "origin_lon", "target_lat", "target_lon")


class Charge(NamedTuple):
    """A successful charge, either listed by Stripe or derived from a ride."""

    id: str
    ride: str
    customer: str
    amount: int = RIDE_AMOUNT


@dataclass
class CheckResult:
    """The counts of a check. The counts of the first group must be 0."""

    double_charges: int = 0
    lost_rides: int = 0
    missing_receipts: int = 0
    #: Charged rides that no webhook marked as paid.
    unpaid_rides: int = 0
    unfinished_keys: int = 0
    #: Charges that are only in Stripe or only in the database, or differ in id, ride, customer or
    #: amount.
    unmatched_charges: int = 0
    #: Second and further rides of a key, and charged rides of a declined card.
    surplus_rides: int = 0
    staged_jobs: int = 0
    #: Responses that violate the contract, including replays with other bytes.
    wrong_answers: int = 0
    #: Responses of clients that differ from the stored response.
    changed_answers: int = 0
    #: Rides whose rider or coordinates differ from the request.
    changed_rides: int = 0
    #: Rides without exactly one audit record, and receipts of rides whose key has no stored 201.
    unaudited_rides: int = 0
    surplus_receipts: int = 0
    #: Stuck keys beyond the number of failures that Stripe stored.
    unexplained_stuck: int = 0
    #: See ``payouts.PayoutResult``.
    unpaid_pilots: int = 0
    wrong_payouts: int = 0
    double_transfers: int = 0
    unmatched_transfers: int = 0

    stuck_keys: int = 0
    #: Keys with more than one run, and keys that the completer ran.
    resumed_keys: int = 0
    completer_keys: int = 0
    keys: int = 0
    rides: int = 0
    charges: int = 0
    receipts: int = 0
    #: Payouts that the completer ran.
    completer_payouts: int = 0
    pilots: list[PilotTotals] = field(default_factory=list)
    #: A description of each inconsistency.
    findings: list[str] = field(default_factory=list)

    #: The number of fields above that must be 0.
    MUST_BE_ZERO = 18

    def add(self, other: "CheckResult", tenant: str) -> None:
        """Add the counts of ``other``, and its pilots and findings with the name of their
        ``tenant``."""
        for entry in fields(self):
            if entry.name not in ("findings", "pilots"):
                setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))
        self.pilots += [
            replace(row, pilot=f"{tenant}: {row.pilot}" if tenant else row.pilot)
            for row in other.pilots
        ]
        self.findings += [
            f"{tenant}: {finding}" if tenant else finding for finding in other.findings
        ]

    @property
    def consistent(self) -> bool:
        """Whether all counts of the first group are 0."""
        return not any(getattr(self, entry.name) for entry in fields(self)[: self.MUST_BE_ZERO])

    def summary_line(self) -> str:
        """Return the most important counts as one line."""
        return (
            f"double charges {self.double_charges}, lost rides {self.lost_rides}, missing receipts"
            f" {self.missing_receipts}, unfinished keys {self.unfinished_keys}"
        )


class Checker:
    """Check the keys, rides and charges of one simulation: the keys that begin with ``prefix``.

    If ``webhooks`` is true, Stripe sends an event for each charge, so each charged ride must become
    paid. If ``payouts`` is true, the pilots are paid. ``shard`` is the alias of the database. The
    check names it in each query and does not use the router.
    """

    def __init__(
        self,
        prefix: str,
        tokens: Iterable[str],
        *,
        webhooks: bool = False,
        payouts: bool = False,
        shard: str = "default",
    ) -> None:
        self.webhooks, self.shard = webhooks, shard
        self.keys = IdempotencyKey.objects.using(shard).filter(idempotency_key__startswith=prefix)
        self.rides = Ride.objects.using(shard).filter(idempotency_key__in=self.keys)
        hashes = [User.hash_token(token) for token in tokens]
        self.riders = User.objects.using(shard).filter(api_token_hash__in=hashes)
        self.jobs, self.receipts = (
            StagedJob.objects.using(shard),
            Receipt.objects.using(shard).filter(ride__in=self.rides),
        )
        self._charged_before = set(self._charges())
        self._payouts = PayoutChecker(prefix, shard) if payouts else None

    def _charges(self) -> list[Charge]:
        """Return the successful charges of the riders that Stripe lists."""
        client = payments.stripe_client()
        return [
            Charge(charge.id, payments.ride_id_of(charge), customer, charge.amount)
            for customer in self.riders.values_list("stripe_customer_id", flat=True)
            for charge in client.v1.charges.list(
                {"customer": customer, "limit": 100}
            ).auto_paging_iter()
            if charge.status == "succeeded"
        ]

    def is_idle(self) -> bool:
        """Return whether completer, enqueuer and worker have no work left."""
        return not any(self._left())

    def _left(self) -> list[int]:
        waiting = (
            self.keys.unfinished().filter(stuck_at__isnull=True),
            self.jobs.filter(failed_at__isnull=True),
            self._without_receipt(),
            self._unpaid(),
        )
        return [rows.count() for rows in waiting]

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until no work is left; return False after ``seconds`` without progress."""
        last, deadline = None, 0.0
        while any(left := self._left()):
            if left != last:
                last, deadline = left, time.monotonic() + seconds
            elif time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def backlog(self) -> int:
        """Return the number of missing receipts, 0 if the database is unavailable."""
        try:
            return self._without_receipt().count()
        except Error:
            return 0
        finally:
            connections[self.shard].close()

    def hangs(self) -> int:
        """Return the number of runs that were marked as hung."""
        return self.keys.aggregate(hangs=Sum("hangs"))["hangs"] or 0

    def _without_receipt(self):
        booked = self.rides.filter(
            idempotency_key__in=self.keys.finished().filter(response_code=201)
        )
        return booked.filter(receipt__isnull=True)

    def _unpaid(self):
        charged = self.rides.filter(stripe_charge_id__isnull=False)
        return charged.filter(paid_at__isnull=True) if self.webhooks else charged.none()

    def check(self, booked: dict[str, int], wrong_answers: list[str]) -> CheckResult:
        """Compare database and Stripe.

        ``booked`` maps a key to the ride in the 201 that a client received.
        """
        result = CheckResult(wrong_answers=len(wrong_answers), findings=list(wrong_answers))
        result.keys = self.keys.count()
        result.stuck_keys = self.keys.stuck().count()
        result.resumed_keys = self.keys.filter(attempts__gt=1).count()
        result.completer_keys = self.keys.filter(completer_attempts__gt=0).count()
        result.unfinished_keys = self.keys.unfinished().filter(stuck_at__isnull=True).count()
        result.staged_jobs = self.jobs.count()
        result.receipts = self.receipts.count()
        result.missing_receipts = self._without_receipt().count()
        result.unpaid_rides = self._unpaid().count()
        result.surplus_receipts = self.receipts.exclude(
            ride__idempotency_key__response_code=201
        ).count()
        created = AuditRecord.objects.using(self.shard).filter(
            action="ride.created", resource_type="ride"
        )
        records = Counter(created.values_list("resource_id", flat=True))
        result.unaudited_rides = sum(
            records[ride] != 1 for ride in self.rides.values_list("pk", flat=True)
        )
        self._check_rides(result, booked)
        self._check_charges(result)
        return result

    def _check_rides(self, result: CheckResult, booked: dict[str, int]) -> None:
        found = dict(self.rides.values_list("idempotency_key__idempotency_key", "pk"))
        result.rides = self.rides.count()
        result.surplus_rides = result.rides - len(found)
        lost = [key for key, ride in booked.items() if found.get(key) != ride]
        # A key that finished with 201 must have its ride even if no client received the response.
        finished = self.keys.finished().filter(response_code=201, ride__isnull=True)
        lost += finished.values_list("idempotency_key", flat=True)
        result.lost_rides = len(set(lost))
        result.findings += [f"lost: the ride of the key {key}" for key in sorted(set(lost))]

    def _check_charges(self, result: CheckResult) -> None:
        charges = set(self._charges()) - self._charged_before
        rides = self.rides.filter(stripe_charge_id__isnull=False)
        rows = rides.values_list("stripe_charge_id", "pk", "user__stripe_customer_id")
        recorded = {Charge(charge, str(ride), customer) for charge, ride, customer in rows}
        per_ride = Counter(charge.ride for charge in charges)
        result.charges = len(charges)
        result.double_charges = sum(count - 1 for count in per_ride.values())
        result.findings += [
            f"double: ride {ride} was charged {count} times"
            for ride, count in per_ride.items()
            if count > 1
        ]
        unmatched = recorded ^ charges
        result.unmatched_charges = len(unmatched)
        result.findings += [f"unmatched: {charge}" for charge in sorted(unmatched)]
        refused = self.rides.filter(
            stripe_charge_id__isnull=False, idempotency_key__response_code=402
        ).count()
        result.surplus_rides += refused

    def check_payouts(self, result: CheckResult, days: Collection[date]) -> None:
        """Compare rides, payouts and transfers of the days on which the pilots were paid."""
        if self._payouts is not None:
            found = self._payouts.check(days)
            result.unpaid_pilots = found.unpaid_pilots
            result.wrong_payouts = found.wrong_payouts
            result.double_transfers = found.double_transfers
            result.unmatched_transfers = found.unmatched_transfers
            result.unfinished_keys += found.unfinished_keys
            result.completer_payouts = found.completer_payouts
            result.pilots, result.findings = found.pilots, result.findings + found.findings

    def check_log(
        self, result: CheckResult, outcomes: Iterable[Outcome], stored_failures: int
    ) -> None:
        """Compare the requests and responses of each client with the rows.

        ``stored_failures`` is the number of charges for which Stripe stored a failure.
        """
        stored = {key: (code, bytes(body or b"")) for key, code, body in self._answers()}
        rides = {
            ride.idempotency_key.idempotency_key: ride
            for ride in self.rides.select_related("user", "idempotency_key")
        }
        for outcome in outcomes:
            booking, answer = outcome.booking, outcome.answer
            if outcome.label in ("201", "402") and stored.get(booking.key) != (
                answer.status_code,
                answer.content,
            ):
                result.changed_answers += 1
                result.findings.append(
                    f"changed: {booking.key} was answered {answer.text[:200]}, stored"
                    f" {stored.get(booking.key)}"
                )
            ride = rides.get(booking.key)
            if ride and (
                ride.user.api_token_hash != User.hash_token(booking.token)
                or any(float(getattr(ride, name)) != booking.body[name] for name in COORDINATES)
            ):
                result.changed_rides += 1
                result.findings.append(
                    f"changed: the ride {ride.pk} of {booking.key} is not what was asked for"
                )
        stuck = self.keys.stuck().values_list("idempotency_key", "recovery_point", "stuck_reason")
        if result.stuck_keys > stored_failures:
            result.unexplained_stuck = result.stuck_keys - stored_failures
            result.findings += [
                f"stuck: {key} at {point}: {reason}" for key, point, reason in stuck
            ]

    def _answers(self):
        return (
            self.keys.finished()
            .values_list("idempotency_key", "response_code", "response_body")
            .iterator()
        )
