"""The run of a phased view over a claimed key: where it stands, what it has committed, what it answers."""

from collections.abc import Iterator

from django.db.models import F
from django.http import HttpRequest, HttpResponseBase

from idempotency import conf, http
from idempotency.calls import Call
from idempotency.exceptions import CallInDoubt, IdempotencyError, PhaseDidNotAdvance, ResponseNotCommitted
from idempotency.models import FINISHED, STARTED, ForeignCall, IdempotencyKey


class PhasedRun:
    """One run of a phased view over a claimed key; ``key.phases()`` and ``key.response()`` lead here."""

    def __init__(
        self, key: IdempotencyKey, call: Call, order: tuple[str, ...], sender: HttpRequest | None, *, using: str
    ) -> None:
        self.key = key
        self.call = call
        #: All recovery points in the order in which they are reached, the first and the last included.
        self.order = order
        #: The request that signals carry; None when the completer runs the view.
        self.sender = sender
        self.using = using
        self.started = False
        self.in_phase = False
        #: The isolation of the last phase that was begun.
        self.level = conf.get().PHASE_ISOLATION
        #: The names of the foreign calls that this run has behind it.
        self.called: set[str] = set()
        #: Those that are not settled, with what a phase that would go on without them raises.
        self.unsettled: dict[str, IdempotencyError] = {}
        #: Those whose blocks have not been left yet.
        self.open_calls: set[str] = set()
        self._phases_committed = 0
        self._moved = False
        self._response: HttpResponseBase | None = None
        key.run = self

    def again(self, fresh: IdempotencyKey) -> "PhasedRun":
        """Return the run that goes on for this one inside the process, over a key read anew."""
        run = PhasedRun(fresh, self.call, self.order, self.sender, using=self.using)
        run._phases_committed = self._phases_committed
        return run

    @property
    def finished(self) -> bool:
        """Whether the key has its response."""
        return self.key.recovery_point == FINISHED

    @property
    def untouched(self) -> bool:
        """Whether nothing has moved the key yet, and this request has committed nothing."""
        return self.key.recovery_point == STARTED and not self._phases_committed

    def recall_doubts(self) -> None:
        """Read which calls were begun before and not recorded, in case that this time the view takes another way."""
        rows = ForeignCall.objects.using(self.using).filter(key_id=self.key.pk, recorded_at=None)
        self.unsettled = {name: CallInDoubt(call_in_doubt(name)) for name in rows.values_list("name", flat=True)}

    def refuse_call_beside_doubt(self, name: str) -> None:
        """Raise CallInDoubt when another call than ``name`` is in doubt: this one, made instead, might do its work twice."""
        for other, obstacle in self.unsettled.items():
            if isinstance(obstacle, CallInDoubt) and other != name and other not in self.open_calls:
                raise obstacle

    def refuse_to_forget_calls(self) -> None:
        """Raise when a foreign call of this request was begun: an answer that no phase stored would say that nothing happened.

        Raises CallInDoubt when nobody knows what it did, ResponseNotCommitted when its result is recorded.
        """
        calls = ForeignCall.objects.using(self.using).filter(key_id=self.key.pk)
        calls = calls.order_by(F("recorded_at").asc(nulls_first=True))  # A doubt weighs more than a result.
        for name, recorded_at in calls.values_list("name", "recorded_at"):
            if recorded_at is None:
                raise CallInDoubt(call_in_doubt(name))
            raise ResponseNotCommitted(
                f"The call {name!r} was made, and this answer would end the request as if it had not been. Store an answer "
                f"that tells of it with phase.set_response(), or go on."
            )

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
        self._response = http.rebuild(self.key)
        return self._response

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


def call_in_doubt(name: str) -> str:
    """Return what a person is told of a foreign call that was begun and not recorded."""
    return (
        f"The call {name!r} was begun, and its result was never recorded: it may have taken effect, and calling again "
        f"could do the work twice. Look there for what happened, then answer this request from the admin."
    )


def run_of(key: IdempotencyKey) -> PhasedRun:
    """Return the run that may go on with the key at this place. Raises RuntimeError if there is none."""
    run = key.run
    if not isinstance(run, PhasedRun):
        raise RuntimeError("This needs the request.idempotency_key of a view with @idempotent(recovery_points=[...]).")
    if run.in_phase:
        raise RuntimeError("An atomic_phase holds no other and no foreign_call: they cannot be nested. End it before.")
    if run.finished:
        raise RuntimeError("This key is finished: its response is stored, and nothing can follow.")
    return run
