"""The tiers of the suite: each test belongs to one tier, and a skip without an allowed reason fails
the run.

``make test`` runs tests without the marks ``processes`` and ``full``; ``make test-processes`` runs
the mark ``processes``; ``make test-all`` runs everything. ``sample`` marks the tests of
``processes`` that ``.ci/run`` runs too.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest

#: The allowed reasons of skips. A skip for any other reason fails the run.
ALLOWED_SKIPS = (
    r"needs PostgreSQL( 17)?$",
    r"needs SQLite$",
    r"a pooler (chooses|keeps) ",
    r"it sets what belongs to a session$",
    r"statements prepared by an earlier test have no text$",
    r"the pool has connections to the old address$",
    r"each statement is a (round trip|message)$",
    r"psycopg prepares the statements$",
    r"make (package|lint) installs ",
    r"There is no Python 3\.13",
    r"a form is sent by POST, ",
    r"the fields of a form have an order, ",
    r"it has the key in the field of a form already$",
    r"needs root, to mount a small disk$",
    r"may not mount$",
    r"the server has no unix socket here$",
    r"the server is not the tests' own$",
    r"There is no (chromium|pgbouncer|npm|rabbitmq-server|erlang-base)",
    r"(chromium|pgbouncer|rabbitmq-server) could not be installed",
    r"PgBouncer \d+\.\d+ keeps no prepared statements",
    r"(npm|pip) could not fetch ",
    r"apt-get installed ",
)


def skips_not_allowed(terminalreporter: Any) -> list[str]:
    """Return a line for each skip whose reason is not in ALLOWED_SKIPS."""
    lines = []
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not any(re.match(allowed, reason) for allowed in ALLOWED_SKIPS):
            lines.append(f"{report.nodeid}: {reason}")
    return lines


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> Any:
    """Print the skips that are not allowed. Add them and the failed tests to the file FAILED_TESTS,
    which make prints at its end."""
    result = yield
    if lines := skips_not_allowed(terminalreporter):
        terminalreporter.section("skips that tests/kit/tiers.py does not allow", red=True)
        for line in lines:
            terminalreporter.write_line(line)
    path = os.environ.get("FAILED_TESTS")
    if path and not hasattr(config, "workerinput"):
        stats = terminalreporter.stats
        failed = [f"failed: {x.nodeid}" for x in stats.get("failed", []) + stats.get("error", [])]
        with Path(path).open("a") as file:
            file.writelines(f"{line}\n" for line in [*failed, *lines])
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a skip is not allowed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        reporter is not None
        and session.exitstatus == pytest.ExitCode.OK
        and skips_not_allowed(reporter)
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
