"""The tenants of a simulation: the hosts of the service, each with its own database and its own
consistency check."""

from collections.abc import Collection, Iterable

from rides_demo.simulator.consistency import Checker, CheckResult
from rides_demo.simulator.simulation import Simulation
from rides_demo.tenants import shards


class Tenants:
    """The checks of all tenants, as one."""

    def __init__(
        self, prefix: str, tokens: Collection[str], *, webhooks: bool, payouts: bool = False
    ) -> None:
        self.checkers = {
            host: Checker(prefix, tokens, webhooks=webhooks, payouts=payouts, shard=shard)
            for host, shard in shards().items()
        }

    def backlog(self) -> int:
        """Return the number of missing receipts."""
        return sum(checker.backlog() for checker in self.checkers.values())

    def hangs(self) -> int:
        """Return the number of runs that were marked as hung."""
        return sum(checker.hangs() for checker in self.checkers.values())

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until no tenant has work left; return False after ``seconds`` without progress."""
        ended = [checker.wait_until_idle(seconds) for checker in self.checkers.values()]
        return all(ended)

    def check(self, simulation: Simulation) -> CheckResult:
        """Compare the logs of the clients, Stripe and the database of each tenant; return the
        sums. The pilots must have been paid."""
        wrong: Iterable[str] = simulation.tally.wrong
        total = CheckResult(wrong_answers=len(simulation.tally.wrong), findings=[*wrong])
        stored_failures = simulation.tally.counts["fault stripe 500_begun"]
        for host, checker in self.checkers.items():
            result = checker.check(simulation.booked(host), [])
            checker.check_payouts(result, simulation.paydays.days)
            checker.check_log(
                result, (o for o in simulation.outcomes if o.booking.host == host), stored_failures
            )
            stored_failures = max(0, stored_failures - result.stuck_keys)
            total.add(result, host)
        return total
