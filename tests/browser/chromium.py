"""Debian's Chromium: found, or installed where that can be done; and axe-core, which looks for what keeps people out."""

import base64
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Nothing of the machine's, and nothing from the network, has a part in what is tested.
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
INSTALL_SECONDS = 300
AXE = "axe-core@4.14.1"
AXE_SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="


class NotToBeHad(Exception):
    """The message says what is missing, and why it could not be installed."""


def chromium() -> str:
    """Return the path of a browser, installed first as root of a Debian without one. Raises NotToBeHad."""
    if found := _found():
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NotToBeHad("There is no Chromium, and only root of a Debian can install it: apt-get install chromium.")
    for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
        _run(["apt-get", "--quiet", *command], "Chromium could not be installed")
    return _found() or _missing("apt-get installed Chromium, and it is not on the PATH.")


def axe_script(folder: Path) -> str:
    """Return the script of axe-core, fetched into ``folder`` when it is not there, and checked each time. Raises NotToBeHad."""
    tarball = folder / f"{AXE.replace('@', '-')}.tgz"
    if not tarball.exists():
        if not shutil.which("npm"):
            raise NotToBeHad("There is no npm to fetch axe-core with: apt-get install npm.")
        folder.mkdir(parents=True, exist_ok=True)
        pack = ["npm", "pack", AXE, "--loglevel", "error", "--fetch-retries", "1", "--pack-destination", str(folder)]
        _run(pack, f"npm could not fetch {AXE}")
    content = tarball.read_bytes()
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    assert digest == AXE_SHA512, f"{tarball} is not the {AXE} that was pinned. Remove it, and see who changed it."
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        script = package.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


def _found() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _missing(reason: str) -> str:
    raise NotToBeHad(reason)


def _run(command: list[str], failure: str) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        _missing(f"{failure} within {INSTALL_SECONDS} seconds.")
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["no reason was given"]
        _missing(f"{failure}: {next((line for line in said if line.startswith(('E:', 'npm error'))), said[-1])}")
