"""Atomic phases: local writes and the new recovery point commit together, or not at all; and what stands between them.

Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" ("atomic phases" and "recovery points").
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, cast
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder
from django.db import InterfaceError, InternalError, OperationalError, connections, transaction
from django.db.models.functions import Now
from django.http import HttpResponseBase

from idempotency import conf, http, keys, signals
from idempotency.conf import ChosenIsolation
from idempotency.contexts import NeverEntered, either_context
from idempotency.exceptions import CallInDoubt, CallNotRecorded, PhaseDidNotAdvance, ResponseNotStorable, UnknownRecoveryPoint
from idempotency.models import FINISHED, ForeignCall, IdempotencyKey
from idempotency.runs import PhasedRun, call_in_doubt, run_of
from idempotency.transactions import drop_connection, durable_transaction


class AtomicPhase:
    """What the block of an ``atomic_phase`` says about its end. Exactly one of the three is called, anywhere in the block."""

    def __init__(self, run: PhasedRun) -> None:
        self._run = run
        self._to: str | None = None
        self._noted = False
        self._response: HttpResponseBase | None = None

    def set_recovery_point(self, name: str) -> None:
        """Let the phase commit together with this recovery point.

        Raises UnknownRecoveryPoint for a name that the view does not declare, and for one that is not ahead.
        """
        order = self._run.order
        here = self._run.key.recovery_point
        if name not in order[1:-1] or order.index(name) <= order.index(here):
            raise UnknownRecoveryPoint(
                f"{name!r} cannot follow {here!r}: the order is {', '.join(order)}. Declare it in "
                f"@idempotent(recovery_points=[...]); a key moves forward only."
            )
        self._end(name)

    def set_response(self, response: HttpResponseBase) -> None:
        """Let the phase commit together with this response, which finishes the key.

        Any 4xx may end the request here, also one that is never stored when it is returned, such as 403. Raises
        ResponseNotStorable for other statuses that are never stored, and for what ``not_stored()`` has marked.
        """
        if not (http.is_stored(response) or http.is_refusal(response)):
            raise ResponseNotStorable(
                f"A response with status {response.status_code} is never stored. Return it from outside the phase: the key is "
                f"released, and a retry goes on from the last recovery point."
            )
        self._response = response
        self._end(FINISHED)

    def no_op(self) -> None:
        """Let the phase commit and move nothing: its writes are made again by each retry, so they must bear that."""
        self._end(self._run.key.recovery_point)

    def _end(self, to: str) -> None:
        if self._to is not None:
            raise RuntimeError("This phase has been given its end already: call one of the three, once.")
        self._to = to

    def write(self) -> None:
        """Write the end as the last statement before COMMIT. Raises PhaseDidNotAdvance, and LockLost from the fence."""
        run = self._run
        if self._to is None:
            raise PhaseDidNotAdvance
        for obstacle in run.unsettled.values():
            raise obstacle
        if self._response is not None:
            # Late, in the thread and the transaction of the phase: a template may still ask the database.
            self._response = run.call.rendered(self._response)
            keys.finish(run.key, *http.stored_parts(self._response), using=run.using)
        elif self._to == run.key.recovery_point:
            keys.renew(run.key, using=run.using)
        else:
            keys.advance(run.key, self._to, using=run.using)

    def note(self) -> None:
        """Tell the run, and whoever listens, what has been committed."""
        run = self._run
        if self._noted:
            return
        self._noted = True
        if self._response is not None:
            run.finished_with(self._response)
        else:
            run.moved_to(cast(str, self._to))  # write() saw to it that there is one
        keys.emit(signals.phase_committed, run.key, run.sender)
        if self._response is not None:
            keys.emit(signals.key_finished, run.key, run.sender)


@either_context(holds_transaction=True)
def atomic_phase(key: IdempotencyKey, *, isolation: ChosenIsolation = "from settings") -> Iterator[AtomicPhase]:
    """Run the block in one transaction on the key's database, which commits with its new recovery point or response.

    On return everything that the block wrote is committed, the key has moved, and its lock is renewed. On an exception
    nothing of it is: the transaction is rolled back. Make no foreign call inside: it would hold a connection and a snapshot for
    as long as a stranger likes.

    ``isolation`` is "read committed", "repeatable read", "serializable", or None for the connection's own; PHASE_ISOLATION by
    default. A serialization failure is retried by the decorator, from the last recovery point. An async view enters it with
    ``async with``.

    Raises PhaseDidNotAdvance when the block ends without one of the three ends, CallNotRecorded after a foreign call that was
    put off, CallInDoubt when one is in doubt, LockLost when another claim has taken the key over, and RuntimeError when it is
    nested in a phase, a foreign call or a transaction.
    """
    run = run_of(key)
    if run.open_calls:
        raise RuntimeError(
            "A foreign_call is under way: leave its block before a phase begins, so that its result is kept first."
        )
    phase = AtomicPhase(run)
    run.in_phase = True
    try:
        level = run.level = conf.get().PHASE_ISOLATION if isolation == "from settings" else isolation
        with durable_transaction(level, using=run.using, lock_timeout=True):
            # First in the line: what a later hook of the view raises does not undo the COMMIT.
            transaction.on_commit(phase.note, using=run.using)
            yield phase
            phase.write()
    finally:
        run.in_phase = False
    phase.note()  # for TestCase, which never commits


class MadeCall:
    """What the block of a ``foreign_call`` sees of its call."""

    def __init__(self, row: ForeignCall) -> None:
        #: Whether to call now; False when an earlier attempt did, and ``result`` is what it recorded.
        self.due = row.recorded_at is None
        self.result: Any = row.result
        self.recorded = False
        self.may_be_repeated = False

    def record(self, result: Any = None) -> None:
        """Keep the result, a JSON value, for this run and for all that follow; it is committed when the block is left.

        Dates, decimals and UUIDs become strings, now as in a later run. Raises TypeError for what cannot be kept: its
        ``repr()`` is kept instead, since the call was made.
        """
        try:
            text = json.dumps(result, cls=DjangoJSONEncoder, allow_nan=False)
            kept = json.loads(text)
            json.dumps(kept, ensure_ascii=False).encode()  # PostgreSQL takes no lone surrogate,
            if "\\u0000" in text.replace("\\\\", ""):  # and no NUL.
                raise ValueError("it contains a NUL character")
        except Exception as error:  # whatever its own code raises
            self.result, self.recorded = _described(result), True
            raise TypeError(
                f"The result of a foreign call cannot be kept as JSON: {error}. Record what a retry needs."
            ) from error
        self.result, self.recorded = kept, True

    def retryable(self) -> None:
        """Say that the call took no effect: the intent is taken back when the block is left, and a retry will call again.

        Answer with a status that is not stored, or raise; a phase that ends after it raises CallNotRecorded. When another
        service shall do it instead, ``record()`` that this one refused: a retry must not ask it again.
        """
        self.may_be_repeated = True


def _described(result: Any) -> str:
    """Return words for a result that cannot be kept."""
    try:
        return repr(result).replace("\0", "").encode("utf-8", "replace").decode()
    except Exception:  # too deep, too long, or a mistake of its class
        return f"a result of the type {type(result).__name__}, which cannot be described"


@either_context(holds_transaction=False)
def foreign_call(key: IdempotencyKey, name: str) -> Iterator[MadeCall]:
    """Make a call to a service that is not idempotent, once per key: call it if ``call.due``, then ``call.record(result)``.

    When the block begins, the intent to call is committed and the lock is renewed. When it is left, by an exception too, the
    recorded result is committed, even if the key was taken over meanwhile: the call was made.

    Raises CallInDoubt when this call, or another one of the key, was begun before and recorded nothing, which makes the key
    stuck; CallNotRecorded when the block recorded nothing; LockLost when another claim has taken the key over; RuntimeError
    inside a transaction, and for a name that this run has called before. When the view catches what ended the block and goes
    on, the next phase or call raises it: CallInDoubt, or in a phase CallNotRecorded after ``retryable()``.
    """
    run = run_of(key)
    if name in run.called:
        raise RuntimeError(f"This run has made the call {name!r} before, and a second one would get its result: name it anew.")
    run.refuse_beside_doubt(name)
    token = cast(UUID, key.fence)
    rows = ForeignCall.objects.using(run.using)
    with durable_transaction(None, using=run.using):
        keys.renew(key, using=run.using)
        # The renewal has locked the key, so nobody else writes this row meanwhile.
        begun = rows.filter(key_id=key.pk, name=name).first()
        row = begun or rows.create(key_id=key.pk, name=name, token=token)
    run.begun()
    call = MadeCall(row)
    if call.due:
        # Until it is settled: the view may catch what is raised here, or in the block, and go on.
        run.unsettled[name] = CallInDoubt(call_in_doubt(name))
        if begun:
            raise run.unsettled[name]
    else:
        run.unsettled.pop(name, None)  # The late run that began it has recorded it since.
    own = rows.filter(pk=row.pk, token=row.token, recorded_at__isnull=True)
    run.open_calls.add(name)
    try:
        yield call
        if call.due and not (call.recorded or call.may_be_repeated):
            raise CallNotRecorded
        if call.recorded or not call.due:
            run.called.add(name)
    except NeverEntered:
        call.retryable()  # Whoever entered raises it on.
    finally:
        run.open_calls.discard(name)
        if call.due and call.recorded:
            _insist(lambda: own.update(result=call.result, recorded_at=Now()), using=run.using)
            del run.unsettled[name]
        elif call.due and call.may_be_repeated:
            _insist(own.delete, using=run.using)
            run.unsettled[name] = CallNotRecorded()


def _insist(write: Callable[[], object], *, using: str, tries: int = 20) -> None:
    """Write down what was done elsewhere, or was not.

    While the database is gone, or takes no writes, it is tried again and again for ten seconds. This process alone knows it:
    what it does not write down, a person has to find out.
    """
    for tries_left in reversed(range(tries + 1)):
        try:
            write()
            return
        except (OperationalError, InterfaceError, InternalError):
            drop_connection(connections[using])
            if not tries_left:
                raise
            time.sleep(0.5)
