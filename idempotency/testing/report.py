"""The results of the kit: the failures of a request, the reason why nothing can be proved, and the
report of the courses."""

from dataclasses import dataclass, field

from idempotency.testing.failures import Failure
from idempotency.testing.places import Place


class DoesNotSurvive(AssertionError):
    """The result of a course of events differs from that of an undisturbed request. ``failures``
    contains the differences, their places and causes."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = failures
        groups: dict[tuple[str, str], list[Failure]] = {}
        for failure in failures:
            groups.setdefault((failure.cause, failure.cure), []).append(failure)
        parts = []
        for number, same in enumerate(groups.values(), 1):
            text = f"\n   The same in {len(same) - 1} other courses of events."
            more = text if len(same) > 1 else ""
            parts.append(f"{number}. {same[0]}{more}")
        super().__init__("\n".join(["The request does not survive.", *parts]))


class CannotProve(AssertionError):
    """The kit cannot compare the results of the request. The message names the required change."""


@dataclass
class Report:
    """The places of the undisturbed request, the number of courses of events, how many of them
    ended with a key for manual review, and the skipped ones with the reason."""

    places: list[Place] = field(default_factory=list)
    courses: int = 0
    handed_over: int = 0
    skipped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = (
            f"{len(self.places)} places, {self.courses} courses of events, {self.handed_over} keys"
            " for manual review"
        )
        return "; ".join([text, *self.skipped])
