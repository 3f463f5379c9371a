"""The inbox: a message that is delivered twice takes effect once.

The row that says "processed" and the effects commit together; so a failure leaves no row, and the next delivery does the work.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from itertools import chain

from django.db import DatabaseError, InterfaceError, OperationalError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from idempotency import conf
from idempotency.contexts import either_context
from idempotency.exceptions import MessageInProgress
from idempotency.models import ProcessedMessage
from idempotency.transactions import own_cursor

#: How long a delivery waits for another delivery of the same message. Below the patience of those who send webhooks.
WAIT_SECONDS = 5

#: The source of the messages that staged jobs are, whatever broker delivers them.
STAGED_JOBS = "staged-job"

_LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL: lock_timeout ran out
_BUSY_OR_LOCKED = (5, 6)  # SQLite: another connection, or another one of the shared cache, writes

_INSERT = "INSERT INTO {} (source, message_id) VALUES (%s, %s) ON CONFLICT (source, message_id) DO NOTHING"


@either_context(holds_transaction=True)
def process_once(source: str, message_id: str, *, using: str | None = None) -> Iterator[bool]:
    """Open a transaction for one delivery of a message; give True the first time, False when it took effect before.

    ``source`` says who numbers the messages ("stripe"), ``message_id`` is their number (at most 100 and 255 characters). On
    leaving, the row and what the block wrote are committed together; when the block raises, neither is, nor when it caught an
    error that broke the transaction: that raises TransactionManagementError. In an outer transaction the block is a savepoint
    and commits with that one.

    A second delivery waits for the first, up to 5 s on PostgreSQL (on SQLite up to the connection's ``timeout``), and then
    raises MessageInProgress: refuse it, so that it is delivered again. Raises ValueError when the source or the id cannot be
    kept.
    """
    columns = ProcessedMessage._meta
    widths = (columns.get_field("source").max_length or 0, columns.get_field("message_id").max_length or 0)
    for name, value, width in zip(("source", "message_id"), (source, message_id), widths, strict=True):
        if not isinstance(value, str) or not 0 < len(value) <= width or "\0" in value:
            raise ValueError(f"The {name} of a message is a string of 1 to {width} characters without NUL, not {value!r}.")
    alias = using or router.db_for_write(ProcessedMessage)
    own = not connections[alias].in_atomic_block
    with ExitStack() as stack:
        try:
            stack.enter_context(transaction.atomic(using=alias))
            first, transaction_id = _insert(connections[alias], source, message_id, idle_limit=own)
        except OperationalError as error:
            if _is_held_by_another(error):
                raise MessageInProgress from error
            raise
        yield first
        if first:
            _refuse_broken_transaction(connections[alias], transaction_id)


def took_effect(source: str, message_ids: Collection[str], *, using: str | None = None) -> set[str]:
    """Return those of ``message_ids`` that were processed, and that within the retention; nothing is written."""
    if not message_ids:
        return set()
    messages = ProcessedMessage.objects.using(using or router.db_for_write(ProcessedMessage))
    return set(messages.filter(source=source, message_id__in=message_ids).values_list("message_id", flat=True))


def _refuse_broken_transaction(connection: BaseDatabaseWrapper, transaction_id: object) -> None:
    """Raise when the open transaction can only be rolled back, or is another one: leaving it would do so without a word."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {_transaction_id(connection)}")
            (still,) = cursor.fetchone()
    except (OperationalError, InterfaceError):
        raise
    except DatabaseError as error:
        raise TransactionManagementError(
            "The work on this message broke its transaction and went on, so nothing of it was kept. Put a transaction.atomic() "
            "of its own around the statement whose error is caught, and leave the connection open."
        ) from error
    if still != transaction_id:
        raise TransactionManagementError(
            "The work on this message ended its transaction by itself, with COMMIT or ROLLBACK: whether the message counts as "
            "processed is no longer what its work says. Use transaction.atomic(), and transaction.set_rollback()."
        )


def _transaction_id(connection: BaseDatabaseWrapper) -> str:
    return "pg_current_xact_id_if_assigned()::text" if connection.vendor == "postgresql" else "1"


def _insert(connection: BaseDatabaseWrapper, source: str, message_id: str, *, idle_limit: bool) -> tuple[bool, object]:
    """Insert the row, waiting for whoever inserts the same one; return whether it is new, and the transaction it is in.

    ``idle_limit`` ends the transaction when it stands still for INBOX_IDLE_SECONDS, which would hold its message for ever. An
    outer one has limits of its own.
    """
    bounded = connection.vendor == "postgresql"
    with own_cursor(connection.alias) as cursor:
        if bounded:
            cursor.execute("SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)", [f"{WAIT_SECONDS}s"])
            before = cursor.fetchone()[0]
        cursor.execute(_INSERT.format(connection.ops.quote_name(ProcessedMessage._meta.db_table)), [source, message_id])
        first: bool = cursor.rowcount == 1
        transaction_id: object = 1
        if bounded:
            # The statements of the block keep the caller's own limit.
            limits = {"lock_timeout": before}
            if idle_limit:
                limits["idle_in_transaction_session_timeout"] = f"{conf.get().INBOX_IDLE_SECONDS}s"
            set_limits = ", set_config(%s, %s, true)" * len(limits)
            cursor.execute(f"SELECT {_transaction_id(connection)}{set_limits}", [*chain.from_iterable(limits.items())])
            transaction_id = cursor.fetchone()[0]
    return first, transaction_id


def _is_held_by_another(error: OperationalError) -> bool:
    cause = error.__cause__
    if getattr(cause, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
        return True
    return getattr(cause, "sqlite_errorcode", 0) & 0xFF in _BUSY_OR_LOCKED
