"""The cursors of this app's statements, and the classification of their errors."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import psycopg
from django.db import connections
from django.db.backends import utils
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.postgresql.base import Cursor, DatabaseWrapper, ServerBindingCursor
from django.db.backends.utils import CursorWrapper
from django.db.utils import DatabaseError

from idempotency import conf
from idempotency._engine import database_product
from idempotency._engine.errors import as_lost, hide_row
from idempotency._engine.replication import confirmed_commit

_PARAMETER = re.compile(r"%\((\w+)\)s")
#: The methods of Django's connections that make cursors.
_MAKERS = frozenset(
    {"cursor", "_cursor", "_prepare_cursor", "create_cursor", "make_cursor", "make_debug_cursor"}
)
#: The globals of Django's functions that send statements.
_DJANGO = vars(utils)
_CURSORS: tuple[Any, ...] = (Cursor, ServerBindingCursor)
#: The package whose functions only note a statement, and pass it to the function that they replace.
_OBSERVER = "sentry_sdk."


def is_instrumented(connection: BaseDatabaseWrapper) -> bool:
    """Return whether code of the project or of a package takes part in the statements of a
    connection: a wrapper of ``execute_wrapper()``, or another class or method of connections or
    cursors. It must get the statements of this app like those of the ORM. The SDK of Sentry only
    notes statements, which needs none of them."""
    execute: Any = CursorWrapper.execute
    if connection.execute_wrappers or type(execute) is not FunctionType:
        return True
    if execute.__globals__ is not _DJANGO and not _is_observer_of_django(execute):
        return True
    if connection.vendor != "postgresql":
        return False
    kind = type(connection)
    if not _MAKERS.isdisjoint(vars(connection)):
        return True
    if kind is not DatabaseWrapper and any(
        getattr(kind, name) is not getattr(DatabaseWrapper, name) for name in _MAKERS
    ):
        return True
    own = connection.connection
    if own is None:
        return False
    return type(own) is not psycopg.Connection or own.cursor_factory not in _CURSORS


def _is_observer_of_django(execute: Any) -> bool:
    """Return whether the SDK of Sentry has replaced the function of Django. An older SDK does not
    name the function that it has replaced."""
    while type(execute) is FunctionType and execute.__globals__ is not _DJANGO:
        if not str(execute.__globals__.get("__name__")).startswith(_OBSERVER):
            return False
        execute = getattr(execute, "__wrapped__", None)
    return type(execute) is FunctionType


@cache
def numbered(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a statement with numbered parameters, and their names in order."""
    numbers: dict[str, int] = {}
    return _PARAMETER.sub(
        lambda found: f"${numbers.setdefault(found[1], len(numbers) + 1)}", text
    ), tuple(numbers)


@cache
def positional(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a statement with the parameters of the ORM, and their names in order."""
    return _PARAMETER.sub("%s", text), tuple(_PARAMETER.findall(text))


def changed_rows(cursor: CursorWrapper) -> int:
    """Return how many rows an INSERT or UPDATE without RETURNING has changed. A wrapper may send it
    in one text with other statements, and leave the result of another one in front."""
    while hasattr(cursor, "statusmessage") and not (cursor.statusmessage or "").startswith(
        ("INSERT", "UPDATE")
    ):
        if not cursor.nextset():
            return 0
    return int(cursor.rowcount)


@contextmanager
def own_cursor(using: str, factory: type[psycopg.Cursor[Any]]) -> Iterator[CursorWrapper]:
    """Yield a cursor for this app's statements, which PostgreSQL can prepare. Django binds
    parameters in the client by default, so that each text differs. These are bound in the server.
    With ``prepare_threshold`` in the OPTIONS of the database, they are parsed and planned once. On
    an instrumented connection it is the cursor of any ORM query."""
    connection = connections[using]
    if connection.vendor != "postgresql":
        with connection.cursor() as cursor:
            yield cursor
        return
    # A health check while the cursor opens would replace the connection, and the kind of cursor.
    pg = database_product.psycopg_connection(connection)
    former = pg.cursor_factory
    if not is_instrumented(connection):
        pg.cursor_factory = factory
    try:
        cursor = connection.cursor()
    finally:
        pg.cursor_factory = former
    with classified_errors(connection), cursor:
        yield cursor


def classified_errors(
    connection: BaseDatabaseWrapper, *, own: bool = True
) -> AbstractContextManager[None]:
    """Classify the errors of a block on an open connection, and confirm its commits. Without
    ``own`` the block has statements of a view too."""
    if conf.get().CONFIRM_REPLICATED or database_product.is_citus(connection):
        return _watched(connection, own)
    return _Classified(connection, own)


class _Classified:
    """A block whose errors of the database are classified. A class costs fewer calls than a
    generator."""

    __slots__ = ("_connection", "_own")

    def __init__(self, connection: BaseDatabaseWrapper, own: bool) -> None:
        self._connection, self._own = connection, own

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, DatabaseError):
            hide_row(error, own=self._own)
            if (lost := as_lost(error, self._connection, own=self._own)) is not error:
                raise lost


@contextmanager
def _watched(connection: BaseDatabaseWrapper, own: bool) -> Iterator[None]:
    with (
        confirmed_commit(connection),
        _Classified(connection, own),
        database_product.worker_errors(connection),
    ):
        yield
