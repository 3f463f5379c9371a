"""Write ``frozen.json``, or check the tree of a tag."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import django
from django.core.serializers.json import DjangoJSONEncoder
from django.utils import timezone

import idempotency
from tests.kit.packages import ROOT
from tests.release.frozen import FROZEN, migrations, read


def write() -> None:
    if FROZEN.exists() and (why := refusal(read())):
        sys.exit(why)
    os.environ |= {"DJANGO_SETTINGS_MODULE": "tests.settings", "DATABASE_URL": "sqlite://:memory:"}
    django.setup()
    from tests.release import rows

    frozen = {
        "version": idempotency.__version__,
        "written_at": timezone.now(),
        "migrations": migrations(),
        "rows": rows.made(),
    }
    FROZEN.write_text(json.dumps(frozen, indent=1, cls=DjangoJSONEncoder) + "\n")


def refusal(frozen: dict[str, Any]) -> str:
    """Return why this frozen state may not be replaced; an empty text if it may."""
    version, current = frozen["version"], migrations()
    if not _is_tagged(version):
        return ""
    if any(current.get(name) != text for name, text in frozen["migrations"].items()):
        return (
            f"Version {version} is tagged, and a migration of it has changed. Restore it, and"
            " change the tables with a new migration."
        )
    if version == idempotency.__version__:
        return f"Version {version} is tagged: set __version__ to that of the next release."
    return ""


def _is_tagged(version: str) -> bool:
    command = ["git", "tag", "--list", f"v{version}"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return bool(done.stdout.strip())


def problems(tag: str) -> list[str]:
    """Return why the tree may not be released as this tag."""
    version, changes = idempotency.__version__, (ROOT / "CHANGELOG.md").read_text()
    found = []
    if tag != f"v{version}":
        found.append(f"The tag is {tag}, and __version__ is {version}.")
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changes, re.M):
        found.append(f"CHANGELOG.md has no section '## {version} - DATE'.")
    unreleased = re.search(r"^## Unreleased\n(.*?)^## ", changes, re.M | re.S)
    if unreleased is not None and unreleased[1].strip():
        found.append("CHANGELOG.md has changes under Unreleased.")
    frozen = read()
    if (frozen["version"], frozen["migrations"]) != (version, migrations()):
        found.append("frozen.json is not that of this version: run python -m tests.release.")
    return found


if __name__ == "__main__":
    if len(sys.argv) == 1:
        write()
    elif found := problems(sys.argv[1]):
        sys.exit("\n".join(found))
