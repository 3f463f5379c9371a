"""The faults that the Stripe sandbox injects on request."""

import random
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

#: The kinds of fault.
KINDS = {
    "slow": "waits for `seconds` before the execution; the same key gets 409 during this time",
    "slow_after": (
        "executes at once, and waits for `seconds` before the response; a replay does not wait"
    ),
    "500_before": "returns 500 before the execution: not stored, the key stays new",
    "500_begun": "returns 500 during the execution and creates no object: stored and replayed",
    "500_after": "returns 500 after the object was created: stored and replayed",
    "429": "returns 429: not stored",
    "cut_before": "closes the connection before the execution",
    "cut_after": "closes the connection after the execution, without a response",
    "cut_first": "as cut_after, for the first response of each key; a replay is answered",
    "down": "closes every connection, for reads too",
}


@dataclass
class Fault:
    """A fault of requests whose path begins with ``path``, at most ``count`` times (None: without
    limit)."""

    fault: str
    path: str = "/v1/charges"
    probability: float = 1.0
    count: int | None = None
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.fault not in KINDS:
            raise ValueError(f"fault {self.fault!r}; there are {', '.join(KINDS)}")
        if not 0 <= self.probability <= 1 or not 0 <= self.seconds <= 600:
            raise ValueError("probability is 0 to 1, seconds 0 to 600")


class Faults:
    """The active faults."""

    def __init__(self, seed: int | None = None) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._faults: list[Fault] = []
        self.fired: Counter[str] = Counter()

    def replace(self, faults: list[dict[str, Any]]) -> None:
        """Replace the active faults, or raise ValueError and change nothing."""
        try:
            new = [Fault(**fault) for fault in faults]
        except TypeError as error:
            raise ValueError(f"a list of faults: {error}") from None
        with self._lock:
            self._faults = new

    def state(self) -> dict[str, Any]:
        with self._lock:
            return {"faults": [asdict(fault) for fault in self._faults], "fired": dict(self.fired)}

    def fires(self, kind: str, path: str) -> Fault | None:
        """Return the fault of this kind to inject into this request, or None; count it."""
        with self._lock:
            for fault in self._faults:
                if fault.fault != kind or not path.startswith(fault.path) or fault.count == 0:
                    continue
                if self._random.random() < fault.probability:
                    fault.count = None if fault.count is None else fault.count - 1
                    self.fired[kind] += 1
                    return fault
        return None
