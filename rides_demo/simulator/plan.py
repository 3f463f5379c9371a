"""The plan of a simulation: its bookings and faults, drawn from one seed."""

import itertools
import random
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rides_demo.simulator.booking_clients import Booking
from rides_demo.simulator.crashes import (
    FAILOVER,
    KILL_LOOPS,
    KILL_SERVER,
    KILL_WEB,
    KILL_WORKER,
    RESTART_BROKER,
    RESTART_POSTGRES,
    VICTIMS,
)
from rides_demo.simulator.hangs import HANG
from rides_demo.simulator.limits import LIMITS
from rides_demo.simulator.paydays import KILL_PAY_PILOTS
from rides_demo.simulator.suspensions import VANISH

#: The kinds of booking of each client fault, with the percentage of bookings of each kind.
CLIENT_FAULTS = {
    "duplicates": {"duplicates": 12},
    "cut": {"cut-request": 6, "cut-before": 8, "cut-after": 6},
    "gone": {"gone": 4},
    "mismatch": {"mismatch": 4},
    "decline": {"declined": 10},
}
KINDS = ("plain", *(kind for kinds in CLIENT_FAULTS.values() for kind in kinds))
STRIPE_FAULTS, STRIPE_DOWN = "stripe-faults", "stripe-down"
#: The number of occurrences per run of each fault outside the clients.
EVENTS = {
    STRIPE_DOWN: 2,
    KILL_WEB: 6,
    "kill-enqueuer": 2,
    KILL_WORKER: 2,
    "kill-completer": 2,
    "kill-reaper": 1,
    KILL_SERVER: 1,
    KILL_PAY_PILOTS: 3,
    RESTART_POSTGRES: 2,
    "restart-redis": 2,
}
FAULTS = (*CLIENT_FAULTS, STRIPE_FAULTS, *EVENTS)
#: The number of kills of the broker, if there is one instead of Redis.
BROKER_RESTARTS = 2
#: A longer run kills more web workers.
KILLS_PER_BOOKING = 1 / 80

#: The faults of "stripe-faults" and their rates for charges. After a stored 500 the service finds
#: the charge by its metadata. A stored 500 without a charge (``500_begun``) requires manual review,
#: so only a soak has this fault.
STRIPE_FAULT_RATES = [
    {"fault": "slow", "probability": 0.06, "seconds": 0.6},
    {"fault": "429", "probability": 0.04},
    {"fault": "500_before", "probability": 0.04},
    {"fault": "500_after", "probability": 0.03},
    {"fault": "cut_before", "probability": 0.04},
    {"fault": "cut_after", "probability": 0.06},
]
#: The same for transfers to pilots. A run has few transfers, so their faults are more frequent.
TRANSFER_FAULT_RATES = [
    {"fault": fault, "path": "/v1/transfers", "probability": 0.1, "seconds": 0.6}
    for fault in ("slow", "429", "500_before", "500_after", "cut_before", "cut_after")
]
DOWN_FAULTS = [{"fault": "down", "path": "/"}]

#: The number of occurrences per ten minutes of a soak, for each fault outside the clients.
SOAK_EVENTS = {
    KILL_WEB: 75,
    "kill-enqueuer": 15,
    KILL_WORKER: 12,
    "kill-completer": 12,
    "kill-reaper": 6,
    KILL_SERVER: 6,
    RESTART_POSTGRES: 8,
    FAILOVER: 4,
    "restart-redis": 8,
    STRIPE_DOWN: 6,
    VANISH: 8,
    KILL_LOOPS: 8,
    KILL_PAY_PILOTS: 15,
    HANG: 5,
}
#: A soak accepts a stuck key for each 500 that Stripe stored without a charge.
SOAK_STRIPE_FAULT_RATES = [
    *STRIPE_FAULT_RATES,
    *TRANSFER_FAULT_RATES,
    {"fault": "500_begun", "probability": 0.003},
]
CUT_REPLIES, WRONG_CLOCK = "cut-replies", "wrong-clock"
#: The faults that only a soak has.
SOAK_FAULTS = (VANISH, CUT_REPLIES, WRONG_CLOCK, FAILOVER, KILL_LOOPS, HANG, LIMITS)
SOAK_CHUNK = 500


@dataclass(frozen=True)
class Plan:
    """The bookings in order, and the faults with their times."""

    prefix: str
    #: All bookings; in a soak, an infinite iterable.
    bookings: Iterable[Booking]
    #: Position and name of each fault in order. A position is a number of started bookings; in a
    #: soak, of seconds.
    events: tuple[tuple[float, str], ...]
    stripe_faults: list[dict[str, object]]
    #: The duration; None means until all bookings are made.
    seconds: float | None = None
    #: The faults that must be observed; otherwise the soak fails.
    required: frozenset[str] = frozenset()

    @classmethod
    def draw(cls, requests: int, faults: Collection[str], seed: int) -> "Plan":
        """Draw a plan from ``seed``.

        The prefix of the keys is random, so that two runs share no key.
        """
        chance, prefix = random.Random(seed), _new_prefix()
        bookings = tuple(_draw_bookings(chance, prefix, faults, range(requests)))
        kills = max(EVENTS[KILL_WEB], int(requests * KILLS_PER_BOOKING))
        counts = EVENTS | {KILL_WEB: kills, RESTART_BROKER: BROKER_RESTARTS}
        chosen = {fault: count for fault, count in counts.items() if fault in faults}
        events = sorted(
            (int(at), fault)
            for fault, count in chosen.items()
            for at in _positions(chance, requests, count)
        )
        return cls(
            prefix,
            bookings,
            tuple(events),
            [*STRIPE_FAULT_RATES, *TRANSFER_FAULT_RATES] if STRIPE_FAULTS in faults else [],
        )

    @classmethod
    def draw_soak(
        cls, minutes: float, faults: Collection[str], seed: int, hosts: Sequence[str] = ("",)
    ) -> "Plan":
        """Draw the plan of a soak from ``seed``: infinite bookings, each fault at least once.

        The tenants, which are named by their ``hosts``, use the same keys.
        """
        chance, prefix, seconds = random.Random(seed), _new_prefix(), minutes * 60
        chosen = {
            fault: max(1, round(n * minutes / 10))
            for fault, n in SOAK_EVENTS.items()
            if fault in faults
        }
        events = sorted(
            (at, fault)
            for fault, count in chosen.items()
            for at in _positions(chance, seconds, count)
        )
        orders = random.Random(seed + 1)
        chunks = (range(first, first + SOAK_CHUNK) for first in itertools.count(0, SOAK_CHUNK))
        bookings = itertools.chain.from_iterable(
            _draw_bookings(orders, prefix, faults, numbers, hosts) for numbers in chunks
        )
        stripe_faults = SOAK_STRIPE_FAULT_RATES if STRIPE_FAULTS in faults else []
        return cls(
            prefix,
            bookings,
            tuple(events),
            stripe_faults,
            seconds,
            frozenset(chosen) | set(faults) & {CUT_REPLIES, WRONG_CLOCK, LIMITS},
        )

    @property
    def crashes(self) -> set[str]:
        """The events that end a process."""
        return {fault for _, fault in self.events if fault in VICTIMS}

    @property
    def needs_sandbox(self) -> bool:
        """Whether the plan has faults of Stripe, or pays the pilots."""
        return bool(self.stripe_faults) or any(
            fault in (STRIPE_DOWN, KILL_PAY_PILOTS) for _, fault in self.events
        )


def _new_prefix() -> str:
    return f"sim-{uuid.uuid4().hex[:12]}-"


def _draw_bookings(
    chance: random.Random,
    prefix: str,
    faults: Collection[str],
    numbers: range,
    hosts: Sequence[str] = ("",),
) -> list[Booking]:
    weights = {
        kind: n
        for fault, kinds in CLIENT_FAULTS.items()
        if fault in faults
        for kind, n in kinds.items()
    }
    kinds = [*weights, "plain"]
    drawn = chance.choices(kinds, [*weights.values(), 100 - sum(weights.values())], k=len(numbers))
    return [
        Booking(
            key=f"{prefix}{number // len(hosts):06d}",
            host=hosts[number % len(hosts)],
            kind=kind,
            token="demo-joe" if kind == "declined" else chance.choice(("demo-jane", "demo-max")),
            body={
                name: round(chance.uniform(-limit, limit), 6)
                for name, limit in (
                    ("origin_lat", 90),
                    ("origin_lon", 180),
                    ("target_lat", 90),
                    ("target_lon", 180),
                )
            },
        )
        for number, kind in zip(numbers, drawn, strict=True)
    ]


def _positions(chance: random.Random, length: float, count: int) -> tuple[float, ...]:
    """Spread ``count`` events over the first nine tenths of the run."""
    step = 0.9 * length / count
    return tuple(step * (number + chance.uniform(0.2, 1)) for number in range(count))
