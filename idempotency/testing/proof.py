"""The proof: every course of events that a request can take, each from the same beginning, each to the same end."""

import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from django.core.signals import got_request_exception
from django.db import connections, transaction

from idempotency import conf
from idempotency.completer import complete_once
from idempotency.models import IdempotencyKey, IdempotencyKeyQuerySet, ProcessedMessage
from idempotency.testing.attempts import Attempt
from idempotency.testing.comparing import GONE, Answer, Difference, Leaves, compare, leaves, random_paths
from idempotency.testing.diagnosis import Finding, diagnose
from idempotency.testing.downstream import effects_of, living
from idempotency.testing.moved_time import age
from idempotency.testing.observing import Died, Run, foreign_calls_noticed, observed
from idempotency.testing.places import Place, shortened
from idempotency.testing.rows import Snapshot

Send = Callable[[str], Any]
#: So often does a client come back, each time after the lock has expired.
_CLIENT_TRIES = 4
#: These ask a client to come again.
_COME_BACK = (409, 425, 429)
#: A key that is stuck for this reason was handed to a person where no machine can know: not a failure, and never done twice.
_HANDED_OVER = "call_in_doubt"


class DoesNotSurvive(AssertionError):
    """After some course of events something is not as after an undisturbed request; ``findings`` say what, where and why."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        groups: dict[tuple[str, str], list[Finding]] = {}
        for finding in findings:
            groups.setdefault((finding.cause, finding.cure), []).append(finding)
        parts = []
        for number, same in enumerate(groups.values(), 1):
            more = f"\n   The same in {len(same) - 1} other courses of events." if len(same) > 1 else ""
            parts.append(f"{number}. {same[0]}{more}")
        super().__init__("\n".join(["The request does not survive.", *parts]))


class CannotProve(AssertionError):
    """The undisturbed request is not fit for comparison; the message names what to change."""


@dataclass
class Report:
    """What was tried: the places of the undisturbed request, the courses of events, and what was left out, with the reason."""

    places: list[Place] = field(default_factory=list)
    courses: int = 0
    handed_over: int = 0
    skipped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{len(self.places)} places, {self.courses} courses of events, {self.handed_over} handed to a person"
        return "; ".join([text, *self.skipped])


class Proof:
    """Runs one request in every course of events. A context manager: on leaving, all rows are as they were before."""

    def __init__(
        self,
        send: Send,
        *,
        effects: Callable[[], Any] | list[Any] | None = None,
        reset: Callable[[], None] | None = None,
        state: Callable[[], Any] | None = None,
        ignore: Iterable[str] = (),
    ) -> None:
        self.report = Report()
        self._send, self._effects, self._reset, self._state, self._ignore = send, effects, reset, state, set(ignore)
        self._first_effects = list(effects) if isinstance(effects, list) else []
        self._effect_lines: list[str] = []
        self._derived: set[str] = set()
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

    def crashes(self) -> Iterator[tuple[str, Callable[[], Finding | None]]]:
        """Yield each death of the process, with what happens afterwards, as a title and a check."""
        for place in self._undisturbed.places:
            for how, recover in (("the client retries", self._retried), ("the completer takes over", self._completed)):
                title = f"The process dies {place}\n   and {how}."
                yield title, partial(self._crash, place, title, recover)

    def races(self) -> Iterator[tuple[str, Callable[[], Finding | None]]]:
        """Yield each way in which two attempts under the same key get mixed up; with an expired lock the first one is late."""
        in_transactions = all(connections[alias].vendor == "postgresql" for alias in connections)
        if not in_transactions:
            if any(c.vendor == "sqlite" and c.is_in_memory_db() for c in connections.all()):  # type: ignore[attr-defined]
                self.report.skipped.append("two at once: not with SQLite in memory, which is one connection's")
                return
            self.report.skipped.append("two at once inside a transaction: SQLite has one writer")
        for expired in (False, True):
            held = [
                place for place in self._undisturbed.places if place.boundary and (in_transactions or not place.in_transaction)
            ]
            for first, place in enumerate(held):
                second = 0
                stopped = [True]
                while stopped.pop():
                    stopped.append(False)  # until its check has shown that the second attempt came so far
                    how = "its lock expires, a second attempt gets ahead" if expired else "a second attempt comes"
                    title = f"An attempt is held up {place}\n   {how}, and is held up at its boundary {second + 1}."
                    yield title, partial(self._race, first, second, expired, in_transactions, title, stopped)
                    second += 1

    def _fresh(self) -> str:
        """Begin anew: rows, effects, and a key that nobody has used."""
        self._snapshot.restore()
        if isinstance(self._effects, list):
            self._effects[:] = self._first_effects
        if self._reset is not None:
            self._reset()
        for fake in living():
            fake.reset()
        self._derived.clear()
        return str(uuid.uuid4())

    def _ask(self, key: str) -> Answer:
        """Send the request; what its view raises is the error behind a 500, whether or not the client raises it too."""
        raised: list[BaseException | None] = []
        thread = threading.get_ident()

        def note(**kwargs: Any) -> None:
            if threading.get_ident() == thread:
                raised.append(sys.exc_info()[1])

        got_request_exception.connect(note)
        try:
            response = self._send(key)
        except Exception as error:
            return Answer(500, error=error)
        finally:
            got_request_exception.disconnect(note)
        headers = response.headers
        content = b"".join(response.streaming_content) if getattr(response, "streaming", False) else bytes(response.content)
        return Answer(
            response.status_code,
            content,
            headers.get("Content-Type", ""),
            headers.get("Location", ""),
            raised[-1] if raised and response.status_code >= 500 else None,
        )

    def _left(self, answer: Answer) -> Leaves:
        return leaves(self._snapshot, answer, effects_of(self._effects), ignored=self._ignore, state=self._state)

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
                    f"The undisturbed request was answered with {answer.status}, and left neither a finished key nor a message of "
                    f"process_once(): {shortened(str(answer.body()))} Is its view decorated, and does send(key) pass the key on?"
                )
            found.append(self._left(answer))
            self._answer, again = answer, self._ask(key)
            if self._keys().exists() and again.content != answer.content:
                raise CannotProve(f"The replay is not the answer: {answer.content[:200]!r}, then {again.content[:200]!r}.")
        if missing := found[0].keys() ^ found[1].keys():
            raise CannotProve(
                f"Two undisturbed requests leave different things: {' / '.join(min(missing))}. Take it out with ignore=[...], or "
                f"pass state=, a function that returns what matters."
            )
        self._expected, self._random = found[0], random_paths(*found)
        foreign = [place.line for place in run.places if place.what == "foreign call" and place.when == "before"]
        self._effect_lines = places_of_effects or sorted(set(foreign))
        return run

    def _crash(self, place: Place, title: str, recover: Callable[[str], Answer]) -> Finding | None:
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
    ) -> Finding | None:
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
            if answer.status == last.status and answer.status not in _COME_BACK and answer.content != last.content:
                told = Difference(("answer", "to each client"), last.body(), answer.body())
                return diagnose(title, [told], answer, self._undisturbed, self._derived, self._effect_lines)
        return self._checked(title, key, last)

    def _retried(self, key: str) -> Answer:
        """Send it again as a client does that got no answer: at once, and then after each wait until the lock has expired."""
        for _ in range(_CLIENT_TRIES):
            run = Run()
            with observed(run):
                answer = self._ask(key)
            self._derived |= run.derived
            again = answer.status in _COME_BACK or answer.status >= 500
            if answer.status == self._answer.status or not again or self._keys().stuck().exists():
                break
            self._age(conf.get().LOCK_TIMEOUT_SECONDS + 1)
        return answer

    def _completed(self, key: str) -> Answer:
        """Let the completer finish it; the client, who comes later, finds the answer."""
        limits = conf.get()
        for _ in range(_CLIENT_TRIES):
            waits = (limits.LOCK_TIMEOUT_SECONDS, limits.COMPLETER_MIN_AGE_SECONDS, limits.COMPLETER_IDLE_SECONDS)
            self._age(max(waits) + 1)
            run = Run()
            with observed(run):
                complete_once()
            self._derived |= run.derived
            if not self._keys().unfinished().exists():
                break
        return self._ask(key)

    def _checked(self, title: str, key: str, answer: Answer) -> Finding | None:
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
        return diagnose(title, differences, answer, self._undisturbed, self._derived, self._effect_lines)

    def _keys(self) -> IdempotencyKeyQuerySet:
        """Return the keys of this course of events."""
        return IdempotencyKeyQuerySet(IdempotencyKey).exclude(pk__in=self._snapshot.read[IdempotencyKey._meta.label])

    def _messages(self) -> bool:
        known = self._snapshot.read[ProcessedMessage._meta.label]
        return ProcessedMessage.objects.exclude(pk__in=known).exists()

    def _age(self, seconds: float) -> None:
        """Let so much time pass for each key that no run is just writing to."""
        with transaction.atomic():
            free = list(self._keys().unfinished().select_for_update(skip_locked=True).values_list("pk", flat=True))
            age(IdempotencyKey.objects.filter(pk__in=free), seconds)
