"""A database that cannot be reached, or accepts no writes."""

import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection, connections

from tests.kit.threads import WAIT_SECONDS


def cut_this_connection(alias: str = "default") -> None:
    """Cut the connection of this thread without a message, like a network failure."""
    with socket.socket(fileno=os.dup(connections[alias].connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


def time_out_this_session(alias: str = "default") -> None:
    """Wait until the server has ended the session of this thread at ``idle_session_timeout``."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SET idle_session_timeout = '50ms'")
    assert select.select([connections[alias].connection.fileno()], [], [], WAIT_SECONDS)[0]


def make_read_only(on: bool) -> None:
    """Make new sessions of the database read-only, or writable again; close the session of this
    thread."""
    name = connection.settings_dict["NAME"]
    with connection.cursor() as cursor:
        cursor.execute("SET default_transaction_read_only = off")
        cursor.execute(
            f'ALTER DATABASE "{name}" '
            + ("SET default_transaction_read_only = on" if on else "RESET ALL")
        )
    connection.close()


def allow_connections(allowed: bool) -> None:
    """Allow connections to the database, or end all connections and allow no more."""
    name = connection.settings_dict["NAME"]
    with connection._nodb_cursor() as cursor:
        cursor.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS {allowed}')
        if not allowed:
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s",
                [name],
            )


@contextmanager
def writable_at_the_end() -> Iterator[None]:
    """Allow connections and writes again at the end of the block."""
    try:
        yield
    finally:
        allow_connections(True)
        connection.close()
        make_read_only(False)
