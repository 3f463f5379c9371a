"""Paydays: the pilots are paid by two processes at once, which are killed at random.

The simulator cannot wait for midnight. On a payday it dates the rides that were booked since the
last one to an earlier day, so that this day is over.
"""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from datetime import UTC, date, datetime, timedelta
from datetime import time as time_of_day
from pathlib import Path
from typing import TypeVar

from django.db import Error, connections
from django.db.models import Min

from rides_demo.models import Payout, Ride
from rides_demo.simulator.booking_clients import CannotSimulate

KILL_PAY_PILOTS = "kill-pay-pilots"
MANAGE = Path(__file__).resolve().parents[2] / "manage.py"
#: A process is killed within this time after some of its lines. It prints a line when it begins a
#: day, and one for each pilot.
KILL_LINES, KILL_SECONDS = (1, 2, 3, 4), 0.06
#: The number of attempts, because a process may have paid all pilots before it is killed.
TRIES = 6
#: The longest restart of the database, the longest run of a process, and the longest time until all
#: pilots are paid at the end.
DATABASE_SECONDS, PROCESS_SECONDS, FINISH_SECONDS = 60.0, 120.0, 90.0
POLL_SECONDS = 0.5

Result = TypeVar("Result")


class Paydays:
    """The paydays of one simulation, whose keys begin with ``prefix``."""

    def __init__(
        self, run_dir: Path, prefix: str, shards: Collection[str], chance: random.Random
    ) -> None:
        self._run_dir, self._prefix, self._shards = run_dir, prefix, shards
        self._chance = chance
        self._midnight = datetime.combine(datetime.now(UTC).date(), time_of_day(), UTC)
        #: The days that are over, the latest first.
        self.days: list[date] = []
        #: The number of processes that have paid pilots, and the number of those that were killed.
        self.runs = self.kills = 0

    def hold(self) -> list[str]:
        """End a day, and let two processes pay the pilots for it. Kill one or both of them; return
        the observed faults. The completer or a later run pays the rest."""
        day = self._end_day()
        for _ in range(TRIES):
            if struck := self._pay_and_kill(day):
                return struck
        return []

    def finish(self) -> None:
        """End the last day, and let two processes at once pay all days, until both have paid all
        pilots. After ``FINISH_SECONDS`` the check finds those that are not paid."""
        self._end_day()
        deadline = time.monotonic() + FINISH_SECONDS
        while time.monotonic() < deadline:
            both = [self._start(self.days), self._start(self.days)]
            if not any([self._end(run) for run in both]):  # noqa: C419 - both must end
                return
            time.sleep(POLL_SECONDS)

    def _end_day(self) -> date:
        """Date the finished rides since the last payday to the day before the earliest one."""
        day = self._persistently(self._day_before_all) if not self.days else self.days[-1]
        day -= timedelta(days=1)
        noon = datetime.combine(day, time_of_day(12), UTC)
        for shard in self._shards:
            rides = Ride.objects.using(shard).filter(
                idempotency_key__idempotency_key__startswith=self._prefix,
                idempotency_key__response_code=201,
                created_at__gte=self._midnight,
            )
            self._persistently(lambda rides=rides: rides.update(created_at=noon))
        self.days.append(day)
        return day

    def _day_before_all(self) -> date:
        """Return the first day that has a ride or a payout, or today."""
        days = [self._midnight.date()]
        for shard in self._shards:
            ride = Ride.objects.using(shard).aggregate(at=Min("created_at"))["at"]
            payout = Payout.objects.using(shard).aggregate(day=Min("day"))["day"]
            days += [ride.astimezone(UTC).date()] if ride else []
            days += [payout] if payout else []
        return min(days)

    def _persistently(self, query: Callable[[], Result]) -> Result:
        """Run the query again while the database restarts, or after a serialization failure."""
        deadline = time.monotonic() + DATABASE_SECONDS
        while True:
            try:
                return query()
            except Error:
                if time.monotonic() > deadline:
                    raise
            finally:
                # The connections belong to this thread, and the database may restart.
                for shard in self._shards:
                    connections[shard].close()
            time.sleep(POLL_SECONDS)

    def _pay_and_kill(self, day: date) -> list[str]:
        both = [self._start([day]), self._start([day])]
        victims = self._chance.sample(both, self._chance.choice((1, 2)))
        read = dict.fromkeys(both, "")
        for victim in victims:
            assert victim.stdout is not None
            for _ in range(self._chance.choice(KILL_LINES)):
                read[victim] += victim.stdout.readline()
            time.sleep(self._chance.uniform(0, KILL_SECONDS))
            victim.kill()
        statuses = {run: self._end(run, read[run]) for run in both}
        struck = [KILL_PAY_PILOTS for victim in victims if statuses[victim] == -signal.SIGKILL]
        self.kills += len(struck)
        return struck

    def _start(self, days: list[date]) -> subprocess.Popen[str]:
        self.runs += 1
        return subprocess.Popen(
            [sys.executable, str(MANAGE), "pay_pilots", "--day", *map(str, days)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _end(self, run: subprocess.Popen[str], read: str = "") -> int:
        """Wait for the end of a process, and log its output, of which ``read`` is the beginning.
        Return its exit status."""
        try:
            output, _ = run.communicate(timeout=PROCESS_SECONDS)
        except subprocess.TimeoutExpired:
            run.kill()
            output, _ = run.communicate()
            raise CannotSimulate(
                f"pay_pilots did not end within {PROCESS_SECONDS:g} seconds: {output[-500:]}"
            ) from None
        finally:
            if run.stdout is not None:
                run.stdout.close()
        with (self._run_dir / "pay_pilots.log").open("a") as log:
            log.write(f"{read}{output}ended with status {run.returncode}\n")
        return run.returncode
