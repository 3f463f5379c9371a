"""The patches are as small as the README says, and the patched shops pass ruff and Django's
checks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import EXAMPLE, ROOT

BELOW = pytest.mark.parametrize(("name", "below"), [("plain", 20), ("phased", 50)])


@BELOW
def test_few_lines_are_changed(name: str, below: int) -> None:
    command = ["git", "apply", "--numstat", EXAMPLE / f"{name}.patch"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    added_and_removed = [line.split("\t")[:2] for line in done.stdout.splitlines()]
    assert 0 < sum(int(number) for numbers in added_and_removed for number in numbers) < below


@BELOW
def test_the_lines_are_formatted_as_ours_are(
    sources: dict[str, Path], name: str, below: int
) -> None:
    for command in (
        ["check", "--config", f'src=["{sources[name]}", "{ROOT}"]'],
        ["format", "--check"],
    ):
        settings = ["--config", EXAMPLE / "shop" / "ruff.toml"]
        ruff = [sys.executable, "-m", "ruff", *command, *settings, sources[name]]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@BELOW
def test_the_checks_find_nothing(manage: Callable[..., str], name: str, below: int) -> None:
    manage(name, "sqlite://", "check", "--fail-level", "WARNING")
    assert manage(name, "sqlite://", "makemigrations", "--check", "--dry-run")
    assert "PaymentDetailsView" in manage(name, "sqlite://", "describe_idempotency")
