"""The run of a claimed key: its recovery point and its result; and the key of the running code."""

from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum
from typing import Any

from idempotency import conf
from idempotency._engine import rows
from idempotency._engine.adapter import Outcome, Work
from idempotency._engine.calls import Calls, require_unfinished
from idempotency._engine.claimed_key import NOT_PHASED, ClaimedKey
from idempotency._engine.sessions import Sessions
from idempotency._engine.transactions import OwnTransaction
from idempotency.conf import ChosenIsolation, Isolation
from idempotency.exceptions import PhaseDidNotAdvance
from idempotency.models import FINISHED, IdempotencyKey

#: The key of the running code, to which staged jobs refer.
current_key: ContextVar[IdempotencyKey | None] = ContextVar("idempotency_key", default=None)


class FinalState(Enum):
    """The state of a key at the end of a run. A key is released also if it was refused."""

    FINISHED = "finished"
    STUCK = "stuck"
    RELEASED = "released"


class PhasedRun:
    """One run of the work of a claimed key, called by ``key.phases()`` and ``key.response()``."""

    has_stored_result = True

    def __init__(self, key: ClaimedKey, work: Work) -> None:
        self.work = work
        self.using = str(key._state.db)  # where it was claimed
        self.sessions = Sessions()
        self.sessions.note()
        #: That of the last phase.
        self.transaction: OwnTransaction | None = None
        #: None until the end of the run.
        self.final_state: FinalState | None = None
        self._started = False
        self._take(key)

    def _take(self, key: ClaimedKey) -> None:
        self.key = key
        self.level = conf.get().PHASE_ISOLATION
        self.calls = Calls(key, using=self.using, sessions=self.sessions)
        self._moved = False
        #: The value that a phase has stored, which may be None.
        self._stored: tuple[Any] | None = None
        key.run, key.calls = self, self.calls

    def begin_attempt(self) -> None:
        """Begin an attempt. A second one reads the key again, and raises LockLost if it was taken
        over."""
        resumed = self._started or self.key.attempts > 1
        if self._started:
            self._take(rows.read_own(self.key, using=self.using))
        self._started = True
        if resumed:
            self.calls.read_doubts()

    @property
    def finished(self) -> bool:
        return self.key.recovery_point == FINISHED

    def phases(self) -> Iterator[str]:
        """Yield the current recovery point until the key is finished. Raises PhaseDidNotAdvance
        after a pass without progress, which would be repeated forever."""
        while not self.finished:
            self._moved = False
            yield self.key.recovery_point
            if not self._moved:
                raise PhaseDidNotAdvance(
                    f"The loop over the phases at {self.key.recovery_point!r} committed no"
                    " progress, and would run forever. Handle this recovery point in the view, and"
                    " end its phase with set_recovery_point() or set_response()."
                )

    def result(self) -> Any:
        """Return the response that a phase stored: the object of this run, or one built from the
        row."""
        if self._stored is None:
            if not self.finished:
                raise RuntimeError(
                    "The view called key.response() before a phase stored a response: end a phase"
                    " with set_response()."
                )
            self._stored = (self.work.restored(self.key),)
        return self._stored[0]

    def has_stored(self, outcome: Outcome) -> bool:
        return self._stored is not None and outcome.value is self._stored[0]

    def begin_phase(self, isolation: ChosenIsolation) -> Isolation | None:
        """Return the isolation of the transaction of a phase. Raises RuntimeError inside an
        at-most-once call."""
        self.calls.require_no_open_call()
        self.level = conf.get().PHASE_ISOLATION if isolation == "from settings" else isolation
        return self.level

    def note_moved(self, recovery_point: str) -> None:
        self.key.begun = True  # This commit outlives the attempt.
        self._moved = self._moved or recovery_point != self.key.recovery_point
        self.key.recovery_point = recovery_point

    def note_finished(self, outcome: Outcome) -> None:
        self._stored = (outcome.value,)
        self.note_moved(FINISHED)

    def note_final_state(self, key: ClaimedKey | None) -> None:
        """Record the key at the end of the run. It is None if its row is gone, or if a failover
        gave its id to another key."""
        done = key is None or key.recovery_point == FINISHED
        self.key = key or self.key
        self.final_state = (
            FinalState.FINISHED
            if done
            else FinalState.STUCK
            if self.key.stuck_code
            else FinalState.RELEASED
        )


def run_of(key: ClaimedKey) -> PhasedRun:
    """Return the run of the key. Raises RuntimeError if there is none, and if the key is
    finished."""
    run = key.run if isinstance(key, ClaimedKey) else None
    if not isinstance(run, PhasedRun):
        raise RuntimeError(NOT_PHASED)
    require_unfinished(key)
    return run
