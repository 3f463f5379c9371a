"""PgBouncer in transaction mode in front of the PostgreSQL of a test run."""

import os
import pwd
import socket
from contextlib import suppress
from pathlib import Path

from rides_demo.processes import debian
from rides_demo.processes.embedded import postgres_url
from rides_demo.processes.process import Process, ProcessError
from rides_demo.processes.system_user import SYSTEM_USER, ensure_system_user, open_parents

#: The pool has few server connections, so that the transactions of a client often change the server
#: connection.
CONFIGURATION = """
[databases]
* = host={postgres} port=5432 user=postgres

[pgbouncer]
pool_mode = transaction
default_pool_size = 20
max_client_conn = 300
auth_type = any
listen_addr =
listen_port = 5432
unix_socket_dir = {folder}
unix_socket_mode = 0700
logfile =
{more}
"""


class PgBouncer(Process):
    """A PgBouncer with its socket in ``folder``, in front of the PostgreSQL whose socket is in
    ``postgres``. ``more`` are lines that override the configuration."""

    def __init__(self, program: str, folder: Path, postgres: Path, more: str = "") -> None:
        self.configuration = folder / "pgbouncer.ini"
        super().__init__(
            "PgBouncer", [program, str(self.configuration)], folder=folder, output=folder / "log"
        )
        self.sockets, self.postgres, self.more = folder, postgres, more
        self.url = postgres_url(folder)

    def prepare(self) -> None:
        """Write the configuration. As root, choose another user, because PgBouncer refuses to run
        as root."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self.configuration.write_text(
            CONFIGURATION.format(postgres=self.postgres, folder=self.folder, more=self.more)
        )
        if os.geteuid() == 0:
            self.user = SYSTEM_USER
            ensure_system_user()
            open_parents(self.configuration)
            owner = pwd.getpwnam(SYSTEM_USER).pw_uid
            for path in (self.folder, self.configuration):
                os.chown(path, owner, -1)

    def is_ready(self) -> bool:
        """Return whether PgBouncer accepts connections."""
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.sockets / ".s.PGSQL.5432"))
            return True
        return False


def start(folder: Path, postgres: Path) -> PgBouncer:
    """Start a PgBouncer and return it. Raises NotToBeHad if it is not installed, ProcessError if it
    does not start."""
    bouncer = PgBouncer(debian.program("pgbouncer", "pgbouncer"), folder, postgres)
    try:
        bouncer.start()
    except ProcessError as error:
        assert isinstance(bouncer.output, Path)
        raise ProcessError(f"{error} {bouncer.output.read_text()}") from None
    return bouncer
