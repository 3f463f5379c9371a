"""The proof: every course of events that a request can take, each from the same beginning, each to the same end."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

from django.db import connections

from idempotency import conf
from idempotency.exceptions import CallInDoubt
from idempotency.testing.attempts import Attempt, may_be_held
from idempotency.testing.comparing import GONE, Answer, Difference, Leaves, compare, random_paths
from idempotency.testing.failures import Failure, explained
from idempotency.testing.observing import Died, Run, foreign_calls_noticed, observed
from idempotency.testing.places import Place, shortened
from idempotency.testing.report import CannotProve, Report
from idempotency.testing.snapshots import Snapshot
from idempotency.testing.stage import COME_BACK, Send, Stage

#: A key that is stuck for this reason was handed to a person where no machine can know: not a failure, and never done twice.
_HANDED_OVER = CallInDoubt.code


class Proof(Stage):
    """Runs one request in every course of events. A context manager: on leaving, all rows are as they were before."""

    def __init__(self, send: Send, **options: Any) -> None:
        super().__init__(send, **options)
        self.report = Report()
        self._effect_lines: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for connection in connections.all():
            if connection.in_atomic_block:
                raise CannotProve(
                    "A death needs real transactions: use TransactionTestCase, or pytest.mark.django_db(transaction=True)."
                )
        self._snapshot = Snapshot()
        self._stack.callback(self._snapshot.close)
        self._stack.enter_context(foreign_calls_noticed())
        try:
            self._undisturbed = self._run_undisturbed()
        except BaseException:
            self._stack.close()
            raise
        self.report.places = self._undisturbed.places
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def crashes(self) -> Iterator[tuple[str, Callable[[], Failure | None]]]:
        """Yield each death of the process, with what happens afterwards, as a title and a check."""
        for place in self._undisturbed.places:
            for how, recover in (("the client retries", self._retried), ("the completer takes over", self._completed)):
                title = f"The process dies {place}\n   and {how}."
                yield title, partial(self._crash, place, title, recover)

    def races(self) -> Iterator[tuple[str, Callable[[], Failure | None]]]:
        """Yield each way in which two attempts under the same key get mixed up; with an expired lock the first one is late."""
        in_transactions = all(connections[alias].vendor == "postgresql" for alias in connections)
        if not in_transactions:
            if any(c.vendor == "sqlite" and c.is_in_memory_db() for c in connections.all()):  # type: ignore[attr-defined]
                self.report.skipped.append("two at once: not with SQLite in memory, which is one connection's")
                return
            self.report.skipped.append("two at once inside a transaction: SQLite has one writer")
        for expired in (False, True):
            held = [place for place in self._undisturbed.places if may_be_held(place, in_transactions=in_transactions)]
            for first, place in enumerate(held):
                second = 0
                stopped = [True]
                while stopped.pop():
                    stopped.append(False)  # until its check has shown that the second attempt came so far
                    how = "its lock expires, a second attempt gets ahead" if expired else "a second attempt comes"
                    title = f"An attempt is held up {place}\n   {how}, and is held up at its boundary {second + 1}."
                    yield title, partial(self._race, first, second, expired, in_transactions, title, stopped)
                    second += 1

    def _run_undisturbed(self) -> Run:
        """Run it twice: what differs is random, and what is left of the first run is what all others must come to."""
        places_of_effects: list[str] = []

        def note_effects(run: Run, place: Place) -> None:
            if isinstance(self._effects, list) and len(self._effects) > len(places_of_effects) + len(self._first_effects):
                places_of_effects.append(f"between {run.places[-2].line} and {place.line}")

        found: list[Leaves] = []
        for _ in range(2):
            key, run = self._fresh(), Run(note_effects if not found else lambda run, place: None)
            with observed(run):
                answer = self._ask(key)
                run.reach("before", "response")
            if answer.error is not None:
                raise CannotProve("The undisturbed request fails already; see the error above.") from answer.error
            if answer.status >= 500 or not (self._keys().exists() or self._messages()):
                raise CannotProve(
                    f"The undisturbed request was answered with {answer.status}, and left neither a key nor a message of "
                    f"process_once(): {shortened(str(answer.body()))} Is the view decorated, and does send(key) pass the key "
                    f"on?"
                )
            found.append(self._left(answer))
            self._answer, again = answer, self._ask(key)
            if self._keys().exists() and again.content != answer.content:
                raise CannotProve(f"The replay is not the answer: {answer.content[:200]!r}, then {again.content[:200]!r}.")
        if missing := found[0].keys() ^ found[1].keys():
            raise CannotProve(
                f"Two undisturbed requests leave different things: {' / '.join(min(missing))}. Take it out with "
                "ignore=[...], or pass state=, a function that returns what matters."
            )
        self._expected, self._random = found[0], random_paths(*found)
        foreign = [place.line for place in run.places if place.what == "foreign call" and place.when == "before"]
        self._effect_lines = places_of_effects or sorted(set(foreign))
        return run

    def _crash(self, place: Place, title: str, recover: Callable[[str], Answer]) -> Failure | None:
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
            raise CannotProve(f"This time the request did not come here: {place}. Does it take another way each time?")
        if isinstance(self._effects, list):
            self._effects[:] = done  # A dead process does nothing more, whatever ``finally`` and ``except`` say.
        if recover == self._completed and not self._keys().unfinished().exists():
            return None  # The client alone knows of the request.
        self._derived |= run.derived
        return self._checked(title, key, recover(key))

    def _race(
        self, first: int, second: int, expired: bool, in_transactions: bool, title: str, stopped: list[bool]
    ) -> Failure | None:
        key = self._fresh()
        # What time has done must be done before the first attempt locks the row of its key: hence the boundary before.
        one = Attempt(partial(self._ask, key), *((first - 1, first) if expired else (first,)), in_transactions=in_transactions)
        other = Attempt(partial(self._ask, key), second, in_transactions=in_transactions)
        one.start()
        one.settle()
        if expired:
            self._age(conf.get().LOCK_TIMEOUT_SECONDS + 1)
            if first:
                one.go_on()
                one.settle()
                self._age(conf.get().LOCK_TIMEOUT_SECONDS + 1)
        other.start()
        other.settle()
        stopped[-1] = other.held is not None
        one.go_on()
        one.settle()
        other.go_on()
        answers = [one.result(), other.result()]
        self._derived |= one.run.derived | other.run.derived
        last = self._retried(key)
        for answer in answers:
            if answer.status == last.status and answer.status not in COME_BACK and answer.content != last.content:
                told = Difference(("answer", "to each client"), last.body(), answer.body())
                return explained(title, [told], answer, self._undisturbed, self._derived, self._effect_lines)
        return self._checked(title, key, last)

    def _checked(self, title: str, key: str, answer: Answer) -> Failure | None:
        """Compare what is left, and ask once more: the answer must stay."""
        self.report.courses += 1
        differences = compare(self._expected, self._left(answer), self._random)
        if self._keys().filter(stuck_code=_HANDED_OVER).exists():
            self.report.handed_over += 1
            # It may be less than the whole, for a person has to look; it may not be more.
            differences = [d for d in differences if d.expected == GONE and d.path[0] != "answer"]
        elif not differences:
            again = self._ask(key)
            if again.content != answer.content or again.status != answer.status:
                differences = [Difference(("answer", "to the same request once more"), answer.body(), again.body())]
        if not differences:
            return None
        return explained(title, differences, answer, self._undisturbed, self._derived, self._effect_lines)
