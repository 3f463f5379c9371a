"""What a simulation will do: who books when, and what goes wrong around them, all of it drawn from one seed."""

import itertools
import random
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rides_demo.simulated_clients import Booking
from rides_demo.simulated_crashes import KILL_SERVER, KILL_WEB, KILL_WORKER, VICTIMS
from rides_demo.simulated_vanishing import VANISH

#: What may go wrong with a client, by fault: the kinds of booking, and how many of a hundred bookings are of each.
CLIENT_FAULTS = {
    "duplicates": {"duplicates": 12},
    "cut": {"cut-request": 6, "cut-before": 8, "cut-after": 6},
    "gone": {"gone": 4},
    "mismatch": {"mismatch": 4},
    "decline": {"declined": 10},
}
KINDS = ("plain", *(kind for kinds in CLIENT_FAULTS.values() for kind in kinds))
STRIPE_FAULTS, STRIPE_DOWN = "stripe-faults", "stripe-down"
#: What strikes around the clients, by fault: how many times in a run.
EVENTS = {
    STRIPE_DOWN: 2,
    KILL_WEB: 6,
    "kill-enqueuer": 2,
    KILL_WORKER: 2,
    "kill-completer": 2,
    "kill-reaper": 1,
    KILL_SERVER: 1,
    "restart-postgres": 2,
    "restart-redis": 2,
}
FAULTS = (*CLIENT_FAULTS, STRIPE_FAULTS, *EVENTS)
#: More web workers in a longer run.
KILLS_PER_BOOKING = 1 / 80

#: What Stripe does under "stripe-faults", to so many of its requests. A stored 500 after the charge is found by the charge's
#: metadata; one without a charge (``500_begun``) needs a person, so it is not here.
WEATHER = [
    {"fault": "slow", "probability": 0.06, "seconds": 0.6},
    {"fault": "429", "probability": 0.04},
    {"fault": "500_before", "probability": 0.04},
    {"fault": "500_after", "probability": 0.03},
    {"fault": "cut_before", "probability": 0.04},
    {"fault": "cut_after", "probability": 0.06},
]
DOWN = [{"fault": "down", "path": "/"}]

#: What strikes in a soak beside the clients and the weather: how many times in ten minutes.
SOAK_EVENTS = {
    KILL_WEB: 75,
    "kill-enqueuer": 15,
    KILL_WORKER: 12,
    "kill-completer": 12,
    "kill-reaper": 6,
    KILL_SERVER: 6,
    "restart-postgres": 8,
    "restart-redis": 8,
    STRIPE_DOWN: 6,
    VANISH: 8,
}
#: A soak has people who answer what is stuck: so here Stripe also stores failures of its own that charged nothing.
SOAK_WEATHER = [*WEATHER, {"fault": "500_begun", "probability": 0.003}]
CUT_REPLIES, WRONG_CLOCK = "cut-replies", "wrong-clock"
#: What is there for a soak alone.
SOAK_FAULTS = (VANISH, CUT_REPLIES, WRONG_CLOCK)
SOAK_CHUNK = 500


@dataclass(frozen=True)
class Plan:
    """What will happen: the bookings in their order, and when what goes wrong around them."""

    prefix: str
    #: As many as are to be made; of a soak, as many as anybody takes.
    bookings: Iterable[Booking]
    #: The faults that strike around them, in order: each when so many bookings have begun; in a soak, after so many seconds.
    events: tuple[tuple[float, str], ...]
    weather: list[dict[str, object]]
    #: How long bookings are made; None: until all are.
    seconds: float | None = None
    #: The kinds of fault that must have struck, or nothing was proved.
    due: frozenset[str] = frozenset()

    @classmethod
    def draw(cls, requests: int, faults: Collection[str], seed: int) -> "Plan":
        """Draw a plan from ``seed``; only the prefix of the keys is new each time, so that two runs do not meet."""
        chance, prefix = random.Random(seed), _new_prefix()
        bookings = tuple(_draw_bookings(chance, prefix, faults, range(requests)))
        counts = EVENTS | {KILL_WEB: max(EVENTS[KILL_WEB], int(requests * KILLS_PER_BOOKING))}
        chosen = {fault: count for fault, count in counts.items() if fault in faults}
        events = sorted((int(at), fault) for fault, count in chosen.items() for at in _positions(chance, requests, count))
        return cls(prefix, bookings, tuple(events), WEATHER if STRIPE_FAULTS in faults else [])

    @classmethod
    def draw_soak(cls, minutes: float, faults: Collection[str], seed: int) -> "Plan":
        """Draw a plan of ``minutes`` from ``seed``: bookings without end, and each of the faults at least once."""
        chance, prefix, seconds = random.Random(seed), _new_prefix(), minutes * 60
        chosen = {fault: max(1, round(n * minutes / 10)) for fault, n in SOAK_EVENTS.items() if fault in faults}
        events = sorted((at, fault) for fault, count in chosen.items() for at in _positions(chance, seconds, count))
        orders = random.Random(seed + 1)
        chunks = (range(first, first + SOAK_CHUNK) for first in itertools.count(0, SOAK_CHUNK))
        bookings = itertools.chain.from_iterable(_draw_bookings(orders, prefix, faults, numbers) for numbers in chunks)
        weather = SOAK_WEATHER if STRIPE_FAULTS in faults else []
        return cls(
            prefix, bookings, tuple(events), weather, seconds, frozenset(chosen) | set(faults) & {CUT_REPLIES, WRONG_CLOCK}
        )

    @property
    def crashes(self) -> set[str]:
        """The faults among the events that end a process."""
        return {fault for _, fault in self.events if fault in VICTIMS}

    @property
    def needs_sandbox(self) -> bool:
        """Whether Stripe is to fail on demand."""
        return bool(self.weather) or any(fault == STRIPE_DOWN for _, fault in self.events)


def _new_prefix() -> str:
    return f"sim-{uuid.uuid4().hex[:12]}-"


def _draw_bookings(chance: random.Random, prefix: str, faults: Collection[str], numbers: range) -> list[Booking]:
    weights = {kind: n for fault, kinds in CLIENT_FAULTS.items() if fault in faults for kind, n in kinds.items()}
    kinds = [*weights, "plain"]
    drawn = chance.choices(kinds, [*weights.values(), 100 - sum(weights.values())], k=len(numbers))
    return [
        Booking(
            key=f"{prefix}{number:06d}",
            kind=kind,
            token="demo-joe" if kind == "declined" else chance.choice(("demo-jane", "demo-max")),
            body={
                name: round(chance.uniform(-limit, limit), 6)
                for name, limit in (("origin_lat", 90), ("origin_lon", 180), ("target_lat", 90), ("target_lon", 180))
            },
        )
        for number, kind in zip(numbers, drawn, strict=True)
    ]


def _positions(chance: random.Random, length: float, count: int) -> tuple[float, ...]:
    """Spread ``count`` events over the first nine tenths of the run."""
    step = 0.9 * length / count
    return tuple(step * (number + chance.uniform(0.2, 1)) for number in range(count))
