"""Atomic phases, whose writes and recovery point commit together, and the foreign calls between them.

Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" ("atomic phases" and "recovery points").
"""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder
from django.db import InterfaceError, InternalError, OperationalError, connections, transaction
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.db.transaction import TransactionManagementError
from django.http import HttpResponseBase

from idempotency import signals
from idempotency._async import NeverEntered, either_context
from idempotency._engine import events, fence, replication
from idempotency._engine.adapter import Outcome
from idempotency._engine.errors import drop_connection
from idempotency._engine.key_run import KeyRun, run_of
from idempotency._engine.transactions import OwnTransaction, durable_transaction
from idempotency._text import refuse_unstorable_json
from idempotency.conf import ChosenIsolation
from idempotency.exceptions import CallNotRecorded, LockLost, PhaseDidNotAdvance, UnknownRecoveryPoint
from idempotency.models import FINISHED, ForeignCall, IdempotencyKey


class AtomicPhase:
    """The handle of an ``atomic_phase`` block. The block must call exactly one of the three methods that end it."""

    def __init__(self, run: KeyRun) -> None:
        self._run = run
        self._to: str | None = None
        self._noted = False
        self._result: Any = None
        self._outcome: Outcome | None = None

    def set_recovery_point(self, name: str) -> None:
        """Commit the phase together with this recovery point.

        Raises UnknownRecoveryPoint if the view does not declare the name, or if it is not after the current one.
        """
        order = self._run.work.points
        here = self._run.key.recovery_point
        if name not in order[1:-1] or order.index(name) <= order.index(here):
            raise UnknownRecoveryPoint(
                f"The recovery point {name!r} cannot follow {here!r}: the order is {', '.join(order)}. Declare it in "
                f"@idempotent(recovery_points=[...]); a key moves forward only."
            )
        self._end(name)

    def set_response(self, response: HttpResponseBase) -> None:
        """Commit the phase together with this response, which finishes the key.

        Any 4xx may finish the key here. This includes statuses of NEVER_STORED_STATUSES such as 403, and a 409 with
        ``Retry-After``, which are not stored if the view returns them outside a phase.
        Raises ResponseNotStorable for other statuses that are never stored, and for responses of ``not_stored()``.
        """
        self._run.work.refuse_unstorable(response)
        self._result = response
        self._end(FINISHED)

    def no_op(self) -> None:
        """Commit the phase and keep the recovery point. Each retry repeats the writes, so they must be repeatable."""
        self._end(self._run.key.recovery_point)

    def _end(self, to: str) -> None:
        if self._to is not None:
            raise RuntimeError("The end of this phase was already set: call one of the three methods once.")
        self._to = to

    def write(self, own: OwnTransaction) -> None:
        """Write the recovery point or the response with the last statement: before COMMIT, or in one round trip with it.

        Raises PhaseDidNotAdvance if no end was set.
        Raises LockLost if another claim has taken over the key.
        """
        run = self._run
        if self._to is None:
            raise PhaseDidNotAdvance
        run.refuse_unsettled_calls()
        if connections[run.using].needs_rollback:
            raise TransactionManagementError(
                "The transaction of this phase was marked for rollback: by set_rollback(True), by the exception handler of "
                "Django REST framework, or by a database error that the block has caught. The phase is not committed. Handle "
                "the exception outside the phase, or put the statements that may fail into a transaction.atomic() of their own."
            ) from connections[run.using].rollback_exc  # type: ignore[attr-defined]
        if self._result is not None:
            # In the transaction of the phase: the template of a response may query the database.
            self._outcome = run.work.outcome(self._result)
            fence.finish(run.key, run.work.stored(self._outcome.value), using=run.using, ends=own)
        elif self._to == run.key.recovery_point:
            fence.renew(run.key, using=run.using, ends=own)
        else:
            fence.advance(run.key, self._to, using=run.using, ends=own)

    def note(self) -> None:
        """Update the run and send the signals after COMMIT."""
        run = self._run
        if self._noted:
            return
        self._noted = True
        if self._outcome is not None:
            run.note_finished(self._outcome)
        else:
            run.note_moved(cast(str, self._to))  # set, or write() has raised
        events.emit(signals.phase_committed, run.key, run.work.context)
        if self._outcome is not None:
            events.emit(signals.key_finished, run.key, run.work.context)


@either_context(holds_transaction=True)
def atomic_phase(key: IdempotencyKey, *, isolation: ChosenIsolation = "from settings") -> Iterator[AtomicPhase]:
    """Run the block in one transaction on the key's database. The transaction also commits the new recovery point or the
    response.

    On return the writes of the block are committed together with the recovery point or response that the block has set. If the
    key is not finished, its lock is renewed. On an exception the transaction is rolled back. Do not call another service
    inside, because the call would keep the transaction open.

    The argument ``isolation`` is "read committed", "repeatable read", "serializable", or None for the connection's own level.
    The default is PHASE_ISOLATION. After a serialization failure the decorator runs the view again from the last recovery
    point. An async view uses ``async with``.
    Raises PhaseDidNotAdvance if the block called none of the three methods of AtomicPhase.
    Raises CallNotRecorded after a foreign call that was declared ``retryable()``.
    Raises CallInDoubt if a foreign call of the key has no recorded result.
    Raises LockLost if another claim has taken over the key.
    Raises RuntimeError inside a phase, a foreign call or a transaction.
    """
    run = run_of(key)
    phase = AtomicPhase(run)
    with durable_transaction(run.begin_phase(isolation), using=run.using, of_phase=True) as own:
        run.transaction = own
        # Registered first: an exception in a hook of the view must not skip it.
        transaction.on_commit(phase.note, using=run.using)
        yield phase
        phase.write(own)
    phase.note()  # in a TestCase, which never commits


class MadeCall:
    """The handle of a ``foreign_call`` block."""

    def __init__(self, row: ForeignCall) -> None:
        #: Whether to call now. If False, an earlier attempt recorded ``result``.
        self.due = row.recorded_at is None
        self.result: Any = row.result
        self.recorded = False
        self.may_be_repeated = False

    def record(self, result: Any = None) -> None:
        """Record the result, a JSON value, for this run and later ones; it is committed at the end of the block.

        Dates, decimals and UUIDs become strings in this run too.
        Raises TypeError if the result is not JSON. Its ``repr()`` is recorded instead, because the call was made.
        """
        try:
            self.result = json.loads(json.dumps(result, cls=DjangoJSONEncoder))
            refuse_unstorable_json(self.result)
        except Exception as error:  # its methods may raise anything
            self.result, self.recorded = _described(result), True
            del result  # Reports of errors show local variables.
            raise TypeError(
                f"The result of a foreign call cannot be kept as JSON: {error}. Record what a retry needs."
            ) from None
        self.recorded = True

    def retryable(self) -> None:
        """Declare that the call took no effect: the intent is deleted at the end of the block, and a retry calls again.

        After ``retryable()``, return a status that is not stored, or raise an exception. A later phase of this run cannot
        commit: it raises CallNotRecorded. If you call a second service instead, ``record()`` the refusal of the first: a retry
        must not call the first again.
        """
        self.may_be_repeated = True


def _described(result: Any) -> str:
    try:
        return repr(result).replace("\0", "").encode("utf-8", "replace").decode()
    except Exception:  # too deep, too long, or a bug of its class
        return f"a result of the type {type(result).__name__}, which cannot be described"


@either_context(holds_transaction=False)
def foreign_call(key: IdempotencyKey, name: str) -> Iterator[MadeCall]:
    """Open a block for one call to a service that does not support idempotency keys. In the block, if ``call.due``, call the
    service and then ``call.record(result)``.

    When the block begins, the intent to call is committed and the lock is renewed. When the block ends, also by an exception,
    the recorded result is committed. It is committed even if another claim has taken over the key, because the call was made.
    If a failover has lost the intent, the end of the block writes it again, even without a result.

    If the block recorded nothing, and the view catches the exception of the block and continues, the next phase or call raises
    CallInDoubt. After ``retryable()`` the next phase raises CallNotRecorded.
    Raises CallInDoubt if this or another call of the key was begun before and has no recorded result; the key becomes stuck.
    Raises CallNotRecorded if the block recorded nothing.
    Raises LockLost if another claim has taken over the key.
    Raises NotReplicated if the standbys do not confirm the recorded result (CONFIRM_REPLICATED).
    Raises RuntimeError inside a transaction, and if this run has already made a call of this name.
    """
    run = run_of(key)
    run.refuse_repeated_call(name)
    with durable_transaction(None, using=run.using):
        fence.renew(key, using=run.using)
        # The renewal locks the row of the key, so no other run writes this call meanwhile.
        calls = ForeignCall.objects.using(run.using)
        begun = calls.filter(key_id=key.pk, name=name).first()
        row = begun or calls.create(key_id=key.pk, name=name, token=cast(UUID, key.fence))
    run.note_begun()
    call = MadeCall(row)
    if not call.due:  # An earlier run has recorded it, perhaps late.
        replication.confirm(run.using)
        run.note_call_settled(name)
        with run.call_open(name):
            yield call
        return
    doubt = run.note_call_begun(name)
    if begun:
        raise doubt
    try:
        with run.call_open(name):
            yield call
            if not (call.recorded or call.may_be_repeated):
                raise CallNotRecorded
    except NeverEntered:
        call.retryable()  # The block did not run. EitherContext raises the cancellation.
    finally:
        if call.may_be_repeated and not call.recorded:
            _insist(_intent(row, using=run.using).delete, using=run.using)
            run.note_call_settled(name, CallNotRecorded())
        else:
            _insist(partial(_write_outcome, key, row, call, using=run.using), using=run.using)
            if call.recorded:
                run.note_call_settled(name)


def _intent(row: ForeignCall, *, using: str) -> QuerySet[ForeignCall]:
    return ForeignCall.objects.using(using).filter(pk=row.pk, token=row.token, recorded_at__isnull=True)


def _write_outcome(key: IdempotencyKey, row: ForeignCall, call: MadeCall, *, using: str) -> None:
    """Write the result of a call, or only that it was begun. Raises LockLost if the key is gone."""
    recorded = {"result": call.result, "recorded_at": Now()} if call.recorded else {}
    if recorded and _intent(row, using=using).update(**recorded):
        return
    # Another run has recorded the call, or a failover has lost the intent, perhaps also phases before it, and perhaps the key:
    # its id may be that of another key. The update locks the row of the key, so no other run begins this call meanwhile.
    with durable_transaction(None, using=using):
        # By the seed, not by the claim: that of a retry is often lost together with its intent.
        own = IdempotencyKey.objects.using(using).filter(pk=row.key_id, seed=bytes(key.seed))
        if not own.update(begun=True, refused_at=None, expires_at=None):
            raise LockLost
        calls = ForeignCall.objects.using(using)
        if not calls.filter(key_id=row.key_id, name=row.name).exists():
            calls.create(key_id=row.key_id, name=row.name, token=row.token, **recorded)


def _insist(write: Callable[[], object], *, using: str, retries: int = 20) -> None:
    """Run ``write``, and retry for ten seconds while the database is unavailable or read-only. Only this process knows the
    outcome of the call. If it cannot be written, the key requires manual intervention."""
    for left in reversed(range(retries + 1)):
        try:
            write()
            return
        except (OperationalError, InterfaceError, InternalError):
            drop_connection(connections[using])
            if not left:
                raise
            time.sleep(0.5)
