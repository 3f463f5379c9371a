"""The places of a request where its process can die, and the line of the user's code at each
place."""

import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Literal

import django.test.client

import idempotency
from idempotency._text import cut
from idempotency.models import IdempotencyKey

When = Literal["before", "after"]
What = Literal["statement", "COMMIT", "downstream call", "response"]

KEYS = IdempotencyKey._meta.db_table
#: The folders without code of the user: this app, Django, the standard library and installed
#: packages.
_LIBRARIES = tuple(
    f"{Path(folder).resolve()}/"
    for folder in (
        Path(idempotency.__file__).parent,
        Path(django.__file__).parent,
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    )
)


@dataclass(frozen=True, slots=True)
class Place:
    """A place of one run, where the process can die or pause."""

    number: int
    when: When
    what: What
    #: The statement, or the downstream call.
    detail: str
    #: File, line and function of the user's code.
    line: str
    in_transaction: bool
    #: Whether it is a statement on the table of keys. Outside a transaction, such a statement is
    #: the claim.
    of_key: bool

    @property
    def boundary(self) -> bool:
        """Whether a phase or a downstream call begins or ends here, or the key was claimed. Two
        runs can be interleaved at these places."""
        is_claim = self.when == "after" and self.of_key and not self.in_transaction
        return self.number == 1 or self.what != "statement" or is_claim

    def __str__(self) -> str:
        what = self.what if self.what == "COMMIT" else f"{self.what} {self.detail}"
        return f"{self.when} {what}\n     at {self.line}"


def shortened(text: str) -> str:
    """Return ``text`` on one line, at most 100 characters long."""
    return cut(" ".join(text.split()), 100)


def users_line() -> str:
    """Return the innermost line of the user's code on the call stack (of a view or of a function
    that it calls), and the line that called it."""
    found: list[str] = []
    for frame, number in walk_stack(sys._getframe(1)):
        if len(found) == 2 or (found and frame.f_code.co_filename == django.test.client.__file__):
            break
        if line := _line_of(frame, number):
            found.append(line)
    return ", called at ".join(found) or "an unknown line"


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback of an exception."""
    lines = [_line_of(frame, number) for frame, number in walk_tb(error.__traceback__)]
    return next(filter(None, reversed(lines)), "an unknown line")


def _line_of(frame: FrameType, number: int) -> str:
    name = _users_file(frame.f_code.co_filename)
    return f"{name}:{number} in {frame.f_code.co_name}" if name else ""


@cache
def _users_file(filename: str) -> str:
    """Return the path of a file of the user's code, relative to the current folder if the file is
    inside that folder. For any other file, return an empty string."""
    path = Path(filename)
    if filename.startswith("<") or str(path.resolve()).startswith(_LIBRARIES):
        return ""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
