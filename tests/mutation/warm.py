"""Runs tests against one mutant after the other, each in a fork of a pytest that has collected all of them.

Most mutants differ from the code in the body of one function: the fork gives the function that body, wherever it is held. The
others are written into the copy of the project, and meet a pytest of their own (``tests.mutation.stand``).

Reads one job a line from its standard input, and answers each with one line: a test that failed, "" if none did, null when
time was up.
"""

import gc
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest
from _pytest.runner import runtestprotocol

_FUNCTION_FLAGS = 3  # CO_OPTIMIZED | CO_NEWLOCALS; the body of a class has neither


def functions(code: CodeType) -> dict[str, CodeType]:
    """Return the functions and methods of a compiled module by their names; those within functions belong to these."""
    found: dict[str, CodeType] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= {inner.co_qualname: inner} if inner.co_flags & _FUNCTION_FLAGS == _FUNCTION_FLAGS else functions(inner)
    return found


def signature(code: CodeType, *, functions_too: bool = True) -> Any:
    """Return what the code does, line numbers left out."""
    return (
        *(code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags),
        *(
            signature(inner, functions_too=functions_too)
            if functions_too or inner.co_flags & _FUNCTION_FLAGS != _FUNCTION_FLAGS
            else inner.co_name
            for inner in code.co_consts
            if isinstance(inner, CodeType)
        ),
        *(repr(inner) for inner in code.co_consts if not isinstance(inner, CodeType)),
    )


def changed_function(text: str, changed: str) -> str | None:
    """Return the name of the one function whose body differs, None if more than that does."""
    before, after = (compile(source, "mutant", "exec", dont_inherit=True) for source in (text, changed))
    if signature(before, functions_too=False) != signature(after, functions_too=False):
        return None
    old, new = functions(before), functions(after)
    different = [name for name in old if signature(old[name]) != signature(new[name])]
    return different[0] if len(different) == 1 else None


def _swap(module: str, text: str, name: str) -> None:
    """Give each function that is called ``name`` in the module the body that it has in ``text``."""
    path = str(Path(module).resolve())
    new = functions(compile(text, path, "exec", dont_inherit=True))[name]
    swapped = 0
    for candidate in gc.get_objects():
        if not isinstance(candidate, FunctionType):
            continue
        if candidate.__code__.co_filename == path and candidate.__code__.co_qualname == name:
            candidate.__code__ = new
            swapped += 1
    assert swapped, f"{name} of {module} is held by nobody"


class Server:
    """The plugin that takes the place of pytest's loop over the tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Do job after job."""
        items = {item.nodeid: item for item in session.items}
        for line in sys.stdin:
            os.write(ANSWERS, json.dumps(_answer(json.loads(line), items)).encode() + b"\n")
        os._exit(0)


def _answer(job: dict[str, Any], items: dict[str, pytest.Item]) -> str | None:
    result = Path(job["result"])
    result.write_text('"the process ended"')
    child = os.fork()
    if not child:
        try:
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(job["seconds"])
            result.write_text(json.dumps(_run(job, items)))
        except BaseException:
            result.write_text(json.dumps("".join(traceback.format_exc())))
        finally:
            os._exit(0)
    _, how = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests have started
    if os.WIFSIGNALED(how) and os.WTERMSIG(how) == signal.SIGALRM:
        return None
    answer: str = json.loads(result.read_text())
    return answer


def _run(job: dict[str, Any], items: dict[str, pytest.Item]) -> str:
    """Run the tests in this fork until one fails, and return its name."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if job["covering"]:
        return _cover(
            [item for item in items.values() if item.nodeid.partition("::")[0] in job["tests"]], Path(job["covering"])
        )
    _adopt_database()
    if job["function"]:
        _swap(job["module"], job["text"], job["function"])
    chosen = [items[name] for name in job["tests"]]
    for item, following in zip(chosen, [*chosen[1:], None], strict=True):
        if _fails(item, following):
            return item.nodeid
    return ""


def _fails(item: pytest.Item, following: pytest.Item | None) -> bool:
    reports = runtestprotocol(item, nextitem=following, log=False)
    for report in reports:
        if report.failed:
            print(report.longreprtext[-3000:])  # noqa: T201 - what pytest would say
    return any(report.failed for report in reports)


def _cover(items: list[pytest.Item], output: Path) -> str:
    """Run all tests, and write down which of them ran which line of the app, how long each took, and which failed."""
    measure = coverage.Coverage(data_file=None, config_file=False, source=["idempotency"])
    seconds: dict[str, float] = {}
    failed: list[str] = []
    measure.start()
    for item, following in zip(items, [*items[1:], None], strict=True):
        measure.switch_context(item.nodeid)
        began = time.monotonic()
        if _fails(item, following):
            failed.append(item.nodeid)
        else:
            seconds[item.nodeid] = time.monotonic() - began
        measure.switch_context("")
    measure.stop()
    data = measure.get_data()
    lines: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for file in data.measured_files():
        for line, tests in data.contexts_by_lineno(file).items():
            lines[os.path.relpath(file)][line] = [test for test in tests if test in seconds]
    output.write_text(json.dumps({"lines": lines, "seconds": seconds, "failed": failed}))
    return ""


def _adopt_database() -> None:
    """Let a run take the test database as the last one left it: emptied. To look for migrations takes a second."""
    from django.conf import settings
    from django.db.backends.base.creation import BaseDatabaseCreation

    def adopt(self: BaseDatabaseCreation, *_: Any, **__: Any) -> str:
        name = self._get_test_db_name()
        self.connection.close()
        self.connection.settings_dict["NAME"] = settings.DATABASES[self.connection.alias]["NAME"] = name
        return name

    BaseDatabaseCreation.create_test_db = adopt


def keep_database(name: str) -> None:
    """Keep a test database of SQLite as it is now, or take it back if it is kept already."""
    kept = Path(f"{name}.kept")
    shutil.copy(*((kept, name) if kept.exists() else (name, kept)))


if __name__ == "__main__":
    # Answers go to where standard output was; what the tests print goes to standard error.
    ANSWERS = os.dup(1)
    os.dup2(2, 1)
    quiet = ("-q", "-s", "--reuse-db", "--no-header", "--disable-warnings", "-p", "no:cacheprovider")
    sys.exit(pytest.main([*quiet, *sys.argv[1:]], plugins=[Server()]))
