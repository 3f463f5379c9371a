"""The boundary of project code that a loop runs: the checks of connections that Django makes around
a request.

A loop sends no signals of requests. Without these checks, one lost connection would fail all later
runs of its thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from uuid import UUID

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from idempotency._engine.errors import drop_connection, has_ended
from idempotency._engine.outer_transactions import has_begun, is_closed
from idempotency.models import StagedJob


class TransactionBroken(Exception):
    """Raised through ``hand_over()`` when the transaction of the enqueuer can only be rolled back,
    for example after a lost connection. ``job`` is the job of the hand-over that found or caused
    it, if it is known; ``results`` has those before."""

    def __init__(self, job: StagedJob | None, results: dict[UUID, Any]) -> None:
        super().__init__("The transaction of the enqueuer is broken.")
        self.job, self.results = job, results


@contextmanager
def boundary() -> Iterator[None]:
    """Run project code with the connections of this thread checked, before and after it, as around
    a request.

    Before the block, lost connections are closed. After the block, these connections are closed:

    - connections that were lost, or that are older than CONN_MAX_AGE
    - connections without autocommit, or in a transaction that was not opened by ``atomic()``

    The checks concern the connections to all databases. A connection inside ``atomic()`` stays as
    it is, so that the block may run in a transaction of the loop.
    """
    drop_unusable_connections()
    with checked_at_end():
        yield


@contextmanager
def checked_at_end() -> Iterator[None]:
    """Check the connections as at the end of ``boundary()``. At the beginning, a lost session must
    not be replaced: PREPARE_REQUEST may have set it up."""
    try:
        yield
    finally:
        drop_broken_connections()
        for connection in _open_connections():
            connection.close_if_unusable_or_obsolete()


def drop_unusable_connections() -> None:
    """Close the connections that were lost; this takes a round trip for each open one."""
    for connection in _open_connections():
        if not connection.is_usable():
            drop_connection(connection)


def drop_broken_connections() -> list[str]:
    """Close the connections that were lost, or that project code left without autocommit or in a
    transaction. Return the aliases of those whose transaction was open, and is now rolled back.

    Unlike ``boundary()``, this function needs no round trip unless a statement has failed, and
    keeps old connections. It therefore suits the end of each single job.
    """
    rolled_back = []
    for connection in _open_connections():
        autocommit = connection.get_autocommit()
        changed = autocommit != connection.settings_dict["AUTOCOMMIT"]
        if changed or (autocommit and has_begun(connection)):
            if has_begun(connection) or (not autocommit and is_closed(connection)):
                rolled_back.append(connection.alias)
            drop_connection(connection)
        elif autocommit and connection.vendor == "postgresql" and not has_ended(connection):
            # COPY notes no error of a lost session. An iterator that was not read to its end holds
            # a lock, for which the next statement would wait.
            drop_connection(connection)
        elif connection.errors_occurred:
            if connection.is_usable():
                connection.errors_occurred = False
            else:
                drop_connection(connection)
    return rolled_back


def refuse_open_transaction() -> None:
    """Drop the broken connections. Raise RuntimeError if a hand-over left a transaction open on
    one."""
    if aliases := drop_broken_connections():
        raise RuntimeError(
            f"The hand-over left a transaction open on {', '.join(map(repr, aliases))}. It was"
            " rolled back. Commit it in the hand-over, for example with transaction.atomic()."
        )


def transaction_is_broken(alias: str | None, error: BaseException) -> bool:
    """Return whether the open transaction of the loop can only be rolled back, after an error of
    project code in it."""
    connection = connections[str(alias)]
    return connection.needs_rollback or (isinstance(error, Error) and not connection.is_usable())


def callbacks() -> int:
    """Return the number of on_commit callbacks. Callbacks of this app do not count, because no job
    depends on them."""
    entries = (each.run_on_commit for each in connections.all(initialized_only=True))
    modules = [getattr(entry[1], "__module__", "") for entry in chain.from_iterable(entries)]
    return sum(not str(module).startswith("idempotency.") for module in modules)


def _open_connections() -> list[BaseDatabaseWrapper]:
    """Return the open connections of this thread that are not inside ``atomic()``."""
    every = connections.all(initialized_only=True)
    return [each for each in every if each.connection is not None and not each.in_atomic_block]
