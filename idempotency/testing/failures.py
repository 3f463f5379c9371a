"""Failures: the cause, the line of code and the cure of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from django.apps import apps
from django.db import IntegrityError

from idempotency._text import summary
from idempotency.models import IdempotencyKey
from idempotency.testing import cures
from idempotency.testing.answers import Answer
from idempotency.testing.comparing import GONE, Difference
from idempotency.testing.downstream import living, refusals
from idempotency.testing.observing import Run
from idempotency.testing.places import Place, line_of_error

_WRITES = ("INSERT", "UPDATE", "DELETE")
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Failure:
    """A course of events whose result differs from that of an undisturbed request, with its cause
    and cure."""

    course: str
    cause: str
    cure: str
    differences: tuple[Difference, ...]

    def of_operation(self) -> Self:
        """Return the failure with the cure for an operation."""
        return replace(self, cure=cures.OF_OPERATIONS.get(self.cure, self.cure))

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
        or (_of_answer(undisturbed), cures.OTHER_ANSWER)
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
    return Failure(course, cause, cures.CALL_IN_TRANSACTION, ())


def interfering(course: str, differences: Sequence[Difference], undisturbed: Run) -> Failure:
    """Return the failure of two requests with different keys that leave other data than consecutive
    requests."""
    writes = _writes(_labels(differences), undisturbed)
    lines = sorted({place.line for place in writes if not _is_own(place)})
    cause = (
        "Two concurrent requests leave other data than two consecutive requests. One of them uses "
        f"data that it has read before the COMMIT of the other one: {_joined(lines)}."
    )
    return Failure(course, cause, cures.LOST_UPDATE, tuple(differences))


def not_completed(course: str, last_error: str) -> Failure:
    """Return the failure of a request that the completer cannot finish. It is a failure because the
    client may never retry."""
    cause = f"No run of the completer finished the request. The last error: {summary(last_error)}"
    return Failure(course, cause, cures.NOT_REBUILT, ())


def _of_refusals() -> tuple[str, str] | None:
    return next(((sentence, cures.OTHER_ARGUMENTS) for sentence in refusals()), None)


def _of_effects(
    differences: Sequence[Difference], derived: set[str], effects: Sequence[str]
) -> tuple[str, str] | None:
    here = [difference for difference in differences if difference.path[0] == "effects"]
    if not here:
        return None
    if not any(difference.expected == GONE for difference in here):
        return (
            f"An effect in a downstream service is missing or changed: {_joined(effects)}.",
            cures.LOST,
        )
    for fake in living():
        keys = [key for key, _ in fake.origins]
        if len(keys) < 2 or not any(difference.path[1] == fake.name for difference in here):
            continue
        lines = _joined(sorted({line for _, line in fake.origins}))
        if None in keys:
            return (
                f"{fake.name} was called {len(keys)} times without an idempotency key, at {lines}.",
                cures.UNSAFE_CALL,
            )
        if not derived.issuperset(map(str, keys)):
            cause = (
                f"{fake.name} got a different key in each run, and some of these keys come"
                " from no call of the run"
            )
            return f"{cause}, at {lines}.", cures.RANDOM_KEY
        return f"{fake.name} was called under several derived keys, at {lines}.", cures.RANDOM_KEY
    return f"A call to a downstream service was made again: {_joined(effects)}.", cures.UNSAFE_CALL


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
            return (
                f"{place.line} writes outside of the transactions of the run: {place.detail}",
                cures.OUTSIDE,
            )
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
                return f"{cause}: {place.detail}", cures.NO_RECOVERY_POINT
    if answer.error is not None and not again:
        return None
    lines = _joined(sorted({place.line for place in writes if not _is_own(place)}))
    if rows and all(difference.found == GONE for difference in rows):
        return f"Rows that the undisturbed request writes are missing: {lines}.", cures.LOST
    return (
        f"More than one run wrote these rows, or the runs wrote different values: {lines}.",
        cures.WRITTEN_AGAIN,
    )


def _of_failure(answer: Answer, differences: Sequence[Difference]) -> tuple[str, str] | None:
    if answer.error is not None:
        raised, line = type(answer.error).__name__, line_of_error(answer.error)
        return f"The retry raised {raised} at {line}: {answer.error}", cures.GONE_WITH_THE_RUN
    if any(difference.path == ("answer", "status") for difference in differences):
        last = f"{answer.status} {str(answer.body())[:300]}"
        cause = f"The retries never came to the end: the last answer was {last}"
        return cause, cures.FOR_A_PERSON
    return None


def _labels(differences: Sequence[Difference]) -> set[str]:
    """Return the models whose rows differ, except keys."""
    paths = {difference.path[0] for difference in differences}
    labels = {path.removeprefix("rows of ") for path in paths if path.startswith("rows of ")}
    return labels - {IdempotencyKey._meta.label}


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


def _of_answer(run: Run) -> str:
    stored = [place.line for place in run.places if "recovery_point = 'finished'" in place.detail]
    line = stored[-1] if stored else "the end of the view"
    return f"The answer depends on the run that gives it; it is stored at {line}."


def _joined(lines: Sequence[str]) -> str:
    return ", ".join(lines) or "no line of yours is known"
