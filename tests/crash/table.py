"""Print the table: each planted bug with what caught it, each correct view with what it bore.

``python -m tests.crash.table``
"""

import sys
from pathlib import Path

import pytest


class Table:
    """A plugin of pytest that prints the lines which the tests have put into their reports."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a line of the table."""
        if report.failed:
            self.lines.append((f"FAILED: {report.nodeid.rpartition('::')[2]}", "see above"))
        elif report.when == "call":
            self.lines += [value for name, value in report.user_properties if name == "crash kit"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        width = max((len(tried) for tried, _ in self.lines), default=0)
        terminalreporter.section("what the crash kit was tried on")
        for tried, result in sorted(self.lines):
            terminalreporter.line(f"{tried:<{width}}  {result}")


if __name__ == "__main__":
    sys.exit(
        pytest.main(
            ["-q", "--no-header", str(Path(__file__).parent), *sys.argv[1:]], plugins=[Table()]
        )
    )
