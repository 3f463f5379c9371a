"""An atomic phase: one transaction with the writes of a block and the new recovery point or the
result.

``atomic_phase`` begins the transaction, and the block sets its end. The fenced UPDATE of the key is
then sent with COMMIT, and the run records what was committed.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from django.db.transaction import TransactionManagementError

from idempotency import signals
from idempotency._async import either_context
from idempotency._engine import events, fence
from idempotency._engine.adapter import Outcome
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.phased_run import PhasedRun, run_of
from idempotency._engine.transactions import OwnTransaction, durable_transaction
from idempotency.conf import ChosenIsolation
from idempotency.exceptions import PhaseDidNotAdvance
from idempotency.models import FINISHED

if TYPE_CHECKING:  # ``set_response`` is the spelling of HTTP.
    from django.http import HttpResponseBase


class AtomicPhase:
    """The handle of an ``atomic_phase`` block. The block must call exactly one of the three methods
    that end it."""

    def __init__(self, run: PhasedRun) -> None:
        self._run = run
        self._target: str | None = None
        self._noted = False
        self._result: Any = None
        self._outcome: Outcome | None = None

    def set_recovery_point(self, name: str) -> None:
        """Commit the phase together with this recovery point.

        Raises PhaseDidNotAdvance if the name is not declared, or not after the current one.
        """
        order = self._run.work.points
        here = self._run.key.recovery_point
        if name not in order[1:-1] or order.index(name) <= order.index(here):
            raise PhaseDidNotAdvance(
                f"The recovery point {name!r} cannot follow {here!r}: the order is"
                f" {', '.join(order)}. Declare it in @idempotent(recovery_points=[...]); a key"
                " moves forward only."
            )
        self._move_to(name)

    def set_response(self, response: "HttpResponseBase") -> None:
        """Commit the phase together with this response, which finishes the key.

        Any 4xx may finish the key here. This includes statuses of NEVER_STORED_STATUSES such as
        403, and a 409 with ``Retry-After``, which are not stored if the view returns them outside a
        phase.
        Raises ResponseNotCommitted for other statuses that are never stored, and for responses of
        ``not_stored()``.
        """
        self._run.work.require_storable(response)
        self.finish_with(response)

    def finish_with(self, result: Any) -> None:
        """Commit the phase together with this value of the work, which finishes the key."""
        self._result = result
        self._move_to(FINISHED)

    def no_op(self) -> None:
        """Commit the phase and keep the recovery point. Each retry repeats the writes, so they must
        be repeatable."""
        self._move_to(self._run.key.recovery_point)

    def _move_to(self, to: str) -> None:
        if self._target is not None:
            raise RuntimeError(
                "The end of this phase was already set: call one of the three methods once."
            )
        self._target = to

    def write(self, own: OwnTransaction) -> None:
        """Write the recovery point or the result with the last statement: before COMMIT, or in one
        round trip with it.

        Raises PhaseDidNotAdvance if no end was set.
        Raises LockLost if another claim has taken over the key.
        Raises SessionLost if the block has lost a session.
        """
        run = self._run
        if self._target is None:
            raise PhaseDidNotAdvance
        run.calls.require_results()
        if own.connection.needs_rollback:
            raise TransactionManagementError(
                "The transaction of this phase was marked for rollback:"
                f" {run.work.rollback_causes} or by a database error that the block has caught. The"
                " phase is not committed. Handle the exception outside the phase, or put the"
                " statements that may fail into a transaction.atomic() of their own."
            ) from own.connection.rollback_exc  # type: ignore[attr-defined]
        run.sessions.require_all()
        if self._target == FINISHED:
            # In the transaction of the phase: rendering the result may query the database.
            self._outcome = run.work.outcome(self._result)
            run.sessions.require_all(status=self._outcome.code)
            stored = run.work.stored(self._outcome.value)
            fence.finish(run.key, stored, using=run.using, last_of=own)
        elif self._target == run.key.recovery_point:
            fence.renew(run.key, using=run.using, last_of=own)
        else:
            fence.advance(run.key, self._target, using=run.using, last_of=own)

    def note(self) -> None:
        """Update the run and send the signals after COMMIT."""
        run = self._run
        if self._noted:
            return
        self._noted = True
        if self._outcome is not None:
            run.note_finished(self._outcome)
        else:
            run.note_moved(cast(str, self._target))  # set, or write() has raised
        events.emit(signals.phase_committed, run.key, run.work.request)
        if self._outcome is not None:
            events.emit(signals.key_finished, run.key, run.work.request)


@either_context(holds_transaction=True)
def atomic_phase(
    key: ClaimedKey, *, isolation: ChosenIsolation = "from settings"
) -> Iterator[AtomicPhase]:
    """Run the block in one transaction on the key's database. The transaction also commits the new
    recovery point or the response.

    On return the writes of the block are committed together with the recovery point or response
    that the block has set. If the key is not finished, its lock is renewed. On an exception the
    transaction is rolled back. Do not call a downstream service inside, because the call would keep
    the transaction open.

    The argument ``isolation`` is "read committed", "repeatable read", "serializable", or None for
    the connection's own level. The default is PHASE_ISOLATION. After a serialization failure the
    decorator runs the view again from the last recovery point. An async view uses ``async with``.
    Raises PhaseDidNotAdvance if the block called none of the three methods of AtomicPhase.
    Raises CallNotRecorded after an at-most-once call that was declared ``retryable()``.
    Raises CallInDoubt if an at-most-once call of the key has no recorded result.
    Raises LockLost if another claim has taken over the key.
    Raises OperationalError if the run has lost a connection, also if Django has opened a new one.
    Raises RuntimeError inside a phase, an at-most-once call or a transaction.
    """
    run = run_of(key)
    phase = AtomicPhase(run)
    level, lease = run.begin_phase(isolation), run.key.lease_seconds
    with durable_transaction(level, using=run.using, of_phase=True, lease_seconds=lease) as own:
        run.transaction = own
        run.sessions.require_all()
        run.sessions.note()
        # Registered first: an exception in a hook of the work must not skip it.
        own.connection.on_commit(phase.note)
        yield phase
        phase.write(own)
    phase.note()  # in a TestCase, which never commits
