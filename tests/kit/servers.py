"""PostgreSQL servers for tests that do not crash the machine."""

from pathlib import Path
from typing import Any

import psycopg

from rides_demo.processes import replicated
from rides_demo.processes.embedded import Postgres


class HastyPostgres(Postgres):
    """A PostgreSQL without fsync. It still writes full pages, because some tests count WAL."""

    def prepare(self) -> None:
        """Disable fsync and timed checkpoints: after a checkpoint, the first change of a page
        writes the full page to WAL."""
        super().prepare()
        self.command += ["-c", "fsync=off", "-c", "checkpoint_timeout=1d", "-c", "max_wal_size=4GB"]


class Standby(HastyPostgres, replicated.Standby):
    """A hot standby of another server on this machine; it replicates that server until it is
    promoted."""

    copy_options = ("--no-sync",)

    def __init__(self, folder: Path, primary: Path) -> None:
        super().__init__(folder, primary, max_connections=200)

    def execute(self, statement: str) -> Any:
        """Return the first column of the first row that the statement returns, or None."""
        with psycopg.connect(
            host=str(self.sockets), user="postgres", dbname="postgres", autocommit=True
        ) as connection:
            cursor = connection.execute(statement.encode())
            row = cursor.fetchone() if cursor.description else None
            return row and row[0]
