"""A PostgreSQL with a synchronous standby, under one address that follows the primary."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

from rides_demo.processes.embedded import EmbeddedServerError, Postgres, postgres_url, socket_folder
from rides_demo.processes.process import POLL_SECONDS, Process

READY_SECONDS = 30


class Standby(Postgres):
    """A hot standby of the server whose socket folder is ``primary``; it replicates that server
    until it is promoted."""

    copy_options: tuple[str, ...] = ()

    def __init__(self, folder: Path, primary: Path, *, max_connections: int = 100) -> None:
        super().__init__(folder, max_connections=max_connections)
        self._primary = primary

    def _initialise(self, binaries: Path) -> None:
        """Copy the primary."""
        source = f"host={self._primary} user=postgres"
        done = subprocess.run(
            [
                binaries / "pg_basebackup", "--pgdata", self.data, "--dbname", source,
                "--checkpoint", "fast", "--wal-method", "stream", "--write-recovery-conf",
                *self.copy_options,
            ],
            user=self.user, group=self.user, extra_groups=[] if self.user else None, cwd=self.data,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            self.clear()
            raise EmbeddedServerError(
                f"The standby was not copied: {' '.join(done.stderr.split())}"
            )
        for lock in self.data.glob(".s.PGSQL.*.lock"):
            # A copy: the primary's socket, with its lock file, is in the copied folder.
            lock.unlink()

    def clear(self) -> None:
        """Empty the data folder, so that the next start copies the primary.

        The folder itself is kept, because PostgreSQL detects the processes of a killed server by
        the inode of the folder.
        """
        for left in self.data.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def wait_ready(self, seconds: float) -> None:
        """Wait until the standby answers queries. Unlike the base class, create no database."""
        Process.wait_ready(self, seconds)


class PostgresPair(Process):
    """A primary and its synchronous standby; ``url`` always connects to the current primary.

    If SIGKILL ended the primary, the next start promotes the standby, and makes the other node the
    new standby. After any other end, the next start restarts the same primary.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("PostgreSQL", [])
        self.url, self._address = postgres_url(folder), socket_folder(folder)
        self.primary: Postgres = Postgres(folder.with_name(f"{folder.name}-a"))
        self.standby = Standby(folder.with_name(f"{folder.name}-b"), self.primary.sockets)

    @property
    def pid(self) -> int:
        """The process id of the primary."""
        return self.primary.pid

    @property
    def running(self) -> bool:
        """Whether both nodes run."""
        return self.primary.running and self.standby.running

    @property
    def exit_status(self) -> int | None:
        """The exit status of the primary."""
        return self.primary.exit_status

    def start(self, ready_seconds: float = READY_SECONDS) -> None:
        """Start each node that does not run; return when commits wait for the standby.

        Raises EmbeddedServerError if a step fails; another call then continues.
        """
        try:
            if self.primary.exit_status == -signal.SIGKILL:
                self._fail_over()
            self.primary.start(ready_seconds)
            self._move_address()
            # Set before the standby is copied: a promoted standby then has the setting, and waits
            # for its own standby.
            self._ask("ALTER SYSTEM SET synchronous_standby_names = '*'")
            self._ask("ALTER SYSTEM SET wal_retrieve_retry_interval = '1s'")
            self.standby.start(ready_seconds)
            self._ask("SELECT pg_reload_conf()")
            self._wait_for_standby(ready_seconds)
        except (psycopg.Error, OSError) as error:
            raise EmbeddedServerError(
                f"The PostgreSQL pair was not started: {' '.join(str(error).split())}"
            ) from None

    def stop(self) -> None:
        """Stop the primary first, so that it sends its last WAL to the standby; then stop the
        standby."""
        self.primary.stop()
        self.standby.stop()

    def _fail_over(self) -> None:
        lost = self.primary.data
        self.primary.forget()
        with psycopg.connect(
            postgres_url(self.standby.data, "postgres"), autocommit=True
        ) as connection:
            connection.execute("SELECT pg_promote(true, 30)")
        self.primary = self.standby
        self._move_address()
        self.standby = Standby(lost, self.primary.sockets)
        self.standby.clear()

    def _move_address(self) -> None:
        """Replace the link atomically, so that it exists for every connection."""
        new = self._address.with_name(f"{self._address.name}.new")
        with suppress(FileNotFoundError):
            new.unlink()
        new.symlink_to(self.primary.sockets)
        os.replace(new, self._address)

    def _wait_for_standby(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._ask(
            "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'"
        ):
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"The standby did not follow within {seconds:g} seconds (see"
                    f" {self.standby.output})."
                )
            time.sleep(POLL_SECONDS)

    def _ask(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(
            postgres_url(self.primary.data, "postgres"), autocommit=True
        ) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []
