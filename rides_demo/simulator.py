"""The simulator: books rides as phones would, while connections break, cards are declined, Stripe fails and processes die.

The schedule (who books when, with which fault) comes from one seed; what the operating system does with it does not.
"""

import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from rides_demo.simulated_clients import Booking, CannotSimulate, Outcome, Phones, Tally
from rides_demo.simulated_crashes import KILL_WEB, KILL_WORKER, VICTIMS, Crashes

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
DOWN_SECONDS = 2.0


@dataclass(frozen=True)
class Plan:
    """What will happen: the bookings in their order, and after which of them what goes wrong around them."""

    prefix: str
    bookings: tuple[Booking, ...]
    #: The faults that strike around them, each when so many bookings have begun; in their order.
    events: tuple[tuple[int, str], ...]
    weather: list[dict[str, object]]

    @classmethod
    def draw(cls, requests: int, faults: Collection[str], seed: int) -> "Plan":
        """Draw a plan from ``seed``; only the prefix of the keys is new each time, so that two runs do not meet."""
        chance = random.Random(seed)
        prefix = f"sim-{uuid.uuid4().hex[:12]}-"
        weights = {kind: n for fault, kinds in CLIENT_FAULTS.items() if fault in faults for kind, n in kinds.items()}
        kinds = [*weights, "plain"]
        drawn = chance.choices(kinds, [*weights.values(), 100 - sum(weights.values())], k=requests)
        bookings = tuple(
            Booking(
                key=f"{prefix}{number:06d}",
                kind=kind,
                token="demo-joe" if kind == "declined" else chance.choice(("demo-jane", "demo-max")),
                body={
                    name: round(chance.uniform(-limit, limit), 6)
                    for name, limit in (("origin_lat", 90), ("origin_lon", 180), ("target_lat", 90), ("target_lon", 180))
                },
            )
            for number, kind in enumerate(drawn)
        )
        counts = EVENTS | {KILL_WEB: max(EVENTS[KILL_WEB], int(requests * KILLS_PER_BOOKING))}
        chosen = {fault: count for fault, count in counts.items() if fault in faults}
        events = sorted((at, fault) for fault, count in chosen.items() for at in _positions(chance, requests, count))
        return cls(prefix, bookings, tuple(events), WEATHER if STRIPE_FAULTS in faults else [])

    @property
    def crashes(self) -> set[str]:
        """The faults among the events that end a process."""
        return {fault for _, fault in self.events if fault in VICTIMS}

    @property
    def needs_sandbox(self) -> bool:
        """Whether Stripe is to fail on demand."""
        return bool(self.weather) or any(fault == STRIPE_DOWN for _, fault in self.events)


def _positions(chance: random.Random, requests: int, count: int) -> tuple[int, ...]:
    """Spread ``count`` events over the first nine tenths of the run."""
    step = 0.9 * requests / count
    return tuple(int(step * (number + chance.uniform(0.2, 1))) for number in range(count))


class Simulation:
    """One run of a plan."""

    def __init__(self, plan: Plan, base_url: str, *, stripe_url: str | None, run_dir: Path, seed: int) -> None:
        self.plan, self.stripe_url = plan, stripe_url
        self._chance = random.Random(seed)
        self.crashes = Crashes(run_dir, self._chance)
        self.tally = Tally()
        self.phones = Phones(base_url, self.tally)
        self.outcomes: list[Outcome] = []
        self._started = 0
        self._moved = threading.Condition()
        self._control = httpx.Client(timeout=10, trust_env=False)

    def run(self, concurrency: int, progress: Callable[[int], None]) -> None:
        """Play every booking with ``concurrency`` clients at once; ``progress`` is told how many are done."""
        self.phones.check_service()
        self.crashes.check(self.plan.crashes)
        struck_before = self._set_weather(self.plan.weather)
        try:
            with ThreadPoolExecutor(concurrency) as pool, ThreadPoolExecutor(1) as stage:
                directed = stage.submit(self._direct)
                try:
                    for done, outcome in enumerate(pool.map(self._play, self.plan.bookings), start=1):
                        self.outcomes.append(outcome)
                        progress(done)
                finally:
                    with self._moved:
                        self._started = len(self.plan.bookings)
                        self._moved.notify_all()
                directed.result()
        finally:
            struck = self._set_weather([]) - struck_before
        for kind, count in struck.items():
            self.tally.counts[f"fault stripe {kind}"] += count

    def replay(self, concurrency: int) -> None:
        """Send each settled booking once more: the same bytes must come, marked as a replay."""
        settled = [outcome for outcome in self.outcomes if outcome.label in ("201", "402")]
        with ThreadPoolExecutor(concurrency) as pool:
            for outcome, again in zip(settled, pool.map(lambda o: self.phones.again(o.booking), settled), strict=True):
                first = outcome.answer
                if again is None or (again.status_code, again.content) != (first.status_code, first.content):
                    self.tally.complain(outcome.booking, f"the retry got {again and again.text[:200]}")
                elif "Idempotent-Replayed" not in again.headers:
                    self.tally.complain(outcome.booking, "the retry was not marked as a replay")

    def booked(self) -> dict[str, int]:
        """Return the rides of the 201s that clients saw, by key."""
        return {o.booking.key: o.answer.json()["ride"]["id"] for o in self.outcomes if o.label == "201"}

    def table(self) -> Counter[tuple[str, str]]:
        """Return how many bookings of each kind ended how."""
        return Counter((outcome.booking.kind, outcome.label) for outcome in self.outcomes)

    def close(self) -> None:
        """Close the connections."""
        self.phones.close()
        self._control.close()

    def _play(self, booking: Booking) -> Outcome:
        with self._moved:
            self._started += 1
            self._moved.notify_all()
        return self.phones.play(booking)

    def _direct(self) -> None:
        for position, fault in self.plan.events:
            with self._moved:
                self._moved.wait_for(lambda at=position: self._started > at)
            # Not at the moment at which a request begins, but in the midst of some.
            time.sleep(self._chance.uniform(0, 0.1))
            if fault == STRIPE_DOWN:
                self._outage()
                continue
            for struck in self.crashes.strike(fault):
                self.tally.count(f"fault {struck}")

    def _outage(self) -> None:
        self._set_weather(DOWN)
        time.sleep(DOWN_SECONDS)
        self._set_weather(self.plan.weather)

    def webhooks(self) -> dict[str, int]:
        """Return what the sandbox has counted of its webhooks; nothing when it sends none, or is not ours."""
        with suppress(httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
            return dict(self._control.get(f"{self.stripe_url}/_state").raise_for_status().json()["webhooks"])
        return {}

    def _set_weather(self, faults: list[dict[str, object]]) -> Counter[str]:
        """Put ``faults`` in force at the sandbox, and return how often each kind has struck so far."""
        if not self.plan.needs_sandbox:
            return Counter()
        try:
            answer = self._control.post(f"{self.stripe_url}/_faults", content=json.dumps(faults)).raise_for_status()
        except httpx.HTTPError as error:
            raise CannotSimulate(
                f"{self.stripe_url} takes no faults ({error}): faults of Stripe need the sandbox of this project."
            ) from None
        return Counter(answer.json()["fired"])
