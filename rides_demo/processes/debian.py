"""Programs that are Debian packages: find them, or install them if possible."""

import os
import shutil
import subprocess

from rides_demo.processes.process import ProcessError

INSTALL_SECONDS = 300


class NotToBeHad(ProcessError):
    """A program is not available; the message names it, and says why it could not be installed."""


def program(package: str, *names: str) -> str:
    """Return the path of the first existing program of ``names``; root on Debian installs it if
    needed. Raises NotToBeHad."""
    if found := _found(names):
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NotToBeHad(
            f"There is no {package}, and only root of a Debian can install it: apt-get install"
            f" {package}."
        )
    for command in (["update"], ["install", "--yes", "--no-install-recommends", package]):
        run(["apt-get", "--quiet", *command], f"{package} could not be installed")
    if found := _found(names):
        return found
    raise NotToBeHad(f"apt-get installed {package}, and it is not on the PATH.")


def _found(names: tuple[str, ...]) -> str | None:
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
    return next(filter(None, (shutil.which(name, path=path) for name in names)), None)


def run(command: list[str], failure: str) -> None:
    """Run a command that installs something. Raises NotToBeHad with ``failure`` and the reason."""
    try:
        subprocess.run(
            command,
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise NotToBeHad(f"{failure} within {INSTALL_SECONDS} seconds.") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["no reason was given"]
        reason = next((line for line in said if line.startswith(("E:", "npm error"))), said[-1])
        raise NotToBeHad(f"{failure}: {reason}") from None
