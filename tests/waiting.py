"""Wait for a state, never for a time."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def eventually(condition: Callable[[], Found], seconds: float = 30) -> Found:
    """Return what ``condition`` returns as soon as it is true; fail when it is not within ``seconds``."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{condition!r} was not true within {seconds} seconds; the last value was {found!r}"
        pause.wait(0.02)
    return found
