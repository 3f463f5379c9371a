"""The run of a plan: clients book rides while the simulator injects faults.

One seed determines the bookings and the schedule of the faults, but not the scheduling of the
operating system.
"""

import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx

from rides_demo.simulator.booking_clients import (
    Booking,
    BookingClients,
    CannotSimulate,
    Outcome,
    Tally,
)
from rides_demo.simulator.crashes import Crashes
from rides_demo.simulator.cutting_proxy import cut_replies, cuts
from rides_demo.simulator.hangs import BODY, HANG, TOKEN
from rides_demo.simulator.limits import LIMITS
from rides_demo.simulator.paydays import KILL_PAY_PILOTS, Paydays
from rides_demo.simulator.plan import (
    CUT_REPLIES,
    DOWN_FAULTS,
    EVENTS,
    FAULTS,
    KINDS,
    SOAK_FAULTS,
    STRIPE_DOWN,
    STRIPE_FAULTS,
    Plan,
)
from rides_demo.simulator.suspensions import VANISH, Suspensions
from rides_demo.tenants import shards

__all__ = [
    "EVENTS",
    "FAULTS",
    "KINDS",
    "SOAK_FAULTS",
    "STRIPE_DOWN",
    "STRIPE_FAULTS",
    "Plan",
    "Simulation",
]

DOWN_SECONDS = 2.0
#: Long faults run in threads of their own, in parallel with the short ones.
LONG_FAULTS = (STRIPE_DOWN, VANISH, HANG)
PAYDAY_FAULTS = (KILL_PAY_PILOTS,)
#: The clients of a soak pause while more receipts than this are missing, because the only worker
#: may be slower than the clients.
LONGEST_BACKLOG = 200
BACKLOG_LOOK_SECONDS = 2.0


class Simulation:
    """One run of a plan."""

    def __init__(
        self,
        plan: Plan,
        base_url: str,
        *,
        stripe_url: str | None,
        run_dir: Path,
        seed: int,
        hosts: Sequence[str] = ("",),
    ) -> None:
        self.plan, self.stripe_url, self.run_dir = plan, stripe_url, run_dir
        self.crashes = Crashes(run_dir, random.Random(seed))
        self.tally = Tally()
        self.hosts = hosts
        limited = LIMITS in plan.required
        self.clients = BookingClients(base_url, self.tally, hosts[0], limited=limited)
        self.outcomes: list[Outcome] = []
        self.suspensions = Suspensions(
            Crashes(run_dir, random.Random(seed + 1)), self._ended_within
        )
        self._pauses = random.Random(seed + 2)
        self.paydays = Paydays(
            run_dir, plan.prefix, list(shards().values()), random.Random(seed + 3)
        )
        self._bookings = iter(plan.bookings)
        self._started, self._began, self._ended = 0, 0.0, False
        self._backlog = 0
        self._moved = threading.Condition()
        self._control = httpx.Client(timeout=10, trust_env=False)

    def run(
        self, concurrency: int, progress: Callable[[int], None], backlog: Callable[[], int] = int
    ) -> None:
        """Run all bookings with ``concurrency`` parallel clients.

        After each booking, call ``progress`` with the number of finished bookings. In a soak,
        ``backlog`` must return the number of missing receipts.
        """
        self.clients.check_service()
        self.crashes.check(self.plan.crashes)
        struck_before, cut_before = (
            self._set_stripe_faults(self.plan.stripe_faults),
            Counter(cuts(self.run_dir)),
        )
        self._began = time.monotonic()
        try:
            with cut_replies(self.run_dir) if CUT_REPLIES in self.plan.required else nullcontext():
                self._run_all(concurrency, progress, backlog)
        finally:
            struck = self._set_stripe_faults([]) - struck_before
        for kind, count in struck.items():
            self.tally.counts[f"fault stripe {kind}"] += count
        for route, count in (Counter(cuts(self.run_dir)) - cut_before).items():
            self.tally.counts[f"fault cut-replies of {route}"] += count

    def _run_all(
        self, concurrency: int, progress: Callable[[int], None], backlog: Callable[[], int]
    ) -> None:
        with ThreadPoolExecutor(concurrency) as pool, ThreadPoolExecutor(4) as control:
            paced = control.submit(
                self._watch_backlog, backlog if self.plan.seconds is not None else int
            )
            lanes = (
                lambda fault: fault not in (*LONG_FAULTS, *PAYDAY_FAULTS),
                lambda fault: fault in LONG_FAULTS,
                lambda fault: fault in PAYDAY_FAULTS,
            )
            events = [control.submit(self._run_events, lane) for lane in lanes]
            clients = [pool.submit(self._client, progress) for _ in range(concurrency)]
            try:
                # The first error ends the run, because a run without a client or without its
                # faults is no valid test.
                wait([*events, *clients], return_when=FIRST_EXCEPTION)
            finally:
                self._end()
            for task in [*events, *clients, paced]:
                task.result()

    def _client(self, progress: Callable[[int], None]) -> None:
        """Run one booking after another until there are no more."""
        while (booking := self._next()) is not None:
            outcome = self.clients.run(booking)
            with self._moved:
                self.outcomes.append(outcome)
                progress(len(self.outcomes))

    def _next(self) -> Booking | None:
        ends = math.inf if self.plan.seconds is None else self._began + self.plan.seconds
        with self._moved:
            self._moved.wait_for(
                lambda: self._ended or self._backlog <= LONGEST_BACKLOG or time.monotonic() >= ends
            )
            if self._ended or time.monotonic() >= ends:
                return None
            self._started += 1
            self._moved.notify_all()
            return next(self._bookings, None)

    def _watch_backlog(self, backlog: Callable[[], int]) -> None:
        """Update the backlog until the simulation ends."""
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
        """Wait until the simulation ends, for at most ``seconds``; return whether it has ended."""
        with self._moved:
            return self._moved.wait_for(lambda: self._ended, seconds)

    def replay(self, concurrency: int) -> None:
        """Send each finished booking again; the response must be a replay with the same bytes."""
        settled = [outcome for outcome in self.outcomes if outcome.label in ("201", "402")]
        with ThreadPoolExecutor(concurrency) as pool:
            for outcome, again in zip(
                settled, pool.map(lambda o: self.clients.resend(o.booking), settled), strict=True
            ):
                first = outcome.answer
                if again is None or (again.status_code, again.content) != (
                    first.status_code,
                    first.content,
                ):
                    self.tally.add_violation(
                        outcome.booking, f"the retry got {again and again.text[:200]}"
                    )
                elif "Idempotent-Replayed" not in again.headers:
                    self.tally.add_violation(
                        outcome.booking, "the retry was not marked as a replay"
                    )

    def booked(self, host: str = "") -> dict[str, int]:
        """Return the rides of the 201 responses to a tenant by key."""
        accepted = (
            outcome
            for outcome in self.outcomes
            if outcome.label == "201" and outcome.booking.host == host
        )
        return {outcome.booking.key: outcome.answer.json()["ride"]["id"] for outcome in accepted}

    def table(self) -> Counter[tuple[str, str]]:
        """Return the number of bookings by kind and outcome."""
        return Counter((outcome.booking.kind, outcome.label) for outcome in self.outcomes)

    def close(self) -> None:
        """Close the connections."""
        self.clients.close()
        self._control.close()

    def _run_events(self, mine: Callable[[str], bool]) -> None:
        """Inject the faults that ``mine`` selects, each at its time."""
        for position, fault in self.plan.events:
            if mine(fault) and self._await(position):
                # Without the pause, each fault would hit the start of a request.
                time.sleep(self._pauses.uniform(0, 0.1))
                for struck in self._inject(fault):
                    self.tally.count(f"fault {struck}")

    def _await(self, position: float) -> bool:
        """Wait for the position of an event; return False if the soak has ended."""
        if self.plan.seconds is not None:
            return not self._ended_within(self._began + position - time.monotonic())
        with self._moved:
            self._moved.wait_for(lambda: self._started > position or self._ended)
            return True

    def _inject(self, fault: str) -> list[str]:
        if fault == STRIPE_DOWN:
            return self._outage()
        if fault == HANG:
            return self._hang()
        if fault == KILL_PAY_PILOTS:
            return self.paydays.hold()
        return self.suspensions.inject() if fault == VANISH else self.crashes.inject(fault)

    def _hang(self) -> list[str]:
        """Book a ride at each tenant whose payment hangs. The hung runs are counted at the end."""
        for host in self.hosts:
            with self._moved:
                key = f"{self.plan.prefix}hang-{len(self.outcomes):06d}"
            outcome = self.clients.run(Booking(key, HANG, TOKEN, BODY, host))
            with self._moved:
                self.outcomes.append(outcome)
        return []

    def _outage(self) -> list[str]:
        self._set_stripe_faults(DOWN_FAULTS)
        time.sleep(DOWN_SECONDS)
        self._set_stripe_faults(self.plan.stripe_faults)
        return [STRIPE_DOWN]

    def webhooks(self) -> dict[str, int]:
        """Return the webhook counts of the sandbox, if there are any."""
        with suppress(ValueError, KeyError, TypeError):
            return dict(self._sandbox_state()["webhooks"])
        return {}

    def has_transfers(self) -> bool:
        """Return whether Stripe is the sandbox, which makes transfers to the pilots of the demo."""
        return "transfers" in self._sandbox_state()

    def _sandbox_state(self) -> dict[str, Any]:
        with suppress(httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError):
            return dict(self._control.get(f"{self.stripe_url}/_state").raise_for_status().json())
        return {}

    def _set_stripe_faults(self, faults: list[dict[str, object]]) -> Counter[str]:
        """Replace the active faults of the sandbox; return the counts of injected faults."""
        if not self.plan.needs_sandbox:
            return Counter()
        try:
            answer = self._control.post(
                f"{self.stripe_url}/_faults", content=json.dumps(faults)
            ).raise_for_status()
        except httpx.HTTPError as error:
            raise CannotSimulate(
                f"{self.stripe_url} accepts no faults ({error}): Stripe faults need the sandbox of"
                " this project."
            ) from None
        return Counter(answer.json()["fired"])
