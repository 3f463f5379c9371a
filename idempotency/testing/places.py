"""The places of a request where its process can die, and the line of the user's code at each
place."""

import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal

import django.test.client

import idempotency
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
_LONGEST_DETAIL = 100


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
        claim = (
            self.when == "after"
            and self.what == "statement"
            and self.of_key
            and not self.in_transaction
        )
        return self.number == 1 or self.what != "statement" or claim

    def __str__(self) -> str:
        what = self.what if self.what == "COMMIT" else f"{self.what} {self.detail}"
        return f"{self.when} {what}\n     at {self.line}"


def shortened(text: str) -> str:
    """Return ``text`` on one line, cut to _LONGEST_DETAIL characters."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_DETAIL else line[: _LONGEST_DETAIL - 3] + "..."


def users_line() -> str:
    """Return the innermost line of the user's code on the call stack (of a view or of a function
    that it calls), and the line that called it."""
    frame: FrameType | None = sys._getframe(1)
    found: list[str] = []
    while (
        frame is not None
        and len(found) < 2
        and not (found and frame.f_code.co_filename == django.test.client.__file__)
    ):
        if line := _line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name):
            found.append(line)
        frame = frame.f_back
    return ", called at ".join(found) or "an unknown line"


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback of an exception."""
    found, traceback = "an unknown line", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        found = _line_of(code.co_filename, traceback.tb_lineno, code.co_name) or found
        traceback = traceback.tb_next
    return found


def _line_of(filename: str, number: int, function: str) -> str:
    name = _users_file(filename)
    return f"{name}:{number} in {function}" if name else ""


@cache
def _users_file(filename: str) -> str:
    """Return the path of a file of the user's code, relative to the current folder if the file is
    inside that folder. For any other file, return an empty string."""
    path = Path(filename)
    if filename.startswith("<") or str(path.resolve()).startswith(_LIBRARIES):
        return ""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
