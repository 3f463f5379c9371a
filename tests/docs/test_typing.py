"""A project under ``mypy --strict`` sees the types of its own views through the decorator, and its
mistakes: from the wheel."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.kit.packages import TOOLS, one, run

ROOT = Path(__file__).parents[2]
PROJECTS = sorted((ROOT / "tests" / "typing").glob("*.py"))
pytestmark = [
    pytest.mark.postgres,
    pytest.mark.full,  # make package runs them
    pytest.mark.skipif(not TOOLS.exists(), reason="make package installs the tools"),
]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.stem)
def test_mypy_says_of_a_users_project_what_stands_at_its_lines(
    built: Path, tmp_path: Path, project: Path
) -> None:
    pytest.importorskip("mypy", reason="make lint installs it")
    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    install = (
        TOOLS,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    )
    run(*install, one(built, "*.whl"), cwd=tmp_path)
    # What the wheel needs besides: Django and its stubs, of the environment that the tests run in.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / project.name).write_text(project.read_text())
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--cache-dir",
         ROOT / ".run" / "mypy-of-a-user", project.name],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    said = {_short(line) for line in done.stdout.splitlines()} - {None}
    assert said == expected(project), done.stdout + done.stderr


def expected(project: Path) -> set[tuple[int, str]]:
    lines = enumerate(project.read_text().splitlines(), start=1)
    return {
        (number, found[1]) for number, line in lines if (found := re.search(r"# [RE]: (.*)$", line))
    }


def _short(line: str) -> tuple[int, str] | None:
    """The line with the type that was revealed, or the code of the error."""
    found = re.fullmatch(r'.*:(\d+): (?:note: Revealed type is (".*")|error: .*\[([\w-]+)\])', line)
    return (int(found[1]), found[2] or found[3]) if found else None
