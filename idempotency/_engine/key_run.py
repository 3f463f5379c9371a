"""The run of a claimed key: its recovery point, its calls and its result; and the key of the running code."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, cast

from idempotency import conf
from idempotency._engine import fence, rows
from idempotency._engine.adapter import Outcome, Work
from idempotency._engine.transactions import OwnTransaction
from idempotency.conf import ChosenIsolation, Isolation
from idempotency.exceptions import CallInDoubt, IdempotencyError, PhaseDidNotAdvance
from idempotency.models import FINISHED, ForeignCall, IdempotencyKey

#: The key of the running code, to which staged jobs refer.
current_key: ContextVar[IdempotencyKey | None] = ContextVar("idempotency_key", default=None)


class KeyState(Enum):
    """The state of a key at the end of a run. A key is released also if it was refused."""

    FINISHED = "finished"
    STUCK = "stuck"
    RELEASED = "released"


class KeyRun:
    """One run of the work of a claimed key, called by ``key.phases()`` and ``key.response()``."""

    def __init__(self, key: IdempotencyKey, work: Work) -> None:
        self.work = work
        self.using = str(key._state.db)  # where it was claimed
        #: That of the last phase.
        self.transaction: OwnTransaction | None = None
        #: None until the end of the run.
        self.end: KeyState | None = None
        self._started = False
        self._take(key)

    def _take(self, key: IdempotencyKey) -> None:
        self.key = key
        self.level = conf.get().PHASE_ISOLATION
        self._called: set[str] = set()
        self._open_calls: set[str] = set()
        #: Foreign calls without a recorded result, with the error that a later phase raises.
        self._unsettled: dict[str, IdempotencyError] = {}
        self._moved = False
        self._outcome: Outcome | None = None
        key.run, key.begin_call = self, self._begin_call

    def begin_attempt(self) -> None:
        """Begin an attempt. A second one reads the key again, and raises LockLost if it was taken over."""
        resumed = self._started or self.key.attempts > 1
        if self._started:
            self._take(rows.read_own(self.key, using=self.using))
        self._started = True
        if resumed:
            # An earlier attempt may have begun a call that this one does not reach.
            begun = ForeignCall.objects.using(self.using).filter(key_id=self.key.pk, recorded_at=None)
            self._unsettled = {name: call_in_doubt(name) for name in begun.values_list("name", flat=True)}

    @property
    def finished(self) -> bool:
        return self.key.recovery_point == FINISHED

    def phases(self) -> Iterator[str]:
        """Yield the current recovery point until the key is finished. Raises PhaseDidNotAdvance after a pass without
        progress, which would be repeated forever."""
        while not self.finished:
            self._moved = False
            yield self.key.recovery_point
            if not self._moved:
                raise PhaseDidNotAdvance(
                    f"A pass through the phases at {self.key.recovery_point!r} committed no progress, and would be repeated "
                    f"forever. Handle this recovery point in the view, and end its phase with set_recovery_point() or "
                    f"set_response()."
                )

    def result(self) -> Any:
        """Return the response that a phase stored: the object of this run, or one built from the row."""
        if self._outcome is None:
            if not self.finished:
                raise RuntimeError(
                    "The view called key.response() before a phase stored a response: end a phase with set_response()."
                )
            value = self.work.restored(self.key)
            self._outcome = Outcome(value, cast(int, self.key.response_code), is_stored=True)
        return self._outcome.value

    def has_stored(self, outcome: Outcome) -> bool:
        return self._outcome is not None and outcome.value is self._outcome.value

    def begin_phase(self, isolation: ChosenIsolation) -> Isolation | None:
        """Return the isolation of the transaction of a phase. Raises RuntimeError inside a foreign call."""
        if self._open_calls:
            raise RuntimeError(
                "A phase cannot begin inside a foreign_call block: end the block first, so that its result is stored."
            )
        self.level = conf.get().PHASE_ISOLATION if isolation == "from settings" else isolation
        return self.level

    def note_begun(self) -> None:
        """Record a commit that outlives this attempt: the key is not untouched any more."""
        self.key.begun = True

    def note_moved(self, recovery_point: str) -> None:
        self.note_begun()
        self._moved = self._moved or recovery_point != self.key.recovery_point
        self.key.recovery_point = recovery_point

    def note_finished(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self.note_moved(FINISHED)

    def note_end(self, key: IdempotencyKey | None) -> None:
        """Record the key at the end of the run. It is None if its row is gone, or if a failover gave its id to another key."""
        done = key is None or key.recovery_point == FINISHED
        self.key = key or self.key
        self.end = KeyState.FINISHED if done else KeyState.STUCK if self.key.stuck_code else KeyState.RELEASED

    # Calls

    def _begin_call(self, name: str) -> None:
        """Commit that a call with a derived key begins; see ``IdempotencyKey.call``."""
        run_of(self.key)
        self.refuse_beside_doubt()
        fence.begin_call(self.key, name, using=self.using)
        self.note_begun()

    def refuse_repeated_call(self, name: str) -> None:
        """Check whether a foreign call may begin.
        Raises RuntimeError for a second call with this name.
        Raises CallInDoubt if another call is in doubt.
        """
        if name in self._called:
            raise RuntimeError(f"This run has already made the call {name!r}, and would reuse its result. Use another name.")
        self.refuse_beside_doubt(name)

    def refuse_beside_doubt(self, name: str | None = None) -> None:
        """Raise CallInDoubt if a call other than ``name`` is in doubt. Another call could repeat its work, and a response
        that no phase stored would ignore it."""
        for other, obstacle in self._unsettled.items():
            if isinstance(obstacle, CallInDoubt) and other != name and other not in self._open_calls:
                raise obstacle

    def refuse_unsettled_calls(self) -> None:
        for obstacle in self._unsettled.values():
            raise obstacle

    def note_call_begun(self, name: str) -> CallInDoubt:
        """Record that a call begins. Return the error that later phases raise until it is settled."""
        doubt = self._unsettled[name] = call_in_doubt(name)
        return doubt

    def note_call_settled(self, name: str, obstacle: IdempotencyError | None = None) -> None:
        """Record that a call has its result, or with ``obstacle`` that it took no effect."""
        self._unsettled.pop(name, None)
        if obstacle is not None:
            self._unsettled[name] = obstacle
            self._called.discard(name)

    @contextmanager
    def call_open(self, name: str) -> Iterator[None]:
        self._open_calls.add(name)
        try:
            yield
            self._called.add(name)
        finally:
            self._open_calls.discard(name)


def call_in_doubt(name: str) -> CallInDoubt:
    return CallInDoubt(
        f"The call {name!r} was begun, and its result was never recorded. It may have taken effect, and another call could "
        f"repeat the work. Check the called service for the result, then answer the key in the admin."
    )


def run_of(key: IdempotencyKey) -> KeyRun:
    """Return the run of the key. Raises RuntimeError if there is none, and if the key is finished."""
    run: KeyRun = key.bound_run()
    if run.finished:
        raise RuntimeError("This key is finished: no phase or call can follow the stored response.")
    return run
