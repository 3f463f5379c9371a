"""Run a request in every course of events. Each course starts from the same state, and must end
with the same result."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, Self

from django.db import connections

from idempotency.exceptions import CallInDoubt
from idempotency.testing.answers import Answer
from idempotency.testing.attempts import Attempt, Threads, discard_connections
from idempotency.testing.calls import downstream_calls_noticed
from idempotency.testing.comparing import GONE, Difference, compare
from idempotency.testing.downstream import refusals
from idempotency.testing.failures import Failure, call_in_transaction, explained, not_completed
from idempotency.testing.observing import Died, Run, observed
from idempotency.testing.places import Place
from idempotency.testing.report import CannotProve, Report
from idempotency.testing.services import permitted_addresses
from idempotency.testing.snapshots import Snapshot
from idempotency.testing.stage import COME_BACK, Send, T
from idempotency.testing.two_keys import TwoKeys, one_connection

#: A key with this stuck code is not a failure: the call is not repeated, because only manual review
#: can find out whether it took effect.
_HANDED_OVER = CallInDoubt.code


class Proof(TwoKeys):
    """A context manager that runs one request in every course of events. On exit, all rows are as
    they were before."""

    def __init__(self, send: Send, **options: Any) -> None:
        super().__init__(send, **options)
        self.report = Report()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for connection in connections.all():
            if connection.in_atomic_block:
                raise CannotProve(
                    "A simulated crash needs real transactions: use TransactionTestCase, or "
                    "pytest.mark.django_db(transaction=True)."
                )
        self._snapshot = Snapshot()
        self._stack.callback(discard_connections)
        self._stack.callback(self._snapshot.close)
        self._stack.enter_context(downstream_calls_noticed(permitted_addresses(self._ignore)))
        self._threads = Threads()
        self._stack.callback(self._threads.close)
        vendors = {connections[alias].vendor for alias in connections}
        self._in_transactions = vendors == {"postgresql"}
        began = time.monotonic()
        try:
            self._run_undisturbed()
        except BaseException:
            self._stack.close()
            raise
        self._seconds = time.monotonic() - began
        self.report.places = self._undisturbed.places
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def expected(self, *, races: bool) -> tuple[int, float]:
        """Return about how many courses of events there are, and how many seconds they take."""
        held = len(self._held()) if races else 0
        # The factors were measured on 22 views with 4 to 13 boundaries.
        courses = 2 * len(self._undisturbed.places) + (held**2 + held + 2 if held else 0)
        return courses, courses * self._seconds * 0.3

    def crashes(self) -> Iterator[tuple[str, Callable[[], Failure | None]]]:
        """Yield each crash of the process with each way of recovery, as a title and a check."""
        ways = (("the client retries", False), ("the completer takes over", True))
        for place, (how, by_completer) in product(self._undisturbed.places, ways):
            title = f"The process dies {place}\n   and {how}."
            yield title, partial(self._crash, place, title, by_completer)

    def calls_in_transactions(self) -> Iterator[tuple[str, Callable[[], Failure | None]]]:
        """Yield each call to a downstream service inside a transaction, as a title and a check."""
        for (host, port), line in sorted(self._undisturbed.calls_in_transactions):
            title = f"The request calls {host}:{port} inside a transaction\n     at {line}."
            yield title, partial(call_in_transaction, title, line)

    def races(self) -> Iterator[tuple[str, Callable[[], Failure | None]]]:
        """Yield each interleaving of two attempts with one key. If the lock has expired, the first
        attempt resumes late."""
        if not self._in_transactions:
            one = "two attempts at once: not tested, because SQLite in memory has one connection"
            inside = "two attempts at once inside a transaction: not tested, because SQLite has one"
            self.report.skipped.append(one if one_connection() else f"{inside} writer")
        for expired in (False, True):
            for first, place in enumerate(self._held()):
                second = 0
                stopped = [True]
                while stopped.pop():
                    # until the check shows that the second attempt reached its stop
                    stopped.append(False)
                    how = "a second attempt comes"
                    if expired:
                        how = "its lock expires, and a second attempt overtakes it"
                    title = (
                        f"An attempt is held up {place}\n   {how}, and is held up at its boundary"
                        f" {second + 1}."
                    )
                    yield title, partial(self._race, first, second, expired, title, stopped)
                    second += 1

    def _aside(self, work: Callable[[], T]) -> T:
        """Do the work on a connection that no simulated crash closes, because a new connection
        would read the catalog of the database again."""
        return self._threads.call(work) if self._in_transactions else work()

    def _crash(self, place: Place, title: str, by_completer: bool) -> Failure | None:
        done: list[Any] = []

        def die_there(run: Run, here: Place) -> None:
            if here.number == place.number:
                done.extend(self._effects if isinstance(self._effects, list) else ())
                run.die()

        key, run = self._fresh(), Run(die_there)
        try:
            with observed(run):
                self._ask(key)
                run.reach("before", "response")
        except Died:
            pass
        if not run.dead:
            raise CannotProve(
                f"In this run the request did not reach this place: {place}. Does the view run"
                " different statements each time?"
            )
        if isinstance(self._effects, list):
            # A dead process has no further effects, although ``finally`` and ``except`` ran here.
            self._effects[:] = done
        self._note(run)
        if not by_completer:
            return self._checked(title, key, self._retried(key))
        if not self._keys().unfinished().exists():
            return None  # There is no key for the completer to run.
        left = self._complete()
        failure = self._checked(title, key, self._ask(key, again=True))
        if failure is None and left is not None:
            # Only the client's request has finished it.
            return not_completed(title, left.stuck_reason or left.last_error)
        return failure

    def _race(
        self, first: int, second: int, expired: bool, title: str, stopped: list[bool]
    ) -> Failure | None:
        key = self._fresh()
        # The key is made older before the first attempt locks its row, so the attempt also stops
        # one boundary earlier.
        one = self._attempt(key, *((first - 1, first) if expired else (first,)))
        other = self._attempt(key, second, again=True)
        one.start()
        one.settle()
        if expired and not self._lock_expires(one, first):
            one.result()
            # There was no lock that could expire, so the race without expiry has covered this case.
            return None
        other.start()
        other.settle()
        stopped[-1] = other.held is not None
        one.go_on()
        one.settle()
        other.go_on()
        answers = [one.result(), other.result()]
        self._note(one.run)
        self._note(other.run)
        last = self._retried(key)
        same = [answer for answer in answers if answer.status == last.status]
        for answer in same:
            if answer.status not in COME_BACK and answer.content != last.content:
                difference = Difference(("answer", "to each client"), last.body(), answer.body())
                return self._explained(title, [difference], answer)
        # If an earlier client got the same answer, the answer has stayed the same.
        stays = any(answer.content == last.content for answer in same)
        return self._checked(title, key, last, stays=stays)

    def _lock_expires(self, one: Attempt, first: int) -> bool:
        """Let the first attempt reach its boundary, and let the lock of the attempt expire there or
        before. Return whether the attempt had a lock."""
        expired = self._age(self._lease() + 1)
        if first:
            one.go_on()
            one.settle()
            expired |= self._age(self._lease() + 1)
        return expired

    def _checked(
        self, title: str, key: str, answer: Answer, *, stays: bool = False
    ) -> Failure | None:
        """Compare the results, and return the failure, if any. Without differences, send the
        request once more. With ``stays`` it is not sent, because
        the answer is known to stay the same."""
        self.report.courses += 1
        differences = compare(self._expected, self._left(answer), self._random)
        if self._keys().filter(stuck_code=_HANDED_OVER).exists():
            self.report.handed_over += 1
            # This key needs manual review, so results may be missing, but there must be no
            # additional results.
            differences = [d for d in differences if d.expected == GONE and d.path[0] != "answer"]
        elif not differences and not stays:
            again = self._ask(key, again=True)
            if again.content != answer.content or again.status != answer.status:
                what = ("answer", "to the same request once more")
                differences = [Difference(what, answer.body(), again.body())]
        # A view may handle the exception of a refused call, and leave no difference.
        if not differences and not refusals():
            return None
        return self._explained(title, differences, answer)

    def _explained(self, title: str, differences: list[Difference], answer: Answer) -> Failure:
        return explained(
            title, differences, answer, self._undisturbed, self._derived, self._effect_lines
        )
