"""Transactions that other code has opened, and functions that may have opened them."""

import logging
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import PipelineStatus, TransactionStatus

logger = logging.getLogger("idempotency")

#: Packages whose functions may be on the stack between the cause and this app.
_BETWEEN = sys.stdlib_module_names | {"idempotency", "django", "asgiref", "rest_framework", "ninja"}
#: The modules that start a request. Functions outside them on the stack do not belong to it.
_HANDLERS = ("django.core.handlers.wsgi", "django.core.handlers.asgi", "django.test.client")

_OPEN = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


def nearest_function() -> str:
    """Return a sentence with the nearest function of the project or of another package on the
    stack; an empty text if there is none. The sentence is only a hint, because a function further
    out may have opened the transaction."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (module := str(frame.f_globals.get("__name__"))) not in _HANDLERS:
        if module.partition(".")[0] not in _BETWEEN:
            name = frame.f_code.co_qualname.partition(".<locals>")[0]
            return f"The nearest function outside Django on the stack is {module}.{name}."
        frame = frame.f_back
    return ""


def in_outer_transaction(using: str) -> bool:
    """Return whether a transaction is open. The transaction of a ``TestCase`` does not count, as in
    Django's ``atomic(durable=True)``."""
    return is_in_outer_transaction(connections[using])


def is_in_outer_transaction(connection: BaseDatabaseWrapper) -> bool:
    blocks = connection.atomic_blocks
    return bool(blocks) and not getattr(blocks[-1], "_from_testcase", False)


def require_autocommit(using: str) -> BaseDatabaseWrapper:
    """Return the connection. Raise RuntimeError if Django's autocommit is off. A block of
    ``atomic()`` commits nothing then, so an open block is checked too."""
    connection = connections[using]
    if connection.connection is None:
        connection.ensure_connection()  # sets ``autocommit``
    if not (connection.commit_on_exit if connection.in_atomic_block else connection.autocommit):
        raise RuntimeError(
            f"Django's autocommit is off on the connection to {using!r}, so nothing would be"
            " committed. Remove AUTOCOMMIT from DATABASES, or call"
            " transaction.set_autocommit(True) before."
        )
    return connection


def require_no_transaction(using: str) -> BaseDatabaseWrapper:
    """Return the connection. Raise RuntimeError if a transaction is open, because its rollback
    would undo committed phases. Raise RuntimeError also if autocommit is off."""
    connection = require_autocommit(using)
    if not connection.in_atomic_block and has_begun(connection):
        connection.close_at = time.monotonic()  # Django closes it at the end of the request.
        raise RuntimeError(
            f"A transaction that transaction.atomic() did not open is open on {using!r}, for"
            " example after BEGIN. Its rollback would undo committed work. End it before. "
            + nearest_function()
        )
    if is_in_outer_transaction(connection):
        raise RuntimeError(
            "Phased work, a phase, a call or a loop was entered inside a transaction, whose"
            " rollback would undo its committed work. Leave the outer transaction.atomic() first."
            " Phases and calls cannot be nested in a phase either. " + nearest_function()
        )
    return connection


def roll_back_unknown(using: str) -> bool:
    """Roll back a transaction that the work has begun by itself, for example with BEGIN, and log
    that. Return whether there was one. It would take what the app writes next with it."""
    connection = connections[using]
    if connection.connection is None or connection.in_atomic_block:
        return False
    # With its session, a transaction without autocommit was lost.
    is_over = not connection.autocommit and (is_active(connection) or is_closed(connection))
    if (begun := is_over or has_begun(connection)) or not connection.autocommit:
        try:
            if is_over:  # rollback() could wait without end.
                connection.close()
            connection.rollback()
            connection.set_autocommit(True)
        except Exception:
            connection.close()
    if begun:
        text = "a transaction that the work has begun on %r by itself was rolled back"
        with suppress(Exception):  # The handler of a log must not replace the result of the work.
            logger.error(text, using)
    return begun


def has_begun(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the driver has begun a transaction; drivers other than those of PostgreSQL and
    SQLite do not tell."""
    own: Any = connection.connection
    if connection.vendor == "postgresql":
        return own is not None and own.pgconn.transaction_status in _OPEN
    with suppress(Exception):  # It is closed.
        return connection.vendor == "sqlite" and bool(own.in_transaction)
    return False


def is_closed(connection: BaseDatabaseWrapper) -> bool:
    return bool(getattr(connection.connection, "closed", False))


def is_active(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a result was not read to its end, for example in an iterator of psycopg. The
    next statement of this thread would wait without end."""
    own: Any = connection.connection
    return (
        connection.vendor == "postgresql"
        and own is not None
        and own.pgconn.transaction_status == TransactionStatus.ACTIVE
        and own.pgconn.pipeline_status == PipelineStatus.OFF
    )
