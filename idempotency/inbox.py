"""The inbox: a message that is delivered twice takes effect once.

The row that marks the message as processed commits together with the effects. After a failure there
is no row, so the next delivery repeats the work.
"""

import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack

from django.db import (
    DatabaseError,
    Error,
    InterfaceError,
    InternalError,
    OperationalError,
    connections,
    router,
    transaction,
)
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from idempotency import conf
from idempotency._async import either_context
from idempotency._engine import replication
from idempotency._engine.caught_errors import ROLLED_BACK, refuse_rollback
from idempotency._engine.cursors import changed_rows, classified_errors
from idempotency._engine.database_product import require_postgresql
from idempotency._engine.errors import has_ended, serialization_failed
from idempotency._engine.limits import IDLE, LOCK, limit_waits, limit_waits_on_workers, lowered
from idempotency._engine.outer_transactions import require_autocommit
from idempotency._engine.transactions import MARKER
from idempotency._text import refuse_text
from idempotency.exceptions import MessageInProgress
from idempotency.models import ProcessedMessage, StagedJob

#: The time for which a delivery waits for another one of the same message. Senders of webhooks wait
#: longer.
WAIT_SECONDS = 5

#: The source of the messages of staged jobs, for each broker.
STAGED_JOBS = "staged-job"

#: PostgreSQL: lock_timeout, statement_timeout or transaction_timeout ran out.
_WAITED_TOO_LONG = ("55P03", "57014", "25P04")
_BUSY_OR_LOCKED = (5, 6)  # SQLite: another connection writes

#: Blocks in one transaction share its marker.
_SET_MARKER = f"set_config('idempotency.transaction', COALESCE(NULLIF({MARKER}, ''), %s), true)"

_INSERT = (
    "INSERT INTO {} (source, message_id) VALUES (%s, %s) ON CONFLICT (source, message_id) DO"
    " NOTHING"
)


@either_context(holds_transaction=True)
def process_once(source: str, message_id: str, *, using: str | None = None) -> Iterator[bool]:
    """Open a transaction for one delivery of a message. The variable of the block is True for the
    first delivery, and False if the message took effect before.

    The argument ``source`` names the sender ("stripe"), at most 100 characters. The argument
    ``message_id`` is the id that the sender gave to the message, at most 255 characters. At the end
    of the block the row and the writes of the block are committed. If the block raises, they are
    rolled back. In an outer transaction the block is a savepoint and commits with the outer one. A
    second delivery waits up to 5 seconds for the first, or up to a lower time limit of the role; on
    SQLite, up to the ``timeout`` of the connection.
    Raises MessageInProgress after that wait, and above READ COMMITTED if the first delivery has
    committed meanwhile. Refuse the delivery, so that it is repeated.
    Raises NotReplicated if the standbys do not confirm the effect of an earlier delivery or of this
    block (CONFIRM_REPLICATED).
    Raises TransactionManagementError if the block caught an error that broke the transaction, or
    ended it by COMMIT or ROLLBACK.
    Raises RuntimeError if autocommit is off.
    Raises ValueError if the source or the id cannot be stored.
    """
    for name, value in (("source", source), ("message_id", message_id)):
        refuse_text(f"The {name} of a message", value, ProcessedMessage._meta.get_field(name))
    alias = using or router.db_for_write(ProcessedMessage)
    require_autocommit(alias)
    own = not connections[alias].in_atomic_block
    with ExitStack() as stack:
        try:
            stack.enter_context(replication.confirmed_commit(connections[alias]))
            stack.enter_context(transaction.atomic(using=alias))
            first, marker = _insert(connections[alias], source, message_id, idle_limit=own)
        except (OperationalError, InternalError) as error:
            # In an outer transaction, its owner may begin again after a serialization failure.
            if _is_held_by_another(error) or (own and serialization_failed(error)):
                raise MessageInProgress from error
            raise
        if not first:
            replication.confirm(alias)
        elif not own and conf.get().CONFIRM_REPLICATED:
            # A callback of this app: _boundary.callbacks() does not count it. The code that commits
            # gets its exception.
            transaction.on_commit(lambda: replication.confirm(alias), using=alias)
        yield first
        if first:
            _refuse_broken_transaction(connections[alias], marker)


def took_effect(source: str, message_ids: Collection[str], *, using: str | None = None) -> set[str]:
    """Return those of ``message_ids`` that were processed within the retention of messages.

    Raises NotReplicated if the standbys do not confirm them (CONFIRM_REPLICATED).
    """
    alias = using or router.db_for_write(ProcessedMessage)
    messages = ProcessedMessage.objects.using(alias).filter(
        source=source, message_id__in=message_ids
    )
    if found := set(messages.values_list("message_id", flat=True)):
        replication.confirm(alias)
    return found


def jobs_done(jobs: Sequence[StagedJob]) -> set[uuid.UUID]:
    """Return the ids of those jobs that were handed over before and took effect.

    On an error of the database the open transaction is not broken."""
    # A retried job has no hand-overs, but keeps its last error.
    again = {str(job.pk): job.pk for job in jobs if job.hand_overs or job.last_error}
    if not again:
        return set()
    with transaction.atomic(using=(alias := jobs[0]._state.db)):
        return {again[job_id] for job_id in took_effect(STAGED_JOBS, again, using=alias)}


def _refuse_broken_transaction(connection: BaseDatabaseWrapper, marker: str) -> None:
    """Raise if the transaction is broken, or is not the one that the block opened. Without this
    error, nobody would notice its rollback."""
    # SQLite has no settings.
    sql = f"SELECT {MARKER}" if connection.vendor == "postgresql" else "SELECT ''"
    try:
        with connection.cursor() as cursor:
            cursor.execute(sql)
            (still,) = cursor.fetchone()
    except (OperationalError, InterfaceError):
        raise
    except DatabaseError as error:
        raise TransactionManagementError(ROLLED_BACK) from error
    if still != marker or has_ended(connection):
        raise TransactionManagementError(
            "The block ended its transaction with COMMIT or ROLLBACK, so its writes and the mark of"
            " the message may not agree. Use transaction.atomic() and transaction.set_rollback()."
        )
    refuse_rollback(connection.alias)  # A wrapper of this statement may have caught an error.


def _insert(
    connection: BaseDatabaseWrapper, source: str, message_id: str, *, idle_limit: bool
) -> tuple[bool, str]:
    """Insert the row, after waiting for a concurrent insert. Return whether it is new, and the
    marker of the transaction. With ``idle_limit`` the database ends the transaction after
    INBOX_IDLE_SECONDS without a statement. Otherwise a process that hangs would hold the message
    without end."""
    if bounded := connection.vendor == "postgresql":
        require_postgresql(connection)
    # Of Django's kind: psycopg would prepare the statements of another one, and after a rollback it
    # would drop those of requests with them.
    with classified_errors(connection), connection.cursor() as cursor:
        if bounded:
            before = limit_waits(cursor, connection, f"{WAIT_SECONDS}s")
        cursor.execute(
            _INSERT.format(connection.ops.quote_name(ProcessedMessage._meta.db_table)),
            [source, message_id],
        )
        first = changed_rows(cursor) == 1
        marker = ""
        if bounded:
            # The statements of the block keep the caller's limit.
            idle = f", {lowered(IDLE, f'{conf.get().INBOX_IDLE_SECONDS}s')}" if idle_limit else ""
            cursor.execute(
                f"SELECT {_SET_MARKER}, set_config('{LOCK}', %s, true){idle}",
                [uuid.uuid4().hex, before],
            )
            marker = cursor.fetchone()[0]
            limit_waits_on_workers(cursor, connection, before)
    return first, marker


def _is_held_by_another(error: Error) -> bool:
    cause = error.__cause__
    if getattr(cause, "sqlstate", None) in _WAITED_TOO_LONG:
        return True
    return getattr(cause, "sqlite_errorcode", 0) & 0xFF in _BUSY_OR_LOCKED
