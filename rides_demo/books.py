"""The books of a simulation: what the clients saw, what the database holds and what Stripe charged must agree.

Nothing is written here, and nothing is repaired.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from idempotency.models import IdempotencyKey, StagedJob
from rides_demo import payments
from rides_demo.models import Receipt, Ride, User

POLL_SECONDS = 0.2


@dataclass
class Books:
    """Counts; the first group must be 0."""

    double_charges: int = 0
    lost_rides: int = 0
    missing_receipts: int = 0
    #: Charged rides that no webhook has marked as paid.
    unpaid_rides: int = 0
    unfinished_keys: int = 0
    #: Charges that no ride knows, and charge ids of rides that Stripe does not know.
    unmatched_charges: int = 0
    #: Rides of a key beyond the first, and charged rides of a declined card.
    surplus_rides: int = 0
    staged_jobs: int = 0
    #: Answers that the contract does not allow, replays with other bytes among them.
    wrong_answers: int = 0

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
    MUST_BE_ZERO = 9

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
        self._charged_before = {charge for charge, _ in self._charges()}

    def _charges(self) -> list[tuple[str, str]]:
        """Return each successful charge of the riders, as Stripe lists it, and the ride that it names."""
        client = payments.stripe_client()
        return [
            (charge.id, payments.ride_id_of(charge))
            for customer in self.riders.values_list("stripe_customer_id", flat=True)
            for charge in client.v1.charges.list({"customer": customer, "limit": 100}).auto_paging_iter()
            if charge.status == "succeeded"
        ]

    def at_rest(self) -> bool:
        """Tell whether completer, enqueuer and worker have nothing left to do."""
        return not (
            self.keys.unfinished().filter(stuck_at__isnull=True).exists()
            or StagedJob.objects.filter(failed_at__isnull=True).exists()
            or self._without_receipt().exists()
            or self._unpaid().exists()
        )

    def wait_at_rest(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the rest; return whether it came."""
        deadline = time.monotonic() + seconds
        while not (rest := self.at_rest()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return rest

    def _without_receipt(self):
        booked = self.rides.filter(idempotency_key__in=self.keys.finished().filter(response_code=201))
        return booked.filter(receipt__isnull=True)

    def _unpaid(self):
        charged = self.rides.filter(stripe_charge_id__isnull=False)
        return charged.filter(paid_at__isnull=True) if self.webhooks else charged.none()

    def check(self, booked: dict[str, int], wrong_answers: list[str]) -> Books:
        """Return the books; ``booked`` are the rides of the 201s that clients saw, by key."""
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
        charges = {charge: ride for charge, ride in self._charges() if charge not in self._charged_before}
        recorded = set(self.rides.filter(stripe_charge_id__isnull=False).values_list("stripe_charge_id", flat=True))
        per_ride = Counter(charges.values())
        books.charges = len(charges)
        books.double_charges = sum(count - 1 for count in per_ride.values())
        books.findings += [f"double: ride {ride} was charged {count} times" for ride, count in per_ride.items() if count > 1]
        unmatched = recorded ^ charges.keys()
        books.unmatched_charges = len(unmatched)
        books.findings += [f"unmatched: the charge {charge}" for charge in sorted(unmatched)]
        refused = self.rides.filter(stripe_charge_id__isnull=False, idempotency_key__response_code=402).count()
        books.surplus_rides += refused
