"""The loop of a management command in a thread of the test."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from idempotency.management.loop import Loop
from tests.kit.threads import background


@contextmanager
def looping(
    work: Callable[..., Any], *, say: Callable[[Any], None] = lambda counts: None
) -> Iterator[list[int]]:
    """Run passes of ``work`` in the loop ``this_loop`` during the block; yield a list that gets one
    item per pass."""
    passes: list[int] = []
    done = threading.Event()

    def run_pass(**given: Any) -> Any:
        passes.append(1)
        return work(**given)

    stop: Any = SimpleNamespace(
        requested=lambda wait_seconds=0: done.wait(wait_seconds), request=done.set
    )
    loop = Loop("this_loop", run_pass, interval=0.01, stop=stop, say=say, using="default")
    with background(loop.run):
        try:
            yield passes
        finally:
            done.set()


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, bool]]:
    """Return for each line of the log its level, its beginning, and whether it has a traceback."""
    records = [record for record in caplog.records if record.name == "idempotency"]
    return [
        (record.levelname, record.message.partition(",")[0], bool(record.exc_info))
        for record in records
    ]
