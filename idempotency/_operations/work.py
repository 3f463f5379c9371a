"""The work of a run that calls an operation; see ``idempotency._engine.adapter``."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import Error

from idempotency import conf
from idempotency._async import awaited
from idempotency._engine.adapter import ClaimedRequest, Outcome, Run
from idempotency._engine.attempts import Attempts, conflict
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.errors import connection_lost
from idempotency._engine.fence import StoredResponse
from idempotency._engine.phase import AtomicPhase, atomic_phase
from idempotency._engine.phased_run import FinalState, PhasedRun, current_key
from idempotency._hidden import Hidden
from idempotency._operations.definition import METHOD, Definition, scope_of
from idempotency._operations.deploys import EarlierRuns
from idempotency._operations.results import stored
from idempotency._operations.steps import Step
from idempotency.conf import Isolation
from idempotency.exceptions import (
    CONFLICTS,
    InProgress,
    KeyStuck,
    LockLost,
    Rejected,
    Unavailable,
)
from idempotency.jobs import refuse_generator
from idempotency.models import STARTED


class OperationWork:
    """The functions of an operation with the arguments of one key. The value of this work is the
    stored result."""

    kind = "operation"
    rollback_causes = "by set_rollback(True),"
    request = None
    nests = True
    hides_errors = False

    def __init__(
        self, definition: Definition, arguments: bytes, *, by_completer: bool = False
    ) -> None:
        self.definition, self._arguments = definition, arguments
        self.name, self.by_completer = definition.name, by_completer
        self.wait_seconds = definition.wait_seconds
        self.points = definition.steps.points if definition.steps.is_phased else ()
        #: The run of the last attempt; None before the claim.
        self.run: Any = None
        self.is_committed = self.is_replayed = False
        #: None if no earlier run has begun anything.
        self._earlier: EarlierRuns | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the run has stored the result, even if an error followed."""
        return self.is_committed or (isinstance(self.run, PhasedRun) and self.run.finished)

    @property
    def is_unfinished(self) -> bool:
        """Whether the run has begun a call or committed a transaction, and has released the key, so
        that the completer continues it."""
        run = self.run
        return (
            isinstance(run, PhasedRun) and run.key.begun and run.final_state is FinalState.RELEASED
        )

    def claimed_request(self, key: str, scope: str, user_id: Any) -> ClaimedRequest:
        """Return the columns that a claim stores. They contain the arguments only if the completer
        may need them."""
        fingerprint = f"op1:{hashlib.sha256(self._arguments).hexdigest()}"
        return ClaimedRequest(
            scope=scope_of(self.name, scope),
            idempotency_key=key,
            user_id=user_id,
            request_method=METHOD,
            request_path=self.name,
            request_body=self._arguments if self.points else None,
            request_content_type="application/json",
            request_headers={},
            remote_addr="",
            request_fingerprint=fingerprint,
            fingerprint_as=lambda _: fingerprint,
            plain_fingerprint=lambda: fingerprint,
            retention_hours=self.definition.hours_kept,
            lease_seconds=self.definition.lease,
            first_call=self.definition.steps.first_call,
        )

    # What a plain run asks

    def level(self) -> Isolation | None:
        return conf.get().PLAIN_ISOLATION

    def other_databases(self, using: str) -> list[str]:
        return []

    def check_outer_transaction(self, using: str) -> None:
        """Permit every open transaction: the operation is a savepoint of that transaction."""

    # The call

    @contextmanager
    def bind(self, run: Run) -> Iterator[None]:
        self.run = run
        token = current_key.set(run.key)
        try:
            yield
        finally:
            current_key.reset(token)

    def call(self) -> Outcome:
        try:
            return self._in_steps(self.run) if self.points else self._in_one_transaction()
        except CONFLICTS as refusal:
            if isinstance(refusal, InProgress) and not self.run.key.begun:
                raise
            raise RuntimeError(
                f"The operation {self.name} got {type(refusal).__name__} of another key."
            ) from refusal

    def _in_one_transaction(self) -> Outcome:
        result = Hidden(self._result(self.definition.steps.last.function))
        return self.outcome(stored(result.value, self.name))

    def _in_steps(self, run: PhasedRun) -> Outcome:
        if run.key.begun and run.key.attempts > 1:
            self._earlier = EarlierRuns(run, self.definition.steps, self.name)
            self._earlier.require_same_steps()
        for point in run.key.phases():
            step = self.definition.steps.of_point[point]
            try:
                made = Hidden(() if step.call is None else (step.call.made(run.key, self._given),))
                self._commit(run, partial(self._end_step, step, made))
            except Rejected as why:
                if run.key.recovery_point != point:
                    raise RuntimeError(
                        "A hook of transaction.on_commit() raised Rejected after the step before"
                        f" {run.key.recovery_point!r} was committed."
                    ) from why
                # A lost session may be the reason for the refusal.
                run.sessions.require_all(status=422, cause=why)
                self._refuse_what_stays(point, why)
                self._commit(run, partial(self._end_refused, point, why))
        return self.outcome(run.result())

    def _given(self) -> dict[str, Any]:
        """Return a new copy of the arguments, since a function may change it."""
        given: dict[str, Any] = json.loads(self._arguments)
        return given

    def _result(self, function: Callable[..., Any], *values: Any) -> Any:
        result = awaited(function(*values, **self._given()))
        refuse_generator(self.name, result)
        return result

    def _commit(self, run: PhasedRun, end: Callable[[AtomicPhase], None]) -> None:
        """Run a transaction. After a serialization failure, repeat the transaction, but not the
        call before it. After a serialization failure of a hook after COMMIT, repeat nothing."""
        point = run.key.recovery_point
        for attempt in Attempts(run):
            if run.key.recovery_point != point:
                return
            with attempt:
                with atomic_phase(run.key) as phase:
                    end(phase)
                return
        raise conflict()

    def _end_step(self, step: Step[Any], made: Hidden[tuple[Any, ...]], phase: AtomicPhase) -> None:
        result = Hidden(self._result(step.function, *made.value))
        if self._earlier is not None and isinstance(result.value, Rejected):
            self._earlier.require_no_later_call(result.value)
        if step is self.definition.steps.last or isinstance(result.value, Rejected):
            phase.finish_with(stored(result.value, self.name))
        else:
            phase.set_recovery_point(step.function.__name__)

    def _end_refused(self, point: str, why: Rejected, phase: AtomicPhase) -> None:
        """Store a refusal, and undo the writes of the transactions before this point."""
        undo = self.definition.steps.undo
        if undo is not None and point != STARTED:
            self._result(undo, why)
        phase.finish_with(stored(why, self.name))

    def _refuse_what_stays(self, point: str, why: Rejected) -> None:
        """Raise KeyStuck if the refusal would leave an earlier effect in place: a call, or a
        committed transaction without ``undo``."""
        if self._earlier is not None:
            self._earlier.require_no_later_call(why)
        if self.definition.steps.undo is None and point != STARTED:
            raise KeyStuck(
                f"The operation {self.name} was rejected ({why.code}) after {point!r} was"
                " committed, and it has no undo=. Undo the committed writes, then answer the key."
                " Or deploy code with undo=, and hand the key back."
            )

    def outcome(self, value: StoredResponse) -> Outcome:
        return Outcome(value, value.code, is_stored=True)

    def outcome_of(self, error: Exception) -> Outcome | None:
        """Return the outcome for a refusal that a plain operation raises."""
        if isinstance(error, Rejected) and not self.points:
            refusal = stored(error, self.name)
            return Outcome(refusal, refusal.code, is_stored=True, cause=error)
        return None

    def refusal_of(self, error: Exception) -> Outcome | None:
        """Return the outcome for an exception that the caller gets. Before the first commit and
        call, this outcome makes the key refused, so that the completer does not run it later."""
        if self.run is None or self.run.finished:
            return None
        if isinstance(error, (LockLost, KeyStuck, Unavailable)):
            return None
        if isinstance(error, Error) and connection_lost(error, self.run.using):
            return None
        return Outcome(None, 400, is_stored=False, cause=error, is_raised=True)

    # What is stored

    def require_storable(self, value: Any) -> None:
        """Permit every value: it was converted to JSON before."""

    def stored(self, value: StoredResponse) -> StoredResponse:
        return value

    def restored(self, key: ClaimedKey) -> StoredResponse:
        body = key.response_body
        return StoredResponse(key.response_code or 0, {}, None if body is None else bytes(body))

    def replayed(self, key: ClaimedKey) -> StoredResponse:
        self.is_replayed = True
        return self.restored(key)

    def described(self, value: StoredResponse) -> str:
        return f"The operation returned {value.code}"

    # The state before the first attempt

    def restore(self) -> bool:
        return True

    def note_committed(self) -> None:
        self.is_committed = True

    def put_back(self) -> None:
        """Do nothing: each call of a function gets its own copy of the arguments."""
