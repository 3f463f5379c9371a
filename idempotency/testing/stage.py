"""The initial state that all courses of events share, and the actions of clients and of the
completer. A client is the sender of a request, or the caller of an operation."""

import sys
import threading
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from django.core.signals import got_request_exception
from django.db import transaction
from django.db.models import Q

from idempotency import conf
from idempotency._engine import rows
from idempotency._engine.adapter import with_stored_work
from idempotency._states import ABANDONED_AFTER_LEASES, IdempotencyKeyQuerySet
from idempotency.completer import complete_once
from idempotency.exceptions import StuckCode
from idempotency.models import IdempotencyKey, ProcessedMessage
from idempotency.testing.answers import Answer
from idempotency.testing.comparing import Leaves, changed_rows, leaves
from idempotency.testing.downstream import effects_of, living
from idempotency.testing.moved_time import age
from idempotency.testing.observing import Run, observed
from idempotency.testing.report import CannotProve
from idempotency.testing.snapshots import Snapshot

T = TypeVar("T")
Send = Callable[[str], Any]
#: The number of times that a client sends the request again: at once, and then each time after the
#: lock has expired.
_CLIENT_TRIES = 4
#: The number of completer runs. After this number of refused runs, the completer no longer runs a
#: key without any effect.
_COMPLETER_RUNS = 5
#: The statuses that ask a client to retry.
COME_BACK = (409, 425, 429)


def _settled_by_on_abandon(found: IdempotencyKey) -> bool:
    """Return whether the reaper settles the key, because no run of the completer can."""
    key = rows.read(found.pk, using=str(found._state.db))
    return key is not None and with_stored_work(
        key,
        lambda work: bool((found.untouched or not work.is_whole) and work.has_on_abandon()),
    )


class Stage:
    """A request, and the state of the rows and fakes before it."""

    _snapshot: Snapshot
    #: The answer to an undisturbed request.
    _answer: Answer

    def __init__(
        self,
        send: Send,
        *,
        effects: Callable[[], Any] | list[Any] | None = None,
        reset: Callable[[], None] | None = None,
        state: Callable[[], Any] | None = None,
        ignore: Iterable[str] = (),
        again: Send | None = None,
    ) -> None:
        self._again = again or send
        self._send, self._effects = send, effects
        self._reset, self._state, self._ignore = reset, state, set(ignore)
        self._first_effects = list(effects) if isinstance(effects, list) else []
        #: The results of ``key.derive()`` in this course of events.
        self._derived: set[str] = set()

    def _fresh(self) -> str:
        """Restore the initial rows and effects, and return a new key."""
        self._aside(self._snapshot.restore)
        if isinstance(self._effects, list):
            self._effects[:] = self._first_effects
        if self._reset is not None:
            self._reset()
        for fake in living():
            fake.reset()
        self._derived.clear()
        return str(uuid.uuid4())

    def _ask(self, key: str, *, again: bool = False) -> Answer:
        """Send the request, and return the answer. If the view raises an exception, the answer
        contains it as the error behind a 500, whether or not the test client raises the exception
        too. ``again``: the caller is the second one."""
        raised: list[BaseException | None] = []
        thread = threading.get_ident()

        def note(**kwargs: Any) -> None:
            if threading.get_ident() == thread:
                raised.append(sys.exc_info()[1])

        got_request_exception.connect(note)
        try:
            response = (self._again if again else self._send)(key)
        except Exception as error:
            return Answer(500, error=error) if raised else Answer.of_exception(error)
        finally:
            got_request_exception.disconnect(note)
        if not hasattr(response, "status_code"):
            return Answer.of_result(response)
        return Answer.of_response(response, raised[-1] if raised else None)

    def _left(self, answer: Answer) -> Leaves:
        rows = self._aside(partial(changed_rows, self._snapshot))
        return leaves(
            self._snapshot,
            rows,
            answer,
            effects_of(self._effects),
            ignored=self._ignore,
            state=self._state,
        )

    def _note(self, run: Run) -> None:
        """Record the keys that a run derived. Raises CannotProve if the run wrote to a table that
        the kit neither compares nor restores."""
        self._derived |= run.derived
        unseen = self._snapshot.unseen(run.written, self._ignore) if self._state is None else []
        if unseen:
            raise CannotProve(
                f"The request writes {', '.join(unseen)}. The kit compares only tables of managed"
                " models, each in the database to which the router sends its writes. Let a router"
                " in DATABASE_ROUTERS send the model to that database, exclude the model or the"
                " table with ignore=[...], or pass state=, which returns the data to compare, and"
                " reset=, which restores that data."
            )

    def _aside(self, work: Callable[[], T]) -> T:
        """Do work of the kit on all tables, between two runs of the request, and return the result
        of the work."""
        return work()

    def _retried(self, key: str) -> Answer:
        """Send the request again, as a client without an answer does: at once, and then each time
        after the lock has expired. Return the last answer."""
        for _ in range(_CLIENT_TRIES):
            run = Run()
            with observed(run):
                answer = self._ask(key, again=True)
            self._note(run)
            again = answer.status in COME_BACK or answer.status >= 500
            if answer.status == self._answer.status or not again or self._keys().stuck().exists():
                break
            self._age(self._lease() + 1)
        return answer

    def _complete(self) -> IdempotencyKey | None:
        """Let the completer run the request. Return the key if it is unfinished afterwards, or if
        it is stuck because the completer does not know its sender. Return None for other keys.

        A key without any effect, or without a stored body, is not returned if its view has
        ``on_abandon``: the reaper settles the key.
        """
        limits, key = conf.get(), None
        for number in range(_COMPLETER_RUNS):
            idle = limits.COMPLETER_IDLE_SECONDS * 2**number
            self._age(
                max(ABANDONED_AFTER_LEASES * self._lease(), limits.COMPLETER_MIN_AGE_SECONDS, idle)
                + 1
            )
            run = Run()
            with observed(run):
                complete_once()
            self._note(run)
            key = (
                self._keys()
                .unfinished()
                .filter(Q(stuck_at=None) | Q(stuck_code=StuckCode.USER_MISSING))
                .first()
            )
            if key is None or key.stuck_code:
                break
        if key is None or key.stuck_code:
            return key
        return None if _settled_by_on_abandon(key) else key

    def _keys(self) -> IdempotencyKeyQuerySet:
        """Return the keys of this course of events."""
        return IdempotencyKeyQuerySet(IdempotencyKey).exclude(
            pk__in=self._snapshot.read[IdempotencyKey._meta.label]
        )

    def _messages(self) -> bool:
        known = self._snapshot.read[ProcessedMessage._meta.label]
        return ProcessedMessage.objects.exclude(pk__in=known).exists()

    def _lease(self) -> int:
        """Return the longest lease of the keys."""
        return max(self._keys().values_list("lease_seconds", flat=True), default=0)

    def _age(self, seconds: float) -> bool:
        """Make each unfinished key older by ``seconds``, except keys whose row is locked. Return
        whether any key changed."""
        with transaction.atomic():
            free = list(
                self._keys()
                .unfinished()
                .select_for_update(skip_locked=True)
                .values_list("pk", flat=True)
            )
            if free:
                age(IdempotencyKey.objects.filter(pk__in=free), seconds)
        return bool(free)
