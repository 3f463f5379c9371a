"""The machine-independent costs of a request, measured at the servers, with one method for this app
and the peers.

Statements are the lines of PostgreSQL's own log, each a round trip; commits, rows and HOT updates
are the records of its write-ahead log, read with ``pg_waldump``; Redis counts its commands itself.
The method is therefore the same for all drivers, numbers of connections, and threads of a system.
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contestant import Contestant, Failed
from benchmarks.ground import Ground

#: The number of requests of one kind; the costs are averages over them.
REQUESTS = 40
_STATEMENT = re.compile(rb"LOG:  (?:statement|execute [^:]*): ", re.M)
_RECORD = re.compile(r"^(\w+/\S+)\s+(\d+) ", re.M)
#: Log all statements, and disable the background work that the counts would include.
_SETTINGS = {
    "autovacuum": "off",
    "checkpoint_timeout": "1h",
    "bgwriter_lru_maxpages": "0",
    "log_statement": "all",
}


@dataclass(frozen=True)
class Connections:
    """The connections through which the meters are read."""

    postgres: Any
    redis: Any


@dataclass(frozen=True)
class Meters:
    """The servers' meters at one moment."""

    log_bytes: int
    lsn: str
    redis_commands: int


def measure(servers: Ground, names: Sequence[str]) -> dict[str, Any]:
    """Return for each system and kind of request what one request costs, or its error.

    Only one system runs at a time, because the counts would include the threads of another system.
    """
    import psycopg
    import redis

    found: dict[str, Any] = {}
    with (
        psycopg.connect(servers.postgres.url, autocommit=True) as connection,
        redis.Redis.from_url(servers.redis.url) as client,
    ):
        for name, value in _SETTINGS.items():
            connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        connection.execute("SELECT pg_reload_conf()")
        connections = Connections(connection, client)
        for name in names:
            system = Contestant(name)
            try:
                found[name] = {
                    "cases": {
                        kind: _cost(system, kind, servers, connections)
                        for kind in system.ask("kinds")
                    }
                }
            except Failed as error:
                found[name] = {"error": str(error)}
            finally:
                system.stop()
            print(f"costs: {name} {found[name].get('error', 'counted')}", flush=True)
        connection.execute("ALTER SYSTEM RESET ALL")
        connection.execute("SELECT pg_reload_conf()")
    return found


def _cost(
    system: Contestant, kind: str, servers: Ground, connections: Connections
) -> dict[str, float | None]:
    system.ask("get set", kind, REQUESTS)
    before = _read(servers, connections)
    begin = _log(servers).stat().st_size
    system.ask("go")
    after = _read(servers, connections)
    records = _records(servers, before.lsn, after.lsn, connections.postgres)
    hot, cold = (
        records.get("Heap/HOT_UPDATE", 0),
        records.get("Heap/UPDATE", 0) + records.get("Heap/UPDATE+INIT", 0),
    )
    inserts = records.get("Heap/INSERT", 0) + records.get("Heap/INSERT+INIT", 0)
    wal_bytes = int(
        connections.postgres.execute(
            "SELECT pg_wal_lsn_diff(%s, %s)", [after.lsn, before.lsn]
        ).fetchone()[0]
    )
    with _log(servers).open("rb") as log:
        log.seek(begin)
        statements = len(_STATEMENT.findall(log.read(after.log_bytes - begin)))

    def each(total: float) -> float:
        return round(total / REQUESTS, 1)

    return {
        "statements": each(statements),
        "redis_commands": each(after.redis_commands - before.redis_commands - 1),
        "commits": each(records.get("Transaction/COMMIT", 0)),
        "wal_bytes": round(wal_bytes / REQUESTS),
        "rows_written": each(inserts + hot + cold + records.get("Heap/DELETE", 0)),
        "updates": each(hot + cold),
        "hot_updates": each(hot),
        "hot_share": round(hot / (hot + cold), 2) if hot + cold else None,
    }


def _read(servers: Ground, connections: Connections) -> Meters:
    """Read the meters. ``_cost`` excludes the statements of the reading from the log, and subtracts
    its Redis command."""
    length = _log(servers).stat().st_size
    lsn = connections.postgres.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0]
    return Meters(length, lsn, int(connections.redis.info("stats")["total_commands_processed"]))


def _log(servers: Ground) -> Path:
    output = servers.postgres.output
    assert isinstance(output, Path)
    return output


def _records(servers: Ground, start: str, end: str, connection: Any) -> dict[str, int]:
    """Return the number of WAL records of each kind between the positions ``start`` and ``end``."""
    if start == end:
        return {}
    # Its commit flushes all records.
    connection.execute("SELECT pg_logical_emit_message(true, 'bench', '')")
    waldump = Path(servers.postgres.command[0]).parent / "pg_waldump"
    folder = servers.postgres.data / "pg_wal"
    done = subprocess.run(
        [waldump, "--stats=record", "--start", start, "--end", end, "--path", folder],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: int(count) for name, count in _RECORD.findall(done.stdout)}
