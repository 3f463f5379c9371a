"""Run tests against one mutant after another, each in a fork of a pytest that has collected all
tests.

Most mutants differ from the code in the body of one function. The fork replaces the code of this
function object, so that all references use it. Other mutants are written into the copy of the
project, and are tested by a new pytest (``tests.mutation.stand``).

The script reads one job per line from standard input, and writes one line for each: the names of
the tests ("list"), which test runs which line ("cover"), or which test failed first ("test").
"""

import gc
import json
import os
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

#: All functions that exist after the collection of the tests, by file.
FUNCTIONS: dict[str, list[FunctionType]] = defaultdict(list)
_FUNCTION_FLAGS = 3  # CO_OPTIMIZED | CO_NEWLOCALS; the body of a class has neither


def functions(code: CodeType) -> dict[str, CodeType]:
    """Return the functions and methods of a compiled module by name; inner functions belong to the
    outer function."""
    found: dict[str, CodeType] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= (
                {inner.co_qualname: inner}
                if inner.co_flags & _FUNCTION_FLAGS == _FUNCTION_FLAGS
                else functions(inner)
            )
    return found


def signature(code: CodeType, *, functions_too: bool = True) -> Any:
    """Return a value that identifies the behaviour of the code, without line numbers."""
    return (
        *(
            code.co_name,
            code.co_code,
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_flags,
        ),
        *(
            (
                signature(inner, functions_too=functions_too)
                if functions_too or inner.co_flags & _FUNCTION_FLAGS != _FUNCTION_FLAGS
                else inner.co_name
            )
            for inner in code.co_consts
            if isinstance(inner, CodeType)
        ),
        *(repr(inner) for inner in code.co_consts if not isinstance(inner, CodeType)),
    )


def changed_function(text: str, changed: str) -> str | None:
    """Return the name of the function if only its body differs, None otherwise."""
    before, after = (
        compile(source, "mutant", "exec", dont_inherit=True) for source in (text, changed)
    )
    if signature(before, functions_too=False) != signature(after, functions_too=False):
        return None
    old, new = functions(before), functions(after)
    different = [name for name in old if signature(old[name]) != signature(new[name])]
    return (
        different[0]
        if len(different) == 1 and _pairs(old[different[0]], new[different[0]])
        else None
    )


def _pairs(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]]:
    """Return a function and its inner functions, each with its replacement; an empty list if a
    replacement is impossible."""
    inner, others = (
        [const for const in code.co_consts if isinstance(const, CodeType)] for code in (old, new)
    )
    if old.co_freevars != new.co_freevars or [code.co_name for code in inner] != [
        code.co_name for code in others
    ]:
        return []
    below = [_pairs(*pair) for pair in zip(inner, others, strict=True)]
    return [(old, new), *(pair for pairs in below for pair in pairs)] if all(below) else []


def _swap(module: str, text: str, name: str) -> bool:
    """Give each function object of the function ``name``, and of its inner functions, the code from
    ``text``.

    Return whether there is such an object.
    """
    path = str(Path(module).resolve())
    old, new = (
        functions(compile(source, path, "exec", dont_inherit=True))[name]
        for source in (Path(module).read_text(), text)
    )
    # Name and first line identify a function, because two inner functions may have the same name.
    bodies = {
        (before.co_qualname, before.co_firstlineno): after for before, after in _pairs(old, new)
    }
    held = [function for function in FUNCTIONS[path] if _place(function) in bodies]
    for function in held:
        function.__code__ = bodies[_place(function)]
    return bool(held)


def _place(function: FunctionType) -> tuple[str, int]:
    return function.__code__.co_qualname, function.__code__.co_firstlineno


class Server:
    """The plugin that replaces pytest's loop over the tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run one job after another."""
        items = {item.nodeid: item for item in session.items}
        for function in gc.get_objects():
            if isinstance(function, FunctionType):
                FUNCTIONS[function.__code__.co_filename].append(function)
        gc.freeze()  # Otherwise garbage collection copies the shared memory in each fork.
        for line in sys.stdin:
            job = json.loads(line)
            answer = sorted(items) if job["do"] == "list" else _answer(job, items)
            os.write(ANSWERS, json.dumps(answer).encode() + b"\n")
        os._exit(0)


def _answer(job: dict[str, Any], items: dict[str, pytest.Item]) -> dict[str, Any]:
    """Run a job in a fork and return its result. If the fork died, the result names the test that
    ended it."""
    result = Path(job["result"])
    child = os.fork()
    if not child:
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            _write(result, outcome="ended", killer="")
            chosen = [items[name] for name in job["tests"]]
            if job["do"] == "cover":
                _write(result, **_cover(chosen, result, job))
            else:
                _adopt_database()
                if not job["function"] or _swap(job["module"], job["text"], job["function"]):
                    _run(chosen, result, job)
                else:
                    _write(result, outcome="not swapped", killer="")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    _, how = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that the tests started
    found: dict[str, Any] = json.loads(result.read_text())
    return (
        found | {"outcome": "endless"}
        if os.WIFSIGNALED(how) and os.WTERMSIG(how) == signal.SIGALRM
        else found
    )


def _write(result: Path, **found: Any) -> None:
    result.write_text(json.dumps(found))


def _run(chosen: list[pytest.Item], result: Path, job: dict[str, Any]) -> None:
    """Run tests until one fails."""
    for item, following in zip(chosen, [*chosen[1:], None], strict=True):
        _write(result, outcome="ended", killer=item.nodeid)
        signal.alarm(job["tests"][item.nodeid])
        if _outcome(item, following) == "failed":
            _write(result, outcome="killed", killer=item.nodeid)
            return
    _write(result, outcome="survived", killer="")


def _outcome(item: pytest.Item, following: pytest.Item | None) -> str:
    reports = runtestprotocol(item, nextitem=following, log=False)
    for report in reports:
        if report.failed:
            print(f"{item.nodeid}\n{report.longreprtext[-3000:]}")  # noqa: T201 - what pytest would say
    outcomes = {report.outcome for report in reports}
    return next((outcome for outcome in ("failed", "skipped") if outcome in outcomes), "passed")


def _cover(chosen: list[pytest.Item], result: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run all tests; return which test ran which line of the app, the seconds of each test, and the
    failed tests."""
    if job["adopt"]:
        _adopt_database()
    measure = coverage.Coverage(data_file=None, config_file=False, source=["idempotency"])
    seconds: dict[str, float] = {}
    failed: list[str] = []
    measure.start()
    for item, following in zip(chosen, [*chosen[1:], None], strict=True):
        _write(result, outcome="ended", killer=item.nodeid)
        signal.alarm(job["tests"][item.nodeid])
        measure.switch_context(item.nodeid)
        began = time.monotonic()
        match _outcome(item, following):
            case "passed":
                seconds[item.nodeid] = time.monotonic() - began
            case "failed":
                failed.append(item.nodeid)
        measure.switch_context("")
    signal.alarm(0)
    measure.stop()
    data = measure.get_data()
    lines: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for file in data.measured_files():
        for line, tests in data.contexts_by_lineno(file).items():
            lines[os.path.relpath(file)][line] = [test for test in tests if test in seconds]
    return {"outcome": "covered", "lines": lines, "seconds": seconds, "failed": failed}


def _adopt_database() -> None:
    """Let a run use the existing test database, which is empty. A check for migrations would take a
    second."""
    from django.conf import settings
    from django.db.backends.base.creation import BaseDatabaseCreation

    def adopt(self: BaseDatabaseCreation, *_: Any, **__: Any) -> str:
        name = self._get_test_db_name()
        self.connection.close()
        self.connection.settings_dict["NAME"] = settings.DATABASES[self.connection.alias][
            "NAME"
        ] = name
        return name

    BaseDatabaseCreation.create_test_db = adopt


if __name__ == "__main__":
    # The answers go to the former standard output; the output of the tests goes to standard error.
    ANSWERS = os.dup(1)
    os.dup2(2, 1)
    quiet = (
        "-q",
        "-s",
        "--reuse-db",
        "--no-header",
        "--disable-warnings",
        "-p",
        "no:cacheprovider",
    )
    sys.exit(pytest.main([*quiet, *sys.argv[1:]], plugins=[Server()]))
