"""The system user of PostgreSQL if the demo runs as root, and the permissions of that user."""

import pwd
import subprocess
from contextlib import suppress
from pathlib import Path

from rides_demo.processes.process import EmbeddedServerError

SYSTEM_USER = "pgserver"


def ensure_system_user() -> None:
    """Create the system user if it is missing; raise EmbeddedServerError if that fails."""
    try:
        pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        try:
            subprocess.run(
                ["useradd", "--system", "--shell", "/usr/sbin/nologin", SYSTEM_USER],
                check=True,
                capture_output=True,
                text=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            # A concurrent run may have created the user in the meantime.
            with suppress(KeyError):
                pwd.getpwnam(SYSTEM_USER)
                return
            reason = getattr(error, "stderr", None) or str(error)
            raise EmbeddedServerError(
                f"PostgreSQL does not run as root, and the system user {SYSTEM_USER!r} cannot be"
                f" created: {reason.strip()}. Run as another user, create this user, or set"
                " DATABASE_URL to the URL of your own server."
            ) from None


def open_parents(path: Path) -> None:
    """Set ``o+x`` on the folders above ``path``, so that every user can reach ``path``."""
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode
        if not mode & 0o001:
            try:
                parent.chmod(mode | 0o001)
            except OSError as error:
                raise EmbeddedServerError(
                    f"PostgreSQL runs as the user {SYSTEM_USER!r}, which may not enter {parent}:"
                    f" {error.strerror}. Run as another user than root, use another folder, or set"
                    " DATABASE_URL to the URL of your own server."
                ) from None
