"""Each case over each kind of view, and the table at the end of the run."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from pytest_django import Settings

from tests.frameworks.kinds import FAMILIES, KINDS, Kind
from tests.frameworks.service import Service

PLAIN, PHASED = False, True
CASE, KIND = "case of the table", "kind of view"


@pytest.fixture
def service(
    kind: Kind, phased: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Service:
    """Return a project with one kind of view."""
    return Service(kind, phased, settings, monkeypatch)


def pytest_configure(config: pytest.Config) -> None:
    """Declare what a case says of itself."""
    config.addinivalue_line(
        "markers",
        "styles(*phased): whether the views of the case are plain, phased, or both in turn",
    )
    config.addinivalue_line(
        "markers", "not_for(kinds, reason): kinds of view to which the case does not apply"
    )
    config.addinivalue_line(
        "markers",
        "adapter: a case that depends on how a framework calls its views: it runs on all kinds",
    )
    config.addinivalue_line(
        "markers", "inside_testcase: the case runs in the transaction of a TestCase"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a case for each kind of view, plain and phased as it says."""
    if "service" not in metafunc.fixturenames:
        return
    markers = {marker.name: marker for marker in metafunc.definition.iter_markers()}
    excepted = markers.get("not_for")
    parameters = []
    for kind in KINDS:
        # How a framework calls its views does not depend on the database.
        on_all = "adapter" in markers and connection.vendor == "postgresql"
        of_tier = [] if kind.name in FAMILIES or on_all else [pytest.mark.full]
        for phased in markers["styles"].args:
            marks = (
                [pytest.mark.skip(reason=excepted.args[1])]
                if excepted and excepted.args[0](kind)
                else []
            )
            name = f"{kind}-{'phased' if phased else 'plain'}"
            parameters.append(pytest.param(kind, phased, id=name, marks=[*marks, *of_tier]))
    metafunc.parametrize(("kind", "phased"), parameters)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a case real transactions, or those of a TestCase, and let its report say where it stands
    in the table."""
    if isinstance(item, pytest.Function) and "service" in item.fixturenames:
        item.add_marker(
            pytest.mark.django_db(transaction=not item.get_closest_marker("inside_testcase"))
        )
        # Of all that an item knows, this reaches the summary even from another process of
        # pytest-xdist.
        title = item.originalname.removeprefix("test_").replace("_", " ")
        item.user_properties += [(CASE, title), (KIND, item.callspec.params["kind"].name)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print cases by kinds: ``ok``, ``FAILED``, or ``-`` where a case does not apply."""
    table: dict[str, dict[str, str]] = {}
    for outcome, cell in (
        ("passed", "ok"),
        ("skipped", "-"),
        ("error", "FAILED"),
        ("failed", "FAILED"),
    ):
        for report in terminalreporter.stats.get(outcome, []):
            properties = dict(getattr(report, "user_properties", []))
            if CASE in properties and (report.when == "call" or outcome != "passed"):
                table.setdefault(properties[CASE], {})[properties[KIND]] = cell
    if table:
        _write(table, terminalreporter.write_line)


def _write(table: dict[str, dict[str, str]], write: Callable[[str], None]) -> None:
    names = [kind.name for kind in KINDS]
    write("")
    write("kinds of view: " + "; ".join(f"{number} {name}" for number, name in enumerate(names, 1)))
    width = max(map(len, table))
    write(
        f"{'case':{width}} "
        + "".join(f"{number:^7}" for number in range(1, len(names) + 1)).rstrip()
    )
    for case in sorted(table):
        write(
            f"{case:{width}} "
            + "".join(f"{table[case].get(name, ''):^7}" for name in names).rstrip()
        )
    failed = sum(cell == "FAILED" for row in table.values() for cell in row.values())
    seen = {name for row in table.values() for name in row}
    write(
        f"frameworks: {len(table)} cases x {len(seen)} kinds of view: "
        + (f"FAILED {failed}" if failed else "ok")
    )
