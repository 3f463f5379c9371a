"""The time limits of a database administrator: settings of the role that the processes of a soak
use."""

from collections import Counter
from pathlib import Path

import psycopg
from psycopg import sql

LIMITS = "limits"
ROLE = "rides"
#: Each setting, its value, and the message of PostgreSQL if the limit strikes. A COMMIT that waits
#: for a restart of the standby exceeds the first limit. The transaction of a suspended web worker
#: exceeds the second. Many sessions of web threads and loops exceed the third.
SETTINGS = {
    "statement_timeout": ("500ms", "canceling statement due to statement timeout"),
    "transaction_timeout": ("3s", "terminating connection due to transaction timeout"),
    "idle_session_timeout": ("2s", "terminating connection due to idle-session timeout"),
}


def create_role(server_url: str, *databases: str) -> None:
    """Create the role, and the ``databases`` that do not exist. The role becomes their owner."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(ROLE)))
        found = {name for (name,) in connection.execute("SELECT datname FROM pg_database")}
        for name in databases:
            if name not in found:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            owner = sql.SQL("ALTER DATABASE {} OWNER TO {}").format(
                sql.Identifier(name), sql.Identifier(ROLE)
            )
            connection.execute(owner)


def set_limits(server_url: str) -> None:
    """Set the limits of new connections of the role: those that the server has. PostgreSQL 16 has
    no transaction_timeout."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        known = {name for (name,) in connection.execute("SELECT name FROM pg_settings")}
        for name in SETTINGS.keys() & known:
            statement = sql.SQL("ALTER ROLE {} SET {} = {}")
            connection.execute(
                statement.format(
                    sql.Identifier(ROLE), sql.Identifier(name), sql.Literal(SETTINGS[name][0])
                )
            )


def strikes(run_dir: Path) -> Counter[str]:
    """Return how often each limit struck, according to the logs of PostgreSQL."""
    counts: Counter[str] = Counter()
    for log in run_dir.glob("postgres*.log*"):
        with log.open(errors="replace") as lines:
            for line in lines:
                counts.update(
                    f"{LIMITS}: {name} {value}"
                    for name, (value, message) in SETTINGS.items()
                    if message in line
                )
    return counts
