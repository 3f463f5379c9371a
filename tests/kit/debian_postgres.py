"""Run a command with a PostgreSQL of Debian as its database: ``python -m tests.kit.debian_postgres
15 COMMAND ...``.

The embedded PostgreSQL of the tests has the newest version. The oldest supported version comes from
a Debian package, which must be installed. The data folder is temporary.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rides_demo.processes.embedded import EmbeddedServerError, Postgres, _EmbeddedServer
from rides_demo.processes.system_user import SYSTEM_USER, ensure_system_user, open_parents


class DebianPostgres(Postgres):
    """A PostgreSQL from the folder ``binaries``, with its data in ``folder``."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        super().__init__(folder, max_connections=200)
        self.binaries = binaries

    def prepare(self) -> None:
        """Initialise the data folder. The locale provider of the embedded PostgreSQL does not exist
        before version 17."""
        if os.geteuid() == 0:
            self.user = SYSTEM_USER
            ensure_system_user()
        _EmbeddedServer.prepare(self)
        if self.user:
            open_parents(self.data)
        done = subprocess.run(
            [
                self.binaries / "initdb", "--pgdata", self.data, "--username", "postgres",
                "--auth", "trust", "--encoding", "UTF8", "--locale", "C.UTF-8",
            ],
            user=self.user, group=self.user, extra_groups=[] if self.user else None, cwd=self.data,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise EmbeddedServerError(self.explain(done.stderr))
        self.command = [
            str(self.binaries / "postgres"), "-D", str(self.data), "-k", str(self.sockets),
            "-h", "", "-c", f"max_connections={self.max_connections}",
        ]  # fmt: skip


def main(version: str, *command: str) -> int:
    """Run ``command`` and return its exit status."""
    binaries = Path(f"/usr/lib/postgresql/{version}/bin")
    with (
        tempfile.TemporaryDirectory(prefix="rides-debian-") as folder,
        DebianPostgres(binaries, Path(folder) / "data") as server,
    ):
        return subprocess.run(
            command, env=os.environ | {"DATABASE_URL": server.url}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
