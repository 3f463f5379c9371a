"""A project under ``mypy --strict`` sees the types of its own views through the decorator, and its mistakes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = ROOT / "tests" / "typing" / "shop.py"


@pytest.mark.postgres  # a process of its own
def test_mypy_says_of_a_users_project_what_stands_at_its_lines(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="make lint installs it")
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nmypy_path = {ROOT}\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "mypy.ini", "--follow-imports", "silent",
         "--cache-dir", ROOT / ".run" / "mypy-of-a-user", PROJECT],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    said = {f"{PROJECT.name}:{line}: {what}" for line, what in re.findall(rf"{PROJECT.name}:(\d+): (.*)", done.stdout)}
    assert {_short(line) for line in said} - {None} == expected(), done.stdout + done.stderr


def expected() -> set[tuple[int, str]]:
    lines = enumerate(PROJECT.read_text().splitlines(), start=1)
    return {(number, found[1]) for number, line in lines if (found := re.search(r"# [RE]: (.*)$", line))}


def _short(line: str) -> tuple[int, str] | None:
    """The line with the type that was revealed, or the code of the error."""
    found = re.fullmatch(r'.*:(\d+): (?:note: Revealed type is (".*")|error: .*\[([\w-]+)\])', line)
    return (int(found[1]), found[2] or found[3]) if found else None
