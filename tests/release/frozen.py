"""The frozen state of the last release."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.kit.packages import ROOT

FROZEN = Path(__file__).with_name("frozen.json")
URLS = "tests.release.views"
#: The fingerprints of plain views are keyed with it.
SECRET_KEY = "the secret of the release"
_FOLDER = ROOT / "idempotency" / "migrations"


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FROZEN.read_text())
    return found


def migrations() -> dict[str, str]:
    """Return the hash of the text of each migration."""
    return {
        path.stem: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(_FOLDER.glob("[0-9]*.py"))
    }
