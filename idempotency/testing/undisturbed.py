"""The request without a crash: its places, and the results that all courses of events must have."""

from idempotency._operations.definition import METHOD
from idempotency.testing.answers import Answer
from idempotency.testing.comparing import Leaves, Path, random_paths
from idempotency.testing.observing import Run, observed
from idempotency.testing.places import Place, shortened
from idempotency.testing.report import CannotProve
from idempotency.testing.stage import Stage


class Undisturbed(Stage):
    """The run of a request without a crash."""

    _undisturbed: Run
    #: The result of one undisturbed request, and the paths of its random values.
    _expected: Leaves
    _random: set[Path]
    #: The lines at which it causes an effect in a downstream service.
    _effect_lines: list[str]
    #: Whether the request is the call of an operation.
    is_of_operation: bool

    def _compare_replay(self, answer: Answer, again: Answer) -> None:
        if not self._keys().exists():
            return
        if again.content != answer.content:
            raise CannotProve(
                f"The replay differs from the first response: {answer.content[:200]!r}, then"
                f" {again.content[:200]!r}."
            )
        if once := answer.headers ^ again.headers:
            raise CannotProve(
                f"The header {min(once)!r} is in the first response or in its replay, but not in"
                " both. Set the headers of a response before it is stored."
            )

    def _refuse(self, answer: Answer, run: Run) -> None:
        """Raise CannotProve if the undisturbed request fails, or is not protected."""
        if answer.error is not None:
            raise CannotProve(
                "The undisturbed request fails already; see the error above."
            ) from answer.error
        told = f"was answered with {answer.status}: {shortened(str(answer.body()))}."
        if self._keys().stuck().exists():
            raise CannotProve(f"The undisturbed request leaves a stuck key, and {told}")
        if answer.status >= 500 or not (self._keys().exists() or self._messages()):
            raise CannotProve(
                "The undisturbed request left neither a key nor a message of process_once(), and"
                f" {told} Is the view decorated, or is the function an operation? Does send(key)"
                " pass the key on?"
            )
        if self._keys().exists() and not any(place.of_key for place in run.places):
            raise CannotProve(
                "The request runs in another thread or process, where the kit sees no statement."
                " Call it in this thread: async code with asgiref.sync.async_to_sync."
            )

    def _run_undisturbed(self) -> None:
        """Run the request twice, and keep the second run. Values that differ are random. The result
        of the first run is the expected result of all other runs."""
        places_of_effects: list[str] = []

        def note_effects(run: Run, place: Place) -> None:
            known = len(places_of_effects) + len(self._first_effects)
            if isinstance(self._effects, list) and len(self._effects) > known:
                places_of_effects.append(f"between {run.places[-2].line} and {place.line}")

        found: list[Leaves] = []
        for _ in range(2):
            key, run = self._fresh(), Run(note_effects if not found else lambda run, place: None)
            with observed(run):
                answer = self._ask(key)
                run.reach("before", "response")
            self._note(run)
            self._refuse(answer, run)
            found.append(self._left(answer))
            self._answer, again = answer, self._ask(key, again=True)
            self._compare_replay(answer, again)
        if missing := found[0].keys() ^ found[1].keys():
            raise CannotProve(
                f"Two undisturbed requests leave different data: {' / '.join(min(missing))}."
                " Exclude it with ignore=[...], or pass state=, a function that returns the data"
                " to compare."
            )
        self._expected, self._random = found[0], random_paths(*found)
        self.is_of_operation = {METHOD} == {*self._keys().values_list("request_method", flat=True)}
        begins = ("downstream call", "before")
        calls = {place.line for place in run.places if (place.what, place.when) == begins}
        self._effect_lines = places_of_effects or sorted(calls)
        self._undisturbed = run
