"""A PostgreSQL for tests that do not crash it."""

from pathlib import Path
from typing import Any

import psycopg

from rides_demo.processes import replicated
from rides_demo.processes.embedded import Postgres


class HastyPostgres(Postgres):
    """A PostgreSQL that loses data when the machine crashes. Full pages are still written: some tests count WAL."""

    def prepare(self) -> None:
        """Switch fsync off, and checkpoints by time: after one, each page is written to the WAL in full once."""
        super().prepare()
        self.command += ["-c", "fsync=off", "-c", "checkpoint_timeout=1d", "-c", "max_wal_size=4GB"]


class Standby(HastyPostgres, replicated.Standby):
    """A hot standby of another server on this machine, which it follows until it is promoted."""

    copy_options = ("--no-sync",)

    def __init__(self, folder: Path, primary: Path) -> None:
        super().__init__(folder, primary, max_connections=200)

    def execute(self, statement: str) -> Any:
        """Return the first column of the row that the statement yields, None without one."""
        with psycopg.connect(host=str(self.sockets), user="postgres", dbname="postgres", autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            row = cursor.fetchone() if cursor.description else None
            return row and row[0]
