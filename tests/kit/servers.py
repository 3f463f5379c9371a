"""A PostgreSQL for tests that do not crash it."""

import subprocess
from pathlib import Path
from typing import Any

import psycopg

from rides_demo.processes.embedded import Postgres
from rides_demo.processes.process import Process


class HastyPostgres(Postgres):
    """A PostgreSQL that loses data when the machine crashes. Full pages are still written: some tests count WAL."""

    def prepare(self) -> None:
        """Switch fsync off, and checkpoints by time: after one, each page is written to the WAL in full once."""
        super().prepare()
        self.command += ["-c", "fsync=off", "-c", "checkpoint_timeout=1d", "-c", "max_wal_size=4GB"]


class Standby(HastyPostgres):
    """A hot standby of another server on this machine, which it follows until it is promoted."""

    def __init__(self, folder: Path, primary: Path) -> None:
        super().__init__(folder, max_connections=200)
        self._primary = primary

    def _initialise(self, binaries: Path) -> None:
        """Copy the primary."""
        source = f"host={self._primary} user=postgres"
        command = [binaries / "pg_basebackup", "-D", self.data, "-d", source, "-c", "fast", "-X", "stream", "-R", "--no-sync"]
        owner = {"user": self.user, "group": self.user, "extra_groups": []} if self.user else {}
        subprocess.run(command, cwd=self.data, stdin=subprocess.DEVNULL, capture_output=True, check=True, **owner)
        for lock in self.data.glob(".s.PGSQL.*.lock"):
            lock.unlink()  # The primary's: its socket is in its data folder.

    def wait_ready(self, seconds: float) -> None:
        """Wait until it answers queries. It makes no database of its own."""
        Process.wait_ready(self, seconds)

    def execute(self, statement: str) -> Any:
        """Return the first column of the row that the statement yields, None without one."""
        with psycopg.connect(host=str(self.sockets), user="postgres", dbname="postgres", autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            row = cursor.fetchone() if cursor.description else None
            return row and row[0]
