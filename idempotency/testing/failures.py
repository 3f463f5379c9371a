"""Failures: the cause, the line of code and the cure of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from django.apps import apps
from django.db import IntegrityError

from idempotency._text import summary
from idempotency.models import IdempotencyKey
from idempotency.testing.comparing import GONE, Answer, Difference
from idempotency.testing.downstream import living, refusals
from idempotency.testing.observing import Run
from idempotency.testing.places import Place, line_of_error

_WRITES = ("INSERT", "UPDATE", "DELETE")
_SHOWN = 4

OUTSIDE = (
    "Move this write into the atomic_phase that ends with the next recovery point, so that both"
    " commit together. In a plain view, remove the code that commits the write early."
)
NO_RECOVERY_POINT = (
    "End that phase with phase.set_recovery_point(NAME), declared in"
    " @idempotent(recovery_points=[...])."
)
WRITTEN_AGAIN = (
    "End the phase that writes it with phase.set_recovery_point(NAME). A run that begins at a later"
    " recovery point must skip this phase."
)
UNSAFE_CALL = (
    "If the downstream service supports idempotency keys, make the call in `with"
    " request.idempotency_key.call(NAME) as call:`, and pass call.key to the service. Otherwise add"
    " at_most_once=True: call(NAME, at_most_once=True) never makes the call twice. Both need a"
    " phased view: @idempotent(recovery_points=[...])."
)
CALL_IN_TRANSACTION = (
    f"Make the call between two phases. {UNSAFE_CALL} If the call changes nothing in that system, "
    'exclude its address with ignore=["HOST:PORT"].'
)
RANDOM_KEY = (
    "Pass call.key of `with request.idempotency_key.call(NAME) as call:`. It is the same in each"
    " run of this request, and different for every other request."
)
OTHER_ARGUMENTS = (
    "A service refuses a known key with other arguments. Compute each argument in a phase, store it"
    " in a row, and read it from that row before the call; or call with other arguments under"
    " another key, key.call(ANOTHER_NAME)."
)
LOST_UPDATE = (
    'Compute the value in the database, update(balance=F("balance") + 10), or lock each row with'
    " select_for_update() when you read it. Prevent double rows with a unique constraint. Or run"
    " the whole project at SERIALIZABLE. See docs/explanation/isolation.md."
)
LOST = (
    "Work after the last COMMIT, or in on_commit, is lost if the process dies. Do it before the"
    " phase that stores the response, or stage a job for it in that phase with stage_job()."
)
GONE_WITH_THE_RUN = (
    "Variables of an earlier run are gone. At each recovery point, read the data from the rows that"
    " earlier phases committed: Model.objects.get(idempotency_key=key)."
)
OTHER_ANSWER = (
    "Build the response from rows that the phases committed, read at the last recovery point; not"
    " from variables, counts or random values of the run that happens to answer."
)
NOT_REBUILT = (
    "The completer runs the stored request without middleware: it has no session, and only a few"
    " headers. Name each value that the view reads in @idempotent(keep=[...]), or set it in the"
    " function of IDEMPOTENCY['PREPARE_REQUEST']."
)
FOR_A_PERSON = (
    "The view must store a response, or refuse the request in the same way, in each later run."
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A course of events whose result differs from that of an undisturbed request, with its cause
    and cure."""

    course: str
    cause: str
    cure: str
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        shown = [f"   {difference}" for difference in self.differences[:_SHOWN]]
        if len(self.differences) > _SHOWN:
            shown.append(f"   and {len(self.differences) - _SHOWN} more differences")
        return "\n".join([self.course, *shown, f"   Cause: {self.cause}", f"   Cure: {self.cure}"])


def explained(
    course: str,
    differences: Sequence[Difference],
    answer: Answer,
    undisturbed: Run,
    derived: set[str],
    effects: Sequence[str],
) -> Failure:
    """Return the failure with the likeliest cause of the differences. ``effects`` has the lines at
    which the undisturbed run caused an effect in a downstream service."""
    cause, cure = (
        _of_refusals()
        or _of_effects(differences, derived, effects)
        or _of_rows(differences, answer, undisturbed)
        or _of_failure(answer, differences)
        or (
            (
                "The answer depends on the run that gives it; it is stored at"
                f" {_storing(undisturbed)}."
            ),
            OTHER_ANSWER,
        )
    )
    return Failure(course, cause, cure, tuple(differences))


def call_in_transaction(course: str, line: str) -> Failure:
    """Return the failure of a call inside a transaction.

    It is a failure even if each crash ends well, because the kit does not know all effects of the
    call.
    """
    cause = (
        f"{line} calls a downstream service inside a transaction. If the process dies before"
        " COMMIT, the rollback leaves no trace of the call, and a retry makes the call again."
    )
    return Failure(course, cause, CALL_IN_TRANSACTION, ())


def interfering(course: str, differences: Sequence[Difference], undisturbed: Run) -> Failure:
    """Return the failure of two requests with different keys that leave other data than consecutive
    requests."""
    writes = _writes(_labels(differences), undisturbed)
    lines = sorted({place.line for place in writes if not _is_own(place)})
    cause = (
        "Two concurrent requests leave other data than two consecutive requests. One of them uses "
        f"data that it has read before the COMMIT of the other one: {_joined(lines)}."
    )
    return Failure(course, cause, LOST_UPDATE, tuple(differences))


def not_completed(course: str, last_error: str) -> Failure:
    """Return the failure of a request that the completer cannot finish. It is a failure because the
    client may never retry."""
    cause = f"No run of the completer finished the request. The last error: {summary(last_error)}"
    return Failure(course, cause, NOT_REBUILT, ())


def _of_refusals() -> tuple[str, str] | None:
    return next(((sentence, OTHER_ARGUMENTS) for sentence in refusals()), None)


def _of_effects(
    differences: Sequence[Difference], derived: set[str], effects: Sequence[str]
) -> tuple[str, str] | None:
    here = [difference for difference in differences if difference.path[0] == "effects"]
    if not here:
        return None
    if not any(difference.expected == GONE for difference in here):
        return f"An effect in a downstream service is missing or changed: {_joined(effects)}.", LOST
    for fake in living():
        keys = [key for key, _ in fake.origins]
        if len(keys) < 2 or not any(difference.path[1] == fake.name for difference in here):
            continue
        lines = _joined(sorted({line for _, line in fake.origins}))
        if None in keys:
            return (
                f"{fake.name} was called {len(keys)} times without an idempotency key, at {lines}.",
                UNSAFE_CALL,
            )
        if not derived.issuperset(map(str, keys)):
            cause = (
                f"{fake.name} got a different key in each run, and not every key came from"
                " key.call() or key.derive()"
            )
            return f"{cause}, at {lines}.", RANDOM_KEY
        return f"{fake.name} was called under several derived keys, at {lines}.", RANDOM_KEY
    return f"A call to a downstream service was made again: {_joined(effects)}.", UNSAFE_CALL


def _of_rows(
    differences: Sequence[Difference], answer: Answer, undisturbed: Run
) -> tuple[str, str] | None:
    rows = [difference for difference in differences if difference.path[0].startswith("rows of ")]
    labels = _labels(differences)
    again = isinstance(answer.error, IntegrityError)
    if not labels and not again:
        return None
    writes = _writes(set() if again else labels, undisturbed)
    for place in writes:
        if not place.in_transaction and not _is_own(place):
            return f"{place.line} writes outside of any phase: {place.detail}", OUTSIDE
    for end in undisturbed.no_ops:
        begin = max(
            (
                p.number
                for p in undisturbed.places[: end - 1]
                if p.when == "before" and p.what == "COMMIT"
            ),
            default=0,
        )
        begin = max(
            (p.number for p in undisturbed.places[: begin - 1] if p.what == "COMMIT"), default=0
        )
        for place in writes:
            if begin < place.number <= end and not _is_own(place):
                cause = (
                    f"{place.line} writes in a phase that keeps the recovery point, so each run"
                    " repeats the write"
                )
                return f"{cause}: {place.detail}", NO_RECOVERY_POINT
    if answer.error is not None and not again:
        return None
    lines = _joined(sorted({place.line for place in writes if not _is_own(place)}))
    if rows and all(difference.found == GONE for difference in rows):
        return f"Rows that the undisturbed request writes are missing: {lines}.", LOST
    return (
        f"More than one run wrote these rows, or the runs wrote different values: {lines}.",
        WRITTEN_AGAIN,
    )


def _of_failure(answer: Answer, differences: Sequence[Difference]) -> tuple[str, str] | None:
    if answer.error is not None:
        return (
            (
                f"The retry raised {type(answer.error).__name__} at {line_of_error(answer.error)}:"
                f" {answer.error}"
            ),
            GONE_WITH_THE_RUN,
        )
    if any(difference.path == ("answer", "status") for difference in differences):
        return (
            (
                f"The retries never came to the end: the last answer was {answer.status}"
                f" {str(answer.body())[:300]}"
            ),
            FOR_A_PERSON,
        )
    return None


def _labels(differences: Sequence[Difference]) -> set[str]:
    """Return the models whose rows differ, except keys."""
    paths = {
        difference.path[0]
        for difference in differences
        if difference.path[0].startswith("rows of ")
    }
    return {path.removeprefix("rows of ") for path in paths} - {IdempotencyKey._meta.label}


def _writes(labels: set[str], undisturbed: Run) -> list[Place]:
    """Return the writes to the tables of these models; without models, all writes."""
    tables = {apps.get_model(label)._meta.db_table for label in labels}
    writes = [place for place in undisturbed.places if _is_write(place)]
    return [
        place for place in writes if not tables or any(table in place.detail for table in tables)
    ]


def _is_write(place: Place) -> bool:
    return (
        place.when == "before"
        and place.what == "statement"
        and place.detail.lstrip("( ").startswith(_WRITES)
    )


def _is_own(place: Place) -> bool:
    return (
        "idempotency_" in place.detail.split(" SET ")[0].split("(")[0]
        or "django_session" in place.detail
    )


def _storing(run: Run) -> str:
    stored = [place.line for place in run.places if "recovery_point = 'finished'" in place.detail]
    return stored[-1] if stored else "the end of the view"


def _joined(lines: Sequence[str]) -> str:
    return ", ".join(lines) or "no line of yours is known"
