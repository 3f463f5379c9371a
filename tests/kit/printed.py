"""The steps of a page of the docs, and a project in an empty folder in which a test executes these
steps."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "how-to"
#: Variables of the tests that a reader does not have.
OURS = (
    "DJANGO_",
    "DATABASE_URL",
    "REDIS_URL",
    "RIDES_",
    "PG",
    "PYTHON",
    "COV",
    "VIRTUAL_ENV",
    "PYTEST",
)
#: The sentence of a how-to guide that continues the project of another one.
CONTINUES = re.compile(r"Start\s+from\s+the\s+project\s+of\s+\[[^]]+\]\(([\w-]+\.md)\)")
#: The link of a how-to guide to the example project.
EXAMPLE = re.compile(
    r"\[the\s+example\s+project(,\s+without\s+its\s+model)?\]\(\.\./example-project\.md\)"
)
LEAD = re.compile(r"(Write|Write over|Add to the end of|Change) `([\w./-]+)`:$")
#: The mark of a block that is not part of the project.
SHOWN = re.compile(r"\(shown only\):$")
#: Commands that are executed only in an environment of the reader's own. The environment of the
#: tests has all packages.
INSTALLS = ("python3 -m venv", "pip install")
#: The command that ends the background processes of a page.
STOP = "kill $(jobs -p)"
#: While a background process runs, a command is repeated for this time until its output is as
#: expected.
PATIENCE_SECONDS = 60
#: The longest command installs packages.
COMMAND_SECONDS = 300
SECONDS = re.compile(r"\b\d+\.\d+s\b")


@dataclass(frozen=True)
class Write:
    """A file that the reader writes, or adds to."""

    path: str
    content: str
    at_the_end: bool


@dataclass(frozen=True)
class Change:
    """A file that the reader changes: the old and the new lines of each place."""

    path: str
    hunks: list[tuple[str, str]]


@dataclass(frozen=True)
class Command:
    """A command that the reader enters, and the output until the next command. The line ``...``
    replaces the first lines of a long output."""

    line: str
    output: list[str]


@dataclass(frozen=True)
class Look:
    """Lines that the admin shows to the reader."""

    lines: list[str]


Step = Write | Change | Command | Look


def included(page: str) -> str:
    """Return a how-to guide with the text of the guide that it continues, or of the example
    project."""
    page = CONTINUES.sub(lambda found: f"\n{(GUIDES / found[1]).read_text()}\n", page)
    return EXAMPLE.sub(_example, page, count=1)


def _example(found: re.Match[str]) -> str:
    text = (ROOT / "docs" / "example-project.md").read_text()
    return "\n" + (text.partition("## The model")[0] if found[1] else text) + "\n"


def before(page: str, start: int) -> str:
    """Return the text before a block, on one line."""
    return " ".join(page[max(0, start - 200) : start].split())


def lead(page: str, start: int) -> re.Match[str] | None:
    """Return the sentence before a block that names the file of the block, or None."""
    return LEAD.search(before(page, start))


def steps(page: str) -> Iterator[Step]:
    """Yield the steps of a page in order. A block is a file that the sentence before it names, a
    console, lines of the admin (``text``), or marked as shown only."""
    page = included(page)
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S):
        language, block = found[1], found[2]
        if language == "console":
            for line, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
                yield Command(line, output.splitlines())
        elif language == "text":
            yield Look(block.splitlines())
        elif told := lead(page, found.start()):
            assert (told[1] == "Change") == (language == "diff"), (
                f"{told[0]} stands before a block of {language}"
            )
            yield (
                Change(told[2], hunks(block))
                if language == "diff"
                else Write(told[2], block, told[1].startswith("Add"))
            )
        else:
            assert SHOWN.search(before(page, found.start())), (
                f"the page does not say where this belongs:\n{block}"
            )


def versions(page: str, path: str) -> list[str]:
    """Return the contents of a file after each step of the page that writes or changes it."""
    found: list[str] = []
    for step in steps(page):
        match step:
            case Write(at, content, at_the_end) if at == path:
                found.append((found[-1] if found and at_the_end else "") + content)
            case Change(at, places) if at == path:
                found.append(changed(found[-1], places))
    return found


def changed(content: str, places: list[tuple[str, str]]) -> str:
    """Return ``content`` with the old lines of each place replaced by the new lines."""
    for old, new in places:
        assert content.count(old) == 1, f"there are {content.count(old)} times:\n{old}"
        content = content.replace(old, new)
    return content


def hunks(diff: str) -> list[tuple[str, str]]:
    """Return the old and the new lines of each place; ``@@`` separates the places."""
    return [
        tuple(
            "".join(f"{line[1:]}\n" for line in place.splitlines() if not line.startswith(other))
            for other in "+-"
        )
        for place in re.split(r"^@@.*\n", diff, flags=re.M)
    ]


def changed_lines(page: str) -> int:
    """Return the number of lines that the diffs of a page, or of a part of it, add and remove, as
    in ``git diff --stat``."""
    diffs = re.findall(r"^```diff\n(.*?)^```$", page, re.M | re.S)
    return sum(line.startswith(("+", "-")) for diff in diffs for line in diff.splitlines())


class Project:
    """A folder, empty at first, in which a reader can use Django and the app of the checkout.

    With ``checkout``, a copy of the checkout, the reader has only Python, and executes the commands
    of the page that install packages.
    ``here`` maps texts of the pages to their replacements on this machine, such as an address.
    ``environment`` has environment variables of the reader.
    """

    def __init__(
        self,
        folder: Path,
        here: dict[str, str] | None = None,
        *,
        checkout: Path | None = None,
        **environment: str,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.here, self.checkout = folder, here or {}, checkout
        found = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        tests, paths = str(Path(sys.executable).parent), found["PATH"].split(":")
        if checkout is None:
            paths.insert(0, tests)
            found["PYTHONPATH"] = str(ROOT)
        else:
            paths = [f"{folder}/.venv/bin", *(path for path in paths if path != tests)]
        self.environment = {
            **found,
            "PATH": ":".join(paths),
            "PYTHONUNBUFFERED": "1",
            **environment,
        }
        self.running: list[subprocess.Popen[str]] = []

    def follow(self, page: str, *leave_out: str) -> None:
        """Execute the steps of a page, or of a part of it. Raise AssertionError if a command fails
        or has another output.

        Commands that contain a text of ``leave_out`` are not executed, nor commands that install
        packages without ``checkout``.
        """
        page = included(page)
        left_out = leave_out if self.checkout is not None else (*INSTALLS, *leave_out)
        for written, here in self.here.items():
            assert written in page, f"the page no longer says {written}"
            page = page.replace(written, here)
        try:
            for step in steps(page):
                match step:
                    case Write():
                        self.write(step)
                    case Change(path, places):
                        self.change(path, places)
                    case Command(line, output) if not any(part in line for part in left_out):
                        self.enter(line, output)
        finally:
            self.stop()

    def write(self, step: Write) -> None:
        """Write a file, or add to its end."""
        file = self.folder / step.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((file.read_text() if step.at_the_end else "") + step.content)

    def change(self, path: str, places: list[tuple[str, str]]) -> None:
        """Replace the old lines of each place with the new lines."""
        file = self.folder / path
        file.write_text(changed(file.read_text(), places))

    def enter(self, line: str, output: list[str]) -> None:
        """Run a command and compare its output; if it ends with ``&``, start it in the
        background."""
        if line.endswith(" &"):
            self.running.append(self._start(line.removesuffix(" &")))
        elif line == STOP:
            self.stop()
        elif line.startswith("pip "):
            self.run(line)  # pip prints warnings about the package index of this machine.
        else:
            expected, end = (
                [SECONDS.sub("…", said) for said in output],
                time.monotonic() + PATIENCE_SECONDS,
            )
            while (
                (printed := self._shown(line, expected)) != (0, expected)
                and self.running
                and time.monotonic() < end
            ):
                time.sleep(0.1)
            assert printed == (0, expected), f"$ {line}\n" + "\n".join(printed[1])

    def run(self, line: str) -> str:
        """Run a shell command to its end, and return its output, including errors."""
        status, printed = self._printed(line)
        assert status == 0, f"$ {line}\n" + "\n".join(printed)
        return "\n".join(printed)

    def stop(self) -> None:
        """End the background processes."""
        while self.running:
            process = self.running.pop()
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.communicate(timeout=30)

    def _start(self, line: str) -> "subprocess.Popen[str]":
        for home in ("~", "$HOME"):
            line = line.replace(f"{home}/django-idempotency", str(self.checkout or ROOT))
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _shown(self, line: str, expected: list[str]) -> tuple[int, list[str]]:
        """Do the same as ``_printed``, but replace the first lines by ``...`` if the page does."""
        status, printed = self._printed(line)
        if expected[:1] == ["..."]:
            printed = ["...", *printed[1 - len(expected) :]]
        return status, printed

    def _printed(self, line: str) -> tuple[int, list[str]]:
        """Return the exit status of a command, and its output, including errors."""
        process = self._start(line)
        try:
            printed, _ = process.communicate(timeout=COMMAND_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, SECONDS.sub("…", printed).splitlines()
