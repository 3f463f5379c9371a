"""Wait for a state instead of a fixed time."""

import ast
import inspect
import linecache
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")


def eventually(condition: Callable[[], Found], seconds: float = 30) -> Found:
    """Return the result of ``condition`` as soon as it is true.

    Raises AssertionError if it is not true within ``seconds``; the message has the source of the
    condition and its last value.
    """
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"Not true within {seconds} seconds: {_said(condition)}\nThe last value was"
                f" {found!r}."
            )
        pause.wait(0.02)
    return found


def _said(condition: Callable[..., Any]) -> str:
    """Return the source of a condition: the source of a lambda, or the name of a function with its
    arguments."""
    if isinstance(condition, partial):
        given = [
            *map(repr, condition.args),
            *(f"{name}={value!r}" for name, value in condition.keywords.items()),
        ]
        return f"{_said(condition.func)}({', '.join(given)})"
    code = getattr(inspect.unwrap(condition), "__code__", None)
    if code is None:
        return repr(condition)
    place = f"({Path(code.co_filename).name}:{code.co_firstlineno})"
    if code.co_name != "<lambda>":
        return f"{condition.__qualname__} {place}"
    return f"{_source_of_lambda(code)} {place}"


def _source_of_lambda(code: Any) -> str:
    lines = linecache.getlines(code.co_filename)
    source = "".join(lines)
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno
    ]
    if len(found) == 1:
        return " ".join((ast.get_source_segment(source, found[0]) or "").split())
    return lines[code.co_firstlineno - 1].strip()
