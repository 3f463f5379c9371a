"""The steps of a page of the docs, and a project in an empty folder in which a test carries them out as they are printed."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Variables of the tests that a reader does not have.
OURS = ("DJANGO_", "DATABASE_URL", "REDIS_URL", "RIDES_", "PG", "PYTHON", "COV", "VIRTUAL_ENV", "PYTEST")
#: The sentence before a block, which says where the block belongs.
LEAD = re.compile(r"(Write|Write over|Add to the end of|Change) `([\w./]+)`:$")
SECONDS = re.compile(r"\b\d+\.\d+s\b")


@dataclass(frozen=True)
class Write:
    """A file that the reader writes, or adds to."""

    path: str
    content: str
    at_the_end: bool


@dataclass(frozen=True)
class Change:
    """A file that the reader changes: for each place the old lines and the new ones."""

    path: str
    hunks: list[tuple[str, str]]


@dataclass(frozen=True)
class Command:
    """A command that the reader enters, and the output until the next command."""

    line: str
    output: list[str]


@dataclass(frozen=True)
class Look:
    """What the reader sees in the admin."""

    lines: list[str]


Step = Write | Change | Command | Look


def steps(page: str) -> Iterator[Step]:
    """Yield the steps of a page, in its order. A block of code must follow a sentence that names its file."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S):
        language, block = found[1], found[2]
        if language in ("python", "html", "diff"):
            told = LEAD.search(page[: found.start()].rstrip())
            assert told, f"the page does not say where this belongs:\n{block}"
            assert (told[1] == "Change") == (language == "diff"), f"{told[0]} stands before a block of {language}"
            yield Change(told[2], hunks(block)) if language == "diff" else Write(told[2], block, told[1].startswith("Add"))
        elif language == "text":
            yield Look(block.splitlines())
        else:
            assert language in ("console", "shell"), language
            for line, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
                yield Command(line, output.splitlines())


def hunks(diff: str) -> list[tuple[str, str]]:
    """Return the old and the new lines of each place, which ``@@`` divides."""
    return [
        tuple("".join(f"{line[1:]}\n" for line in place.splitlines() if not line.startswith(other)) for other in "+-")
        for place in re.split(r"^@@.*\n", diff, flags=re.M)
    ]


def changed_lines(page: str) -> int:
    """Return how many lines the diffs of a page, or of a part of one, add and remove, as ``git diff --stat`` counts."""
    diffs = re.findall(r"^```diff\n(.*?)^```$", page, re.M | re.S)
    return sum(line.startswith(("+", "-")) for diff in diffs for line in diff.splitlines())


class Project:
    """A folder that is empty at first, in which a reader has Django and the app of the checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        binaries = f"{Path(sys.executable).parent}:{found['PATH']}"
        self.environment = {**found, "PATH": binaries, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def follow(self, page: str, leave_out: str = "pip install") -> None:
        """Carry out the steps of a page, or of a part of one. A command that fails, or prints something else, fails.

        ``leave_out`` is a part of commands that are not entered, besides those of pip.
        """
        for step in steps(page):
            match step:
                case Write():
                    self.write(step)
                case Change(path, places):
                    self.change(path, places)
                case Command(line, output) if "pip install" not in line and leave_out not in line:
                    printed = SECONDS.sub("…", self.run(line)).splitlines()
                    assert printed == [SECONDS.sub("…", said) for said in output], f"$ {line}"

    def write(self, step: Write) -> None:
        """Write a file, or add to its end."""
        file = self.folder / step.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((file.read_text() if step.at_the_end else "") + step.content)

    def change(self, path: str, places: list[tuple[str, str]]) -> None:
        """Replace the old lines of each place by the new ones."""
        content = (self.folder / path).read_text()
        for old, new in places:
            assert content.count(old) == 1, f"{path} has {content.count(old)} times:\n{old}"
            content = content.replace(old, new)
        (self.folder / path).write_text(content)

    def run(self, line: str) -> str:
        """Run a command of the shell to its end, and return its output, errors included."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"$ {line}\n{done.stdout}"
        return done.stdout
