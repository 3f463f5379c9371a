"""The cursors of this app's statements, and the classification of their errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.utils import DatabaseError

from idempotency._store import engine
from idempotency._store.database_errors import as_lost
from idempotency._store.replication import confirmed_commit


@contextmanager
def own_cursor(using: str, factory: type[psycopg.Cursor[Any]] = psycopg.Cursor) -> Iterator[CursorWrapper]:
    """Yield a cursor for this app's statements, which PostgreSQL can prepare. Django binds parameters in the client by
    default, so that each text differs. These are bound in the server. With ``prepare_threshold`` in the OPTIONS of the
    database, they are parsed and planned once."""
    connection = connections[using]
    if connection.vendor != "postgresql":
        with connection.cursor() as cursor:
            yield cursor
        return
    # A health check while the cursor opens would replace the connection, and the kind of cursor.
    psycopg_connection = engine.opened(connection)
    former = psycopg_connection.cursor_factory
    psycopg_connection.cursor_factory = factory
    try:
        cursor = connection.cursor()
    finally:
        psycopg_connection.cursor_factory = former
    with classified_errors(connection), cursor:
        yield cursor


@contextmanager
def classified_errors(connection: BaseDatabaseWrapper, *, own: bool = True) -> Iterator[None]:
    """Classify the errors of a block on an open connection, and confirm its commits. Without ``own`` the block has statements
    of a view too."""
    with confirmed_commit(connection):
        try:
            with engine.worker_errors(connection):
                yield
        except DatabaseError as error:
            raise as_lost(error, connection, own=own)  # noqa: B904 - its cause is set
