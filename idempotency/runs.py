"""The run of a phased view over a claimed key: where it stands, what it has committed, what it answers."""

from collections.abc import Iterator

from django.http import HttpRequest, HttpResponseBase

from idempotency import conf, http, keys
from idempotency.calls import Call
from idempotency.exceptions import CallInDoubt, IdempotencyError, PhaseDidNotAdvance
from idempotency.models import FINISHED, ForeignCall, IdempotencyKey
from idempotency.transactions import refuse_outer_transaction


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
        self._moved = False
        self._response: HttpResponseBase | None = None
        key.run, key.begin_call = self, self._begin_call

    def again(self, fresh: IdempotencyKey) -> "PhasedRun":
        """Return the run that goes on for this one inside the process, over a key read anew."""
        return PhasedRun(fresh, self.call, self.order, self.sender, using=self.using)

    @property
    def finished(self) -> bool:
        """Whether the key has its response."""
        return self.key.recovery_point == FINISHED

    def recall_doubts(self) -> None:
        """Read which calls were begun before and not recorded, in case that this time the view takes another way."""
        rows = ForeignCall.objects.using(self.using).filter(key_id=self.key.pk, recorded_at=None)
        self.unsettled = {name: CallInDoubt(call_in_doubt(name)) for name in rows.values_list("name", flat=True)}

    def refuse_beside_doubt(self, name: str | None = None) -> None:
        """Raise CallInDoubt when another call than ``name`` is in doubt.

        A call made instead might do its work twice; an answer that no phase stored would say that nothing happened.
        """
        for other, obstacle in self.unsettled.items():
            if isinstance(obstacle, CallInDoubt) and other != name and other not in self.open_calls:
                raise obstacle

    def _begin_call(self, name: str) -> None:
        """Write down that a call under a derived key begins; see ``IdempotencyKey.call``."""
        run_of(self.key)
        refuse_outer_transaction(self.using)
        self.refuse_beside_doubt()
        keys.begin_call(self.key, name, using=self.using)
        self.begun()

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

    def begun(self) -> None:
        """Note what was committed with ``keys.renew`` or a phase: the key is not untouched any more."""
        self.key.untouched_attempts = 0

    def moved_to(self, recovery_point: str) -> None:
        """Note what a phase has committed."""
        self.begun()
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
