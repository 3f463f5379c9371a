"""The kinds of replication that the lab compares."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Configuration:
    """A kind of replication; ``lag_seconds`` is the delay of data to the standby, and of its
    reply."""

    name: str
    folder: str
    synchronous: bool
    confirmed: bool
    lag_seconds: float


ASYNCHRONOUS = Configuration("asynchronous", "async", False, False, 0.1)
SYNCHRONOUS = Configuration("synchronous", "sync", True, False, 0.003)
CONFIRMED = Configuration("synchronous, CONFIRM_REPLICATED", "confirmed", True, True, 0.003)
CONFIGURATIONS = (ASYNCHRONOUS, SYNCHRONOUS, CONFIRMED)
