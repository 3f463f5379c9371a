"""The simulator: books rides as phones would, while connections break, cards are declined, Stripe fails and processes die.

The schedule (who books when, with which fault) comes from one seed; what the operating system does with it does not.
"""

import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from pathlib import Path

import httpx

from rides_demo.simulated_clients import Booking, CannotSimulate, Outcome, Phones, Tally
from rides_demo.simulated_crashes import Crashes
from rides_demo.simulated_plan import CUT_REPLIES, DOWN, EVENTS, FAULTS, KINDS, SOAK_FAULTS, STRIPE_DOWN, STRIPE_FAULTS, Plan
from rides_demo.simulated_proxy import cut_replies, cuts
from rides_demo.simulated_vanishing import VANISH, Vanishing

__all__ = ["EVENTS", "FAULTS", "KINDS", "SOAK_FAULTS", "STRIPE_DOWN", "STRIPE_FAULTS", "Plan", "Simulation"]

DOWN_SECONDS = 2.0
#: What takes so long that others strike meanwhile.
LONG = (STRIPE_DOWN, VANISH)
#: The clients of a soak wait while more receipts than this are due: one worker cannot keep up with them for hours.
LONGEST_BACKLOG = 200
BACKLOG_LOOK_SECONDS = 2.0


class Simulation:
    """One run of a plan."""

    def __init__(self, plan: Plan, base_url: str, *, stripe_url: str | None, run_dir: Path, seed: int) -> None:
        self.plan, self.stripe_url, self.run_dir = plan, stripe_url, run_dir
        self.crashes = Crashes(run_dir, random.Random(seed))
        self.tally = Tally()
        self.phones = Phones(base_url, self.tally)
        self.outcomes: list[Outcome] = []
        self.vanishing = Vanishing(Crashes(run_dir, random.Random(seed + 1)), self._ended_within)
        self._pauses = random.Random(seed + 2)
        self._bookings = iter(plan.bookings)
        self._started, self._began, self._ended = 0, 0.0, False
        self._backlog = 0
        self._moved = threading.Condition()
        self._control = httpx.Client(timeout=10, trust_env=False)

    def run(self, concurrency: int, progress: Callable[[int], None], backlog: Callable[[], int] = int) -> None:
        """Play every booking with ``concurrency`` clients at once; ``progress`` is told how many are done.

        ``backlog`` is asked, in a soak, how many receipts are due.
        """
        self.phones.check_service()
        self.crashes.check(self.plan.crashes)
        struck_before, cut_before = self._set_weather(self.plan.weather), Counter(cuts(self.run_dir))
        self._began = time.monotonic()
        try:
            with cut_replies(self.run_dir) if CUT_REPLIES in self.plan.due else nullcontext():
                self._play_all(concurrency, progress, backlog)
        finally:
            struck = self._set_weather([]) - struck_before
        for kind, count in struck.items():
            self.tally.counts[f"fault stripe {kind}"] += count
        for route, count in (Counter(cuts(self.run_dir)) - cut_before).items():
            self.tally.counts[f"fault cut-replies of {route}"] += count

    def _play_all(self, concurrency: int, progress: Callable[[int], None], backlog: Callable[[], int]) -> None:
        with ThreadPoolExecutor(concurrency) as pool, ThreadPoolExecutor(3) as stage:
            paced = stage.submit(self._pace, backlog if self.plan.seconds is not None else int)
            directed = [stage.submit(self._direct, of_lane) for of_lane in (lambda f: f not in LONG, lambda f: f in LONG)]
            clients = [pool.submit(self._client, progress) for _ in range(concurrency)]
            try:
                # The first error ends it: without its faults, or a client, the rest would prove nothing.
                wait([*directed, *clients], return_when=FIRST_EXCEPTION)
            finally:
                self._end()
            for task in [*directed, *clients, paced]:
                task.result()

    def _client(self, progress: Callable[[int], None]) -> None:
        """Play one booking after the other, as long as there are some."""
        while (booking := self._next()) is not None:
            outcome = self.phones.play(booking)
            with self._moved:
                self.outcomes.append(outcome)
                progress(len(self.outcomes))

    def _next(self) -> Booking | None:
        ends = math.inf if self.plan.seconds is None else self._began + self.plan.seconds
        with self._moved:
            self._moved.wait_for(lambda: self._ended or self._backlog <= LONGEST_BACKLOG or time.monotonic() >= ends)
            if self._ended or time.monotonic() >= ends:
                return None
            self._started += 1
            self._moved.notify_all()
            return next(self._bookings, None)

    def _pace(self, backlog: Callable[[], int]) -> None:
        """Keep in mind how much is due, for as long as the simulation runs."""
        while not self._ended_within(BACKLOG_LOOK_SECONDS):
            due = backlog()
            with self._moved:
                self._backlog = due
                self._moved.notify_all()

    def _end(self) -> None:
        with self._moved:
            self._ended = True
            self._moved.notify_all()

    def _ended_within(self, seconds: float) -> bool:
        """Wait so many seconds, or until the simulation ends; return whether it did."""
        with self._moved:
            return self._moved.wait_for(lambda: self._ended, seconds)

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

    def _direct(self, mine: Callable[[str], bool]) -> None:
        """Let the faults of one lane strike, each at its time."""
        for position, fault in self.plan.events:
            if mine(fault) and self._await(position):
                # Not at the moment at which a request begins, but in the midst of some.
                time.sleep(self._pauses.uniform(0, 0.1))
                for struck in self._strike(fault):
                    self.tally.count(f"fault {struck}")

    def _await(self, position: float) -> bool:
        """Wait for the position of an event; return whether anything is left that it could strike."""
        if self.plan.seconds is not None:
            return not self._ended_within(self._began + position - time.monotonic())
        with self._moved:
            self._moved.wait_for(lambda: self._started > position or self._ended)
            return True

    def _strike(self, fault: str) -> list[str]:
        if fault == STRIPE_DOWN:
            return self._outage()
        return self.vanishing.strike() if fault == VANISH else self.crashes.strike(fault)

    def _outage(self) -> list[str]:
        self._set_weather(DOWN)
        time.sleep(DOWN_SECONDS)
        self._set_weather(self.plan.weather)
        return [STRIPE_DOWN]

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
