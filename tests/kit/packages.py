"""The sdist and the wheel of the app, built once per test run."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-package" / "bin" / "python"
BUILT = pytest.StashKey[Path]()


@pytest.fixture(scope="session")
def built(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the sdist, and of the wheel built from it. The first test that needs it
    builds both."""
    if BUILT not in pytestconfig.stash:
        pytestconfig.stash[BUILT] = build(tmp_path_factory)
    return pytestconfig.stash[BUILT]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout, from which pip can install the app."""
    return copied(tmp_path_factory.mktemp("home") / "django-idempotency")


def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both in a copy of the checkout."""
    copy, out = copied(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("dist")
    run(TOOLS, "-m", "build", "--no-isolation", "--outdir", out, copy, cwd=out)
    return out


def copied(copy: Path) -> Path:
    """Copy the files that git does not ignore, and return the folder of the copy."""
    for name in run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


def newest_python() -> Path | None:
    """Return the newest Python that the app supports, or None."""
    names = (shutil.which("python3.13"), *Path.home().glob(".pyenv/versions/3.13.*/bin/python3.13"))
    for name in filter(None, names):
        with suppress(subprocess.CalledProcessError):
            command = [name, "-c", "import sys; print(sys.executable)"]
            return Path(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            )
    return None


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    outside = {"DJANGO_SETTINGS_MODULE", "PYTHONPATH", "DATABASE_URL"}
    environment = {name: value for name, value in os.environ.items() if name not in outside} | more
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
