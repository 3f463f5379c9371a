"""Confirm that commits are on the synchronous standbys: the setting ``CONFIRM_REPLICATED``.

PostgreSQL shows a commit to others when its wait for the standbys ends. A cancel, or a crash or
restart of the server, may cut the wait short. The commit is then visible on this server alone, and
a failover loses it. A barrier is a later commit. Its wait includes all earlier WAL, so all that was
visible before is on the standbys.
"""

import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import debug_transaction
from psycopg.errors import Diagnostic
from psycopg.pq import DiagnosticField, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from idempotency import conf
from idempotency._engine.database_product import is_citus, psycopg_connection
from idempotency._engine.errors import drop_connection
from idempotency.exceptions import NotReplicated

#: The time limit of a barrier. A connected standby confirms within milliseconds.
DEADLINE_SECONDS = 5.0
#: The time limit of the request that cancels a barrier.
_CANCEL_SECONDS = 2.0

#: The settings of PostgreSQL on which the wait of a commit depends, as arguments of ``obstacle``.
SETTINGS = (
    "current_setting('synchronous_standby_names'), current_setting('synchronous_commit'), "
    "current_setting('client_min_messages')"
)
#: A commit waits only if its transaction has written. The message needs no privilege, and is
#: allowed in READ ONLY.
_BARRIER = f"SELECT {SETTINGS}, pg_logical_emit_message(true, 'idempotency', '')"
#: The function that warns of a cancelled wait. The text of the warning is translated, and its
#: SQLSTATE is that of any warning.
_WAIT = "SyncRepWaitForLSN"


def obstacle(standby_names: str, synchronous_commit: str, client_min_messages: str) -> str:
    """Return why a commit would prove nothing with these settings of PostgreSQL, or an empty
    string."""
    by_storage = conf.get().CONFIRM_REPLICATED == "storage"
    if synchronous_commit == "off" or (synchronous_commit == "local" and not by_storage):
        return f"synchronous_commit is {synchronous_commit}"
    if not standby_names.strip() and not by_storage:
        return "synchronous_standby_names is empty"
    if client_min_messages == "error":
        return "client_min_messages is error, which hides the warning of a cancelled wait"
    return ""


def confirm(using: str) -> None:
    """Wait until the standbys have all commits that were visible before this call. Do nothing
    without CONFIRM_REPLICATED.

    The barrier is a commit of its own: in a transaction it takes a second connection. Inside
    ``TestCase`` nothing is committed, so nothing is confirmed.
    Raises NotReplicated if the settings of the server make the wait useless, or the standbys do not
    confirm in time.
    """
    if (
        not conf.get().CONFIRM_REPLICATED
        or (connection := connections[using]).vendor != "postgresql"
    ):
        return
    if connection.get_autocommit():
        _pass_barrier(connection)
    elif not any(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks):
        second = connections.create_connection(using)
        try:
            _pass_barrier(second)
        finally:
            second.close()


@contextmanager
def confirmed_commit(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Watch the commits of the block. Do nothing without CONFIRM_REPLICATED, and in a transaction,
    which commits later.

    Raises NotReplicated if the wait of one was cancelled. That commit is visible on this server,
    and may be lost.
    """
    if (
        not conf.get().CONFIRM_REPLICATED
        or connection.vendor != "postgresql"
        or connection.in_atomic_block
    ):
        yield
        return
    own = psycopg_connection(connection)
    cancelled: list[str] = []

    def note(notice: Diagnostic) -> None:
        if notice.source_function == _WAIT:
            cancelled.append(notice.message_primary or "")

    own.add_notice_handler(note)
    try:
        yield
    except Exception as error:
        # The error may be that of a hook, after the COMMIT.
        if not (own.closed and isinstance(error, Error | psycopg.Error)):
            _require_no_cancelled_wait(cancelled)
        raise
    finally:
        own.remove_notice_handler(note)
    if connection.connection is not own:
        # A phase has replaced a lost connection, and nobody has watched its COMMIT on the new one.
        confirm(connection.alias)
    _require_no_cancelled_wait(cancelled)


def _require_no_cancelled_wait(cancelled: list[str]) -> None:
    if cancelled:
        raise NotReplicated(f"The wait of a commit for its standby ended early: {cancelled[0]}.")


def _pass_barrier(connection: BaseDatabaseWrapper) -> None:
    own = psycopg_connection(connection)
    if is_citus(connection) and conf.get().CONFIRM_REPLICATED != "storage":
        raise NotReplicated(
            "The database is Citus: a commit of its coordinator does not confirm that the standbys"
            " of its workers have the earlier commits."
        )
    with (
        debug_transaction(connection, _BARRIER),
        connection.wrap_database_errors,
        confirmed_commit(connection),
    ):
        try:
            result = _result_in_time(own)
        finally:
            # at the deadline, or after an interrupt
            if own.pgconn.transaction_status == TransactionStatus.ACTIVE:
                _abandon(connection)
        if result is None:  # Raised here, so that the closed connection gets no second barrier.
            raise NotReplicated(f"No standby has confirmed within {DEADLINE_SECONDS:g} s.")
    if result.status != ExecStatus.TUPLES_OK:
        told = (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
        raise NotReplicated(f"The server refused the commit that confirms replication: {told}.")
    settings = [(result.get_value(0, column) or b"").decode() for column in range(3)]
    if why := obstacle(*settings):
        raise NotReplicated(f"The server cannot confirm replication: {why}.")


def _result_in_time(own: "psycopg.Connection[Any]") -> PGresult | None:
    """Run the barrier; return its result after COMMIT, or None at the deadline. No time limit of
    PostgreSQL ends the wait of a COMMIT, so the client measures it."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    server = own.pgconn
    server.send_query(_BARRIER.encode())
    result: PGresult | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(server.socket, selectors.EVENT_READ)
        while True:
            server.consume_input()
            while not server.is_busy():
                if (following := server.get_result()) is None:
                    return result
                result = following
            if (left := deadline - time.monotonic()) <= 0:
                return None
            selector.select(left)


def _abandon(connection: BaseDatabaseWrapper) -> None:
    """Cancel the barrier and drop the connection. Without the cancel its backend would wait on, and
    retries would add more."""
    own: psycopg.Connection[Any] = connection.connection
    with suppress(psycopg.Error):
        own.cancel_safe(timeout=_CANCEL_SECONDS)
    drop_connection(connection)
