"""Says at the end how many examples there were."""

import pytest

from tests.fuzz.examples import seen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for test, number in seen.items():
        terminalreporter.write_line(f"{number:7,} {test}")
    if seen:
        terminalreporter.write_line(f"{sum(seen.values()):7,} examples")
