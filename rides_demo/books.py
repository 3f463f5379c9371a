"""The books of a simulation: what the clients saw, what the database holds and what Stripe charged must agree.

Nothing is written here, and nothing is repaired.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from django.db import Error, connection

from idempotency.models import IdempotencyKey, StagedJob
from rides_demo import payments
from rides_demo.models import RIDE_AMOUNT, AuditRecord, Receipt, Ride, User
from rides_demo.simulated_clients import Outcome

POLL_SECONDS = 0.2
COORDINATES = ("origin_lat", "origin_lon", "target_lat", "target_lon")


class Charge(NamedTuple):
    """A successful charge, as Stripe lists it or as the ride that records it would have it."""

    id: str
    ride: str
    customer: str
    amount: int = RIDE_AMOUNT


@dataclass
class Books:
    """Counts; the first group must be 0."""

    double_charges: int = 0
    lost_rides: int = 0
    missing_receipts: int = 0
    #: Charged rides that no webhook has marked as paid.
    unpaid_rides: int = 0
    unfinished_keys: int = 0
    #: Charges that no ride records as Stripe has them (its id, ride, customer, amount), and those of rides that Stripe has not.
    unmatched_charges: int = 0
    #: Rides of a key beyond the first, and charged rides of a declined card.
    surplus_rides: int = 0
    staged_jobs: int = 0
    #: Answers that the contract does not allow, replays with other bytes among them.
    wrong_answers: int = 0
    #: Answers that clients saw and that are not what is stored, byte for byte.
    changed_answers: int = 0
    #: Rides that are not what their client asked for: another rider, another place.
    changed_rides: int = 0
    #: Rides without exactly one audit record, and receipts of rides that nobody was promised.
    unaudited_rides: int = 0
    surplus_receipts: int = 0
    #: Keys that are stuck beyond those whose charge Stripe has stored a failure for.
    unexplained_stuck: int = 0

    stuck_keys: int = 0
    #: Keys that more than one run worked on, and those among them that the completer took up.
    resumed_keys: int = 0
    completer_keys: int = 0
    keys: int = 0
    rides: int = 0
    charges: int = 0
    receipts: int = 0
    #: What is wrong, for people.
    findings: list[str] = field(default_factory=list)

    #: How many of the fields above must be 0.
    MUST_BE_ZERO = 14

    @property
    def right(self) -> bool:
        """Whether every invariant holds."""
        return not any(getattr(self, entry.name) for entry in fields(self)[: self.MUST_BE_ZERO])

    def line(self) -> str:
        """Return the line that sums it up."""
        return (
            f"double charges {self.double_charges}, lost rides {self.lost_rides}, missing receipts {self.missing_receipts}, "
            f"unfinished keys {self.unfinished_keys}"
        )


class Ledger:
    """Reads the part of database and Stripe that belongs to one simulation: the keys that begin with ``prefix``.

    ``webhooks`` says that Stripe tells the service of each charge, so that each charged ride must be paid in the end.
    """

    def __init__(self, prefix: str, tokens: Iterable[str], *, webhooks: bool = False) -> None:
        self.webhooks = webhooks
        self.keys = IdempotencyKey.objects.filter(idempotency_key__startswith=prefix)
        self.rides = Ride.objects.filter(idempotency_key__in=self.keys)
        self.riders = User.objects.filter(api_token_hash__in=[User.hash_token(token) for token in tokens])
        self._charged_before = set(self._charges())

    def _charges(self) -> list[Charge]:
        """Return each successful charge of the riders, as Stripe lists it."""
        client = payments.stripe_client()
        return [
            Charge(charge.id, payments.ride_id_of(charge), customer, charge.amount)
            for customer in self.riders.values_list("stripe_customer_id", flat=True)
            for charge in client.v1.charges.list({"customer": customer, "limit": 100}).auto_paging_iter()
            if charge.status == "succeeded"
        ]

    def at_rest(self) -> bool:
        """Tell whether completer, enqueuer and worker have nothing left to do."""
        return not any(self._left())

    def _left(self) -> list[int]:
        waiting = (
            self.keys.unfinished().filter(stuck_at__isnull=True),
            StagedJob.objects.filter(failed_at__isnull=True),
            self._without_receipt(),
            self._unpaid(),
        )
        return [rows.count() for rows in waiting]

    def wait_at_rest(self, seconds: float) -> bool:
        """Wait for the rest, until nothing has moved for ``seconds``: slow is not lost. Return whether it came."""
        last, deadline = None, 0.0
        while any(left := self._left()):
            if left != last:
                last, deadline = left, time.monotonic() + seconds
            elif time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def backlog(self) -> int:
        """Return how many receipts are due, 0 while the database is not there; closes the connection of its thread."""
        try:
            return self._without_receipt().count()
        except Error:
            return 0
        finally:
            connection.close()

    def _without_receipt(self):
        booked = self.rides.filter(idempotency_key__in=self.keys.finished().filter(response_code=201))
        return booked.filter(receipt__isnull=True)

    def _unpaid(self):
        charged = self.rides.filter(stripe_charge_id__isnull=False)
        return charged.filter(paid_at__isnull=True) if self.webhooks else charged.none()

    def check(self, booked: dict[str, int], wrong_answers: list[str]) -> Books:
        """Return the books; ``booked`` are the rides of the 201s that clients saw, by key. See ``check_log`` for the rest."""
        books = Books(wrong_answers=len(wrong_answers), findings=list(wrong_answers))
        books.keys = self.keys.count()
        books.stuck_keys = self.keys.stuck().count()
        books.resumed_keys = self.keys.filter(attempts__gt=1).count()
        books.completer_keys = self.keys.filter(completer_attempts__gt=0).count()
        books.unfinished_keys = self.keys.unfinished().filter(stuck_at__isnull=True).count()
        books.staged_jobs = StagedJob.objects.count()
        books.receipts = Receipt.objects.filter(ride__in=self.rides).count()
        books.missing_receipts = self._without_receipt().count()
        books.unpaid_rides = self._unpaid().count()
        books.surplus_receipts = (
            Receipt.objects.filter(ride__in=self.rides).exclude(ride__idempotency_key__response_code=201).count()
        )
        records = Counter(
            AuditRecord.objects.filter(action="ride.created", resource_type="ride").values_list("resource_id", flat=True)
        )
        books.unaudited_rides = sum(records[ride] != 1 for ride in self.rides.values_list("pk", flat=True))
        self._check_rides(books, booked)
        self._check_charges(books)
        return books

    def _check_rides(self, books: Books, booked: dict[str, int]) -> None:
        found = dict(self.rides.values_list("idempotency_key__idempotency_key", "pk"))
        books.rides = self.rides.count()
        books.surplus_rides = books.rides - len(found)
        lost = [key for key, ride in booked.items() if found.get(key) != ride]
        # A key that was finished with a 201 has its ride too when no client saw the answer.
        finished = self.keys.finished().filter(response_code=201, ride__isnull=True)
        lost += finished.values_list("idempotency_key", flat=True)
        books.lost_rides = len(set(lost))
        books.findings += [f"lost: the ride of the key {key}" for key in sorted(set(lost))]

    def _check_charges(self, books: Books) -> None:
        charges = set(self._charges()) - self._charged_before
        rides = self.rides.filter(stripe_charge_id__isnull=False)
        rows = rides.values_list("stripe_charge_id", "pk", "user__stripe_customer_id")
        recorded = {Charge(charge, str(ride), customer) for charge, ride, customer in rows}
        per_ride = Counter(charge.ride for charge in charges)
        books.charges = len(charges)
        books.double_charges = sum(count - 1 for count in per_ride.values())
        books.findings += [f"double: ride {ride} was charged {count} times" for ride, count in per_ride.items() if count > 1]
        unmatched = recorded ^ charges
        books.unmatched_charges = len(unmatched)
        books.findings += [f"unmatched: {charge}" for charge in sorted(unmatched)]
        refused = self.rides.filter(stripe_charge_id__isnull=False, idempotency_key__response_code=402).count()
        books.surplus_rides += refused

    def check_log(self, books: Books, outcomes: Iterable[Outcome], stored_failures: int) -> None:
        """Hold what each client sent and saw against the rows; ``stored_failures`` charges have failed at Stripe for good."""
        stored = {key: (code, bytes(body or b"")) for key, code, body in self._answers()}
        rides = {ride.idempotency_key.idempotency_key: ride for ride in self.rides.select_related("user", "idempotency_key")}
        for outcome in outcomes:
            booking, answer = outcome.booking, outcome.answer
            if outcome.label in ("201", "402") and stored.get(booking.key) != (answer.status_code, answer.content):
                books.changed_answers += 1
                books.findings.append(
                    f"changed: {booking.key} was answered {answer.text[:200]}, stored {stored.get(booking.key)}"
                )
            ride = rides.get(booking.key)
            if ride and (
                ride.user.api_token_hash != User.hash_token(booking.token)
                or any(float(getattr(ride, name)) != booking.body[name] for name in COORDINATES)
            ):
                books.changed_rides += 1
                books.findings.append(f"changed: the ride {ride.pk} of {booking.key} is not what was asked for")
        stuck = self.keys.stuck().values_list("idempotency_key", "recovery_point", "stuck_reason")
        if books.stuck_keys > stored_failures:
            books.unexplained_stuck = books.stuck_keys - stored_failures
            books.findings += [f"stuck: {key} at {point}: {reason}" for key, point, reason in stuck]

    def _answers(self):
        return self.keys.finished().values_list("idempotency_key", "response_code", "response_body").iterator()
