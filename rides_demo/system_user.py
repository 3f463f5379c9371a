"""The system user that PostgreSQL runs as when the demo runs as root, and the permissions it needs."""

import pwd
import subprocess
from contextlib import suppress
from pathlib import Path

from rides_demo.processes import ServiceError

SYSTEM_USER = "pgserver"


def ensure_system_user() -> None:
    """Create the system user when it is missing; raise ServiceError when that is not allowed."""
    try:
        pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        try:
            subprocess.run(
                ["useradd", "--system", "--shell", "/usr/sbin/nologin", SYSTEM_USER], check=True, capture_output=True, text=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            # Two runs side by side may create it at the same moment.
            with suppress(KeyError):
                pwd.getpwnam(SYSTEM_USER)
                return
            reason = getattr(error, "stderr", None) or str(error)
            raise ServiceError(
                f"PostgreSQL does not run as root, and the system user {SYSTEM_USER!r} cannot be created: {reason.strip()}. "
                f"Run as another user, create that one, or set DATABASE_URL to the URL of a server of your own."
            ) from None


def open_parents(path: Path) -> None:
    """Let every user pass through the folders above ``path``; what is in them stays as it is."""
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode
        if not mode & 0o001:
            try:
                parent.chmod(mode | 0o001)
            except OSError as error:
                raise ServiceError(
                    f"PostgreSQL runs as the user {SYSTEM_USER!r}, which may not enter {parent}: {error.strerror}. Run as "
                    f"another user than root, work in another folder, or set DATABASE_URL to the URL of a server of your own."
                ) from None
