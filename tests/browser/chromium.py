"""Debian's Chromium; and axe-core, which looks for what keeps people out."""

import base64
import hashlib
import io
import shutil
import tarfile
from pathlib import Path

from rides_demo.processes import debian

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
AXE = "axe-core@4.14.1"
AXE_SHA512 = (
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
)


def chromium() -> str:
    """Return the path of a browser. Raises NotToBeHad."""
    return debian.program("chromium", *BROWSERS)


def axe_script(folder: Path) -> str:
    """Return the script of axe-core, fetched into ``folder`` when it is not there, and checked each
    time. Raises NotToBeHad."""
    tarball = folder / f"{AXE.replace('@', '-')}.tgz"
    if not tarball.exists():
        if not shutil.which("npm"):
            raise debian.NotToBeHad("There is no npm to fetch axe-core with: apt-get install npm.")
        folder.mkdir(parents=True, exist_ok=True)
        pack = [
            "npm",
            "pack",
            AXE,
            "--loglevel",
            "error",
            "--fetch-retries",
            "1",
            "--pack-destination",
            str(folder),
        ]
        debian.run(pack, f"npm could not fetch {AXE}")
    content = tarball.read_bytes()
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    assert digest == AXE_SHA512, (
        f"{tarball} is not the {AXE} that was pinned. Remove it, and see who changed it."
    )
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        script = package.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()
