"""Changes of an operation by a deploy after which a key cannot continue, because an effect of an
earlier run would be repeated or hidden."""

from idempotency._engine.history import HistoryEvent
from idempotency._engine.phased_run import PhasedRun
from idempotency._engine.replays import CannotRun
from idempotency._operations.steps import Steps
from idempotency.exceptions import CallInDoubt, KeyStuck, Rejected, StuckCode
from idempotency.models import STARTED, DownstreamCall, IdempotencyKey


class EarlierRuns:
    """The effects of earlier runs of a key, by the names in its history, which keeps only the last
    events."""

    def __init__(self, run: PhasedRun, steps: Steps, name: str) -> None:
        self._key, self._using, self._steps, self._name = run.key, run.using, steps, name
        #: The calls that were begun, and the transactions that were committed.
        self._begun: set[str] = set()
        self._committed: set[str] = set()

    def require_same_steps(self) -> None:
        """Read the history. Refuse to continue if the service could repeat a call under another
        key, or if a committed transaction would run again.

        Raises CannotRun if the running code makes no call of this name, or makes a committed
        transaction later than the recovery point of the key.
        Raises CallInDoubt if a deploy has changed the call from keyed() to at_most_once().
        Raises CallInDoubt if the history was shortened, and has lost the name of the last call.
        """
        keys = IdempotencyKey.objects.using(self._using).filter(pk=self._key.pk)
        for history in keys.values_list("history", flat=True):
            for event in history:
                if event["event"] == HistoryEvent.CALL_BEGUN:
                    self._begun.add(event["detail"])
                elif event["event"] == HistoryEvent.RECOVERY_POINT:
                    self._committed.add(event["detail"])
        self._require_same_calls()
        if again := sorted(self._committed.intersection(self._later_points())):
            raise CannotRun(
                StuckCode.UNKNOWN_RECOVERY_POINT,
                f"An earlier run has committed {again[0]!r}, which the operation {self._name} of"
                f" the running code runs after {self._key.recovery_point!r}, so it would run again."
                " Deploy code with the former order of the functions. Nothing is lost.",
            )

    def _later_points(self) -> tuple[str, ...]:
        points = self._steps.points
        return points[points.index(self._key.recovery_point) + 1 :]

    def _require_same_calls(self) -> None:
        begun, calls = self._begun, self._steps.calls
        kept = DownstreamCall.objects.using(self._using).filter(key_id=self._key.pk)
        recorded = set(kept.values_list("name", flat=True))
        at_most_once = {name for name in begun & calls.keys() if calls[name].valid_hours is None}
        if switched := sorted(at_most_once - recorded):
            raise CallInDoubt(
                f"An earlier run began the call {switched[0]!r} with keyed(); the running code"
                " makes it with at_most_once(). The call may have taken effect, and the service"
                " would repeat it. Check the service, then answer the key. Or deploy keyed() again."
            )
        next_call = self._steps.of_point[self._key.recovery_point].call
        is_lost = not begun and self._key.call_begun_at is not None
        if is_lost and next_call is not None and next_call.name not in recorded:
            raise CallInDoubt(
                "The history of the key has become too long, and its event of the last call was"
                f" deleted. If that call had another name than {next_call.name!r}, the service"
                " would repeat it. Check the service, then answer the key."
            )
        if unknown := sorted(begun - calls.keys()):
            raise CannotRun(
                StuckCode.UNKNOWN_RECOVERY_POINT,
                f"An earlier run has begun the call {unknown[0]!r}, which the operation"
                f" {self._name} of the running code does not make. Deploy code with a function of"
                " this name in call=. Nothing is lost.",
            )

    def require_no_later_call(self, why: Rejected) -> None:
        """Raise KeyStuck if the refusal by a step would hide a call that an earlier run has begun:
        a deploy has inserted the step before that call."""
        point, of_point = self._key.recovery_point, self._steps.of_point
        later = [of_point[each].call for each in self._later_points() if each in of_point]
        is_begun = any(call is not None and call.name in self._begun for call in later)
        # The history may have lost the name of the call.
        is_before_all = point == STARTED and of_point[point].call is None
        if is_begun or is_before_all:
            raise KeyStuck(
                f"The operation {self._name} was rejected ({why.code}) by a step that a deploy has"
                " inserted before a call that was begun. The call may have taken effect. Check the"
                " service, then answer the key."
            )
