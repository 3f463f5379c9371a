"""A plugin of pytest for ``make conformance``: it runs the tests that bear numbers, and says of
each number whether it holds. The rules of operations have the numbers O01, O02 and so on.

A number holds when it has tests that passed, and none that did not. A case that a kind of view
cannot have is skipped, and does not count; one that is skipped for want of PostgreSQL did not pass.
Number 41 is the table of frameworks as a whole. What a test hands to ``record_property("counts",
...)`` is printed as it is.

PYTEST_DONT_REWRITE: it is imported before pytest.
"""

import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.conformance.titles import LABELS

FRAMEWORKS, EVERY_KIND_OF_VIEW = "tests/frameworks/", "41"
#: What is in these is run without a number too.
FOLDERS = ("tests/conformance/", FRAMEWORKS, "tests/outside/")
#: Why tests are skipped on another database.
NO_POSTGRESQL = "needs PostgreSQL"
#: Proved by suites of others, with counts of their own.
OUTSIDE = {"43": "stripe", "44": "idemkit", "45": "schemathesis"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not about the contract."""
    kept = [
        item for item in items if item.nodeid.startswith(FOLDERS) or list(_numbers(item.nodeid))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _numbers(test: str) -> Iterator[str]:
    if found := re.search(r"::test_(o?\d\d)_", test):
        yield found.group(1).upper()
    if test.startswith(FRAMEWORKS):
        yield EVERY_KIND_OF_VIEW


class Report:
    """What became of each number."""

    def __init__(self) -> None:
        self.passed: dict[str, int] = defaultdict(int)
        self.not_passed: dict[str, list[str]] = defaultdict(list)
        self.counts: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how one step of a test ended."""
        for number in _numbers(report.nodeid):
            if (
                hasattr(report, "wasxfail")
                or report.failed
                or (report.skipped and NO_POSTGRESQL in str(report.longrepr))
            ):
                self.not_passed[number].append(report.nodeid)
            elif report.when == "call" and report.passed:
                self.passed[number] += 1
            if report.when == "call":
                self.counts[number] += [
                    str(value) for name, value in report.user_properties if name == "counts"
                ]

    def holds(self, number: str) -> bool:
        """Whether tests of the number passed, and none did not."""
        return bool(self.passed[number]) and not self.not_passed[number]

    def failed(self) -> int:
        """Return how many numbers do not hold."""
        return sum(not self.holds(number) for number in LABELS)

    def lines(self) -> Iterator[str]:
        """Return a line for each number, then the counts of the outside suites."""
        for number, title in LABELS.items():
            verdict = (
                "pass"
                if self.holds(number)
                else "fail"
                if self.not_passed[number]
                else "fail (no test)"
            )
            yield f"{number} {verdict} {title}"
        for number, suite in OUTSIDE.items():
            yield from self.counts[number] or [
                f"{suite}: no counts; {self.passed[number]} tests passed"
            ]
