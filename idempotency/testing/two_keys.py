"""Two requests with different keys: one pauses at a boundary, and the other one runs meanwhile."""

import uuid
from collections.abc import Callable, Iterator
from functools import cached_property, partial

from django.db import connections

from idempotency.testing.answers import Answer
from idempotency.testing.attempts import Attempt, Threads, may_be_held
from idempotency.testing.comparing import (
    Leaves,
    Path,
    compare,
    random_paths,
    unnumbered,
    unordered,
)
from idempotency.testing.failures import Failure, interfering
from idempotency.testing.places import Place
from idempotency.testing.report import Report
from idempotency.testing.undisturbed import Undisturbed


class TwoKeys(Undisturbed):
    """The courses of events of two requests with different keys.

    They must end as if one request ran after the other: a key does not protect its request from
    other requests.
    """

    report: Report
    _threads: Threads
    #: Whether two attempts can write at the same time.
    _in_transactions: bool

    def two_keys(self) -> Iterator[tuple[str, Callable[[], Failure | None]]]:
        """Yield each boundary at which a request pauses while a request with another key runs."""
        for number, place in enumerate(self._held()):
            # At the first and the last boundary, the requests would be consecutive.
            if place.number > 1 and place.what != "response":
                how = "and the same request with another key runs meanwhile"
                title = f"A request is held up {place}\n   {how}."
                yield title, partial(self._with_two_keys, number, title)

    def _held(self) -> list[Place]:
        """Return the places at which an attempt can pause while another attempt runs."""
        places = [] if one_connection() else self._undisturbed.places
        return [
            place for place in places if may_be_held(place, in_transactions=self._in_transactions)
        ]

    def _attempt(self, key: str, *stops: int, again: bool = False) -> Attempt:
        ask = partial(self._ask, key, again=again)
        return Attempt(self._threads, ask, *stops, in_transactions=self._in_transactions)

    @cached_property
    def _consecutive(self) -> tuple[Leaves, int, set[Path]]:
        """The result of two consecutive requests, the number of refusals, and the random paths.

        The requests are sent twice, to find values that are random in the second request only.
        """
        found, random = [], {unnumbered(path) for path in self._random}
        for _ in range(2):
            keys = self._fresh(), str(uuid.uuid4())
            answers = [self._retried(key) for key in keys]
            found.append(self._left(answers[-1]))
        first, second = (unordered(leaves, random) for leaves in found)
        random |= {unnumbered(path) for path in random_paths(first, second)}
        return found[0], _refused(answers), random

    def _with_two_keys(self, stop: int, title: str) -> Failure | None:
        expected, refused, random = self._consecutive
        keys = self._fresh(), str(uuid.uuid4())
        one, other = self._attempt(keys[0], stop), self._attempt(keys[1])
        for attempt in (one, other):
            attempt.start()
            attempt.settle()
        one.go_on()
        for attempt in (one, other):
            attempt.result()
            self._note(attempt.run)
        answers = [self._retried(key) for key in keys]
        self.report.courses += 1
        found = unordered(self._left(answers[-1]), random)
        possible = [expected]
        if _refused(answers) > refused:
            possible.append(self._expected)  # A request that is refused leaves nothing.
        compared = (compare(unordered(leaves, random), found, set()) for leaves in possible)
        differences = min(compared, key=len)
        return interfering(title, differences, self._undisturbed) if differences else None


def _refused(answers: list[Answer]) -> int:
    return sum(400 <= answer.status < 500 for answer in answers)


def one_connection() -> bool:
    """Return whether a database is SQLite in memory, which other connections cannot read."""
    return any(c.vendor == "sqlite" and c.is_in_memory_db() for c in connections.all())  # type: ignore[attr-defined]
