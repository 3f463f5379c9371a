"""Atomic phases: local writes and the new recovery point commit together, or not at all.

Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" ("atomic phases" and "recovery points").
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from django.http import HttpRequest, HttpResponseBase

from idempotency import conf, http, keys, signals
from idempotency.conf import Isolation
from idempotency.exceptions import PhaseDidNotAdvance, ResponseNotStorable, UnknownRecoveryPoint
from idempotency.models import FINISHED, STARTED, IdempotencyKey
from idempotency.transactions import durable_transaction, limit_idle_time

#: Not given: the setting counts. None is a level too (the connection's own).
ChosenIsolation = Isolation | None | Literal["from settings"]


class PhasedRun:
    """One run of a phased view over a claimed key; ``key.phases()`` and ``key.response()`` lead here."""

    def __init__(self, key: IdempotencyKey, order: tuple[str, ...], sender: HttpRequest | None, *, using: str) -> None:
        self.key = key
        #: All recovery points in the order in which they are reached, the first and the last included.
        self.order = order
        #: The request that signals carry; None when the completer runs the view.
        self.sender = sender
        self.using = using
        self.started = False
        self.in_phase = False
        self._phases_committed = 0
        self._moved = False
        self._response: HttpResponseBase | None = None
        key.run = self

    def again(self, fresh: IdempotencyKey) -> "PhasedRun":
        """Return the run that goes on for this one inside the process, over a key read anew."""
        run = PhasedRun(fresh, self.order, self.sender, using=self.using)
        run._phases_committed = self._phases_committed
        return run

    @property
    def finished(self) -> bool:
        """Whether the key has its response."""
        return self.key.recovery_point == FINISHED

    @property
    def untouched(self) -> bool:
        """Whether neither this run nor an earlier one has committed anything."""
        return self.key.recovery_point == STARTED and not self._phases_committed

    def phases(self) -> Iterator[str]:
        """Yield the recovery point to go on from until the key is finished.

        Raises PhaseDidNotAdvance after a pass that moved nothing: it would be made again and again.
        """
        while not self.finished:
            self._moved = False
            yield self.key.recovery_point
            if not self._moved:
                raise PhaseDidNotAdvance(
                    f"A pass through the phases at {self.key.recovery_point!r} moved nothing, and would be made for ever. "
                    f"Let the view handle this recovery point, and end its phase with set_recovery_point() or set_response()."
                )

    def response(self) -> HttpResponseBase:
        """Return the response that a phase stored: the object of this run, else one rebuilt from the row."""
        if self._response is not None:
            return self._response
        if not self.finished:
            raise RuntimeError("key.response() was called before a phase stored a response: end a phase with set_response().")
        return http.rebuild(self.key)

    def stored(self, response: HttpResponseBase) -> bool:
        """Tell whether this very response is the one that a phase stored."""
        return response is self._response

    def moved_to(self, recovery_point: str) -> None:
        """Note what a phase has committed."""
        self._phases_committed += 1
        self._moved = self._moved or recovery_point != self.key.recovery_point
        self.key.recovery_point = recovery_point

    def finished_with(self, response: HttpResponseBase) -> None:
        """Note the response that was committed."""
        self._response = response
        self.moved_to(FINISHED)


class AtomicPhase:
    """What the block of an ``atomic_phase`` says about its end. Exactly one of the three is called, anywhere in the block."""

    def __init__(self, run: PhasedRun) -> None:
        self._run = run
        self._to: str | None = None
        self._response: HttpResponseBase | None = None

    def set_recovery_point(self, name: str) -> None:
        """Let the phase commit together with this recovery point.

        Raises UnknownRecoveryPoint for a name that the view does not declare, and for one that is not ahead.
        """
        order = self._run.order
        here = self._run.key.recovery_point
        if name not in order[1:-1] or order.index(name) <= order.index(here):
            raise UnknownRecoveryPoint(f"{name!r} cannot follow {here!r}: the order is {', '.join(order)}. " + UNDECLARED)
        self._end(name)

    def set_response(self, response: HttpResponseBase) -> None:
        """Let the phase commit together with this response, which finishes the key.

        Raises ResponseNotStorable for a status that is never stored.
        """
        if not http.is_stored(response):
            raise ResponseNotStorable(f"A response with status {response.status_code} is never stored. " + RETURN_IT)
        self._response = http.render(response)
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
        if self._response is not None:
            keys.finish(run.key, *http.stored_parts(self._response), using=run.using)
        elif self._to == run.key.recovery_point:
            keys.renew(run.key, using=run.using)
        else:
            keys.advance(run.key, self._to, using=run.using)

    def note(self) -> None:
        """Tell the run, and whoever listens, what has been committed."""
        run = self._run
        if self._response is not None:
            run.finished_with(self._response)
        elif self._to is not None:
            run.moved_to(self._to)
        keys.emit(signals.phase_committed, run.key, run.sender)
        if self._response is not None:
            keys.emit(signals.key_finished, run.key, run.sender)


UNDECLARED = "Declare it in @idempotent(recovery_points=[...]); a key moves forward only."
RETURN_IT = "Return it from outside the phase: the key is released, and a retry goes on from the last recovery point."


@contextmanager
def atomic_phase(key: IdempotencyKey, *, isolation: ChosenIsolation = "from settings") -> Iterator[AtomicPhase]:
    """Run the block in one transaction on the key's database, which commits with its new recovery point or response.

    On return everything that the block wrote is committed, the key has moved, and its lock is renewed. On an exception
    nothing of it is: the transaction is rolled back. Make no foreign call inside: it would hold a connection and a snapshot for
    as long as a stranger likes.

    ``isolation`` is "read committed", "repeatable read", "serializable", or None for the connection's own; PHASE_ISOLATION by
    default. A serialization failure is retried by the decorator, from the last recovery point.

    Raises PhaseDidNotAdvance when the block ends without one of the three ends, LockLost when another claim has taken the
    key over, and RuntimeError when it is nested in a phase or in a transaction.
    """
    run = key.run
    if not isinstance(run, PhasedRun):
        raise RuntimeError(
            "atomic_phase() needs the request.idempotency_key of a view with @idempotent(recovery_points=[...])."
        )
    if run.in_phase:
        raise RuntimeError("An atomic_phase cannot be nested in another: end the first one before.")
    if key.recovery_point == FINISHED:
        raise RuntimeError("This key is finished: its response is stored, and no phase can follow.")
    phase = AtomicPhase(run)
    run.in_phase = True
    try:
        level = conf.get().PHASE_ISOLATION if isolation == "from settings" else isolation
        with durable_transaction(level, using=run.using):
            limit_idle_time(run.using)
            yield phase
            phase.write()
    finally:
        run.in_phase = False
    phase.note()
