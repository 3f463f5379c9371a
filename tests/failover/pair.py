"""Two PostgreSQL nodes: a primary, and a hot standby that replicates it through a link that can be
slow, held or cut."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg

from rides_demo.processes.embedded import Postgres, socket_folder
from tests.failover.relay import Relay
from tests.kit.servers import HastyPostgres, Standby
from tests.kit.waiting import eventually

#: Parameters of all nodes. A killed server would not free dynamic shared memory of another type.
PARAMETERS = {"dynamic_shared_memory_type": "mmap", "wal_retrieve_retry_interval": "1s"}


def ask(server: Postgres, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement on a server, outside a transaction; return its rows."""
    with psycopg.connect(
        host=str(server.sockets),
        user="postgres",
        dbname="rides",
        autocommit=True,
        connect_timeout=5,
    ) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def vanish(server: Postgres) -> None:
    """Kill all processes of a server at the same time, like the loss of its host."""
    family: list[psutil.Process] = []
    if server.running:
        postmaster = psutil.Process(server.pid)
        family = [postmaster, *postmaster.children(recursive=True)]
    for end in (psutil.Process.suspend, psutil.Process.kill):
        for process in family:
            with suppress(psutil.Error):
                end(process)
    server.kill()


class Pair:
    """The nodes of one run, in the folders ``a`` and ``b``; a context manager."""

    def __init__(self, folder: Path, *, synchronous: bool, lag_seconds: float) -> None:
        self.synchronous, self.lag_seconds = synchronous, lag_seconds
        self.folders = [folder / "a", folder / "b"]
        self._link_folder = socket_folder(folder / "link")
        self.primary: Postgres = HastyPostgres(self.folders[0], max_connections=200)
        self.standby: Postgres = Standby(self.folders[1], self._link_folder)

    def __enter__(self) -> Self:
        self.primary.start()
        for name, value in PARAMETERS.items():
            ask(self.primary, f"ALTER SYSTEM SET {name} = '{value}'")
        self.link = Relay(
            self._link_folder, self.primary.sockets, owner=self.primary.data.stat().st_uid
        )
        self.link.__enter__()
        self.rebuild()
        return self

    def __exit__(self, *error: object) -> None:
        vanish(self.standby)
        vanish(self.primary)
        self.link.__exit__()

    def lose_primary(self) -> None:
        """Simulate the loss of the primary's host; data in transit to the standby is lost too."""
        self.link.lose()
        vanish(self.primary)

    def promote(self) -> None:
        """Make the standby the primary; the other node keeps its state."""
        while True:
            # The standby cancels a query that needs rows which the primary has removed.
            with suppress(psycopg.errors.SerializationFailure):
                ask(self.standby, "SELECT pg_promote(true, 30)")
                break
        self.primary, self.standby = self.standby, self.primary

    def rebuild(self) -> None:
        """Make the other node a standby, from a new copy of the primary. If ``synchronous``, let
        commits wait for it."""
        vanish(self.standby)
        self.link.restore(self.primary.sockets)
        standby = Standby(self.standby.data, self._link_folder)
        standby.data.mkdir(parents=True, exist_ok=True)
        standby.clear()
        self.standby = standby
        self.standby.start()
        eventually(lambda: self._standbys() == [("streaming", "async")])
        self.link.delay_seconds = self.lag_seconds
        if self.synchronous:
            ask(self.primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
            ask(self.primary, "SELECT pg_reload_conf()")
            eventually(lambda: self._standbys() == [("streaming", "sync")])

    def waiting(self) -> list[int]:
        """Return the process ids of the sessions whose COMMIT waits for the standby."""
        return [
            pid
            for (pid,) in ask(
                self.primary, "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            )
        ]

    def _standbys(self) -> list[tuple[Any, ...]]:
        return ask(self.primary, "SELECT state, sync_state FROM pg_stat_replication")
