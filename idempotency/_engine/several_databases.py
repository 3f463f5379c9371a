"""The transactions of a plain run in other databases, and their COMMITs before that of the key."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError
from psycopg.pq import TransactionStatus

from idempotency._engine.caught_errors import refuse_rollback
from idempotency._engine.errors import has_ended

_BEGUN = (TransactionStatus.ACTIVE, TransactionStatus.INTRANS, TransactionStatus.INERROR)


class OtherTransactions:
    """The transactions of a plain run in the databases ``aliases``. They commit before the key,
    whose connection is ``last``. A database to which the work sends nothing takes no part: psycopg
    sends BEGIN with the first statement."""

    def __init__(self, aliases: list[str], *, last: BaseDatabaseWrapper) -> None:
        self._last, self._aliases = last, aliases
        #: The databases to which a statement was sent in the block.
        self._used: set[str] = set()
        #: The databases whose COMMIT has succeeded.
        self.committed: list[str] = []

    def atomic(self) -> AbstractContextManager[None]:
        """Run the block in the transactions, and commit them at its end."""
        return self._atomic() if self._aliases else nullcontext()

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        with ExitStack() as stack:
            for alias in self._aliases:
                stack.enter_context(transaction.atomic(using=alias))
                stack.enter_context(
                    _first_statement_noted(connections[alias], partial(self._used.add, alias))
                )
            yield

    def set_rollback(self) -> None:
        """Mark them for rollback, with the transaction of the key."""
        self._last.set_rollback(True)
        for alias in self._aliases:
            transaction.set_rollback(True, using=alias)

    @property
    def used(self) -> list[str]:
        """Return the databases to which the work has sent something. COPY and the methods of
        psycopg's connection pass no wrapper, so look at the transaction too."""
        return [
            alias
            for alias in self._aliases
            if alias in self._used or _has_begun(connections[alias])
        ]

    def marked_for_rollback(self) -> list[Any]:
        """Return the connections, with that of the key, whose COMMIT would be a rollback of what
        the work has sent."""
        every = [self._last, *[connections[alias] for alias in self.used]]
        return [connection for connection in every if connection.needs_rollback]

    def prepare_commits(self) -> None:
        """Check for errors of the COMMITs while all can still be rolled back. Do nothing if no
        other database was used.

        The on_commit hooks of the other databases are moved to the COMMIT of the key. A
        serialization failure or a lost connection can still make a COMMIT fail.
        Raises IntegrityError for a deferred constraint.
        Raises TransactionManagementError for a transaction that is broken or that the work has
        ended, whose COMMIT would be a silent rollback.
        """
        used = self.used
        committing = [self._last, *[connections[alias] for alias in used]] if used else []
        for connection in committing:
            _check_commit(connection)
        for connection in committing:  # A wrapper of a check may have caught an error.
            refuse_rollback(connection.alias)
        for alias in self._aliases:
            connection = connections[alias]
            if len(connection.atomic_blocks) > 1 or connection.needs_rollback:
                continue  # A TestCase never commits. The hooks of a rollback are dropped.
            hooks, connection.run_on_commit = connection.run_on_commit, []
            for _, hook, robust in hooks:  # type: ignore[misc]  # the stubs know two of the three
                self._last.on_commit(hook, robust)
            if alias in used:
                transaction.on_commit(partial(self.committed.append, alias), using=alias)


def _check_commit(connection: BaseDatabaseWrapper) -> None:
    if has_ended(connection):
        raise TransactionManagementError(
            f"COMMIT or ROLLBACK has ended the transaction on {connection.alias!r} too early."
        )
    connection.validate_no_broken_transaction()
    if connection.features.can_defer_constraint_checks:
        connection.check_constraints()


def _has_begun(connection: BaseDatabaseWrapper) -> bool:
    # Django itself sends BEGIN to other databases than PostgreSQL.
    own = connection.connection
    return (
        connection.vendor == "postgresql"
        and own is not None
        and own.info.transaction_status in _BEGUN
    )


@contextmanager
def _first_statement_noted(
    connection: BaseDatabaseWrapper, note: Callable[[], None]
) -> Iterator[None]:
    """Call ``note`` when a cursor of the connection sends a statement in the block."""

    def wrapper(execute: Callable[..., Any], *statement: Any) -> Any:
        note()
        return execute(*statement)

    connection.execute_wrappers.append(wrapper)
    try:
        yield
    finally:
        # The work may have left a wrapper of its own, or have removed this one.
        connection.execute_wrappers = [
            other for other in connection.execute_wrappers if other is not wrapper
        ]
