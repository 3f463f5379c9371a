"""The savepoint of a key in a transaction that its caller has opened, such as a middleware.

The key, its work and its result commit with that transaction or are rolled back with it. The app
sets nothing in it: a setting of SET LOCAL would outlive the savepoint.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from idempotency import conf
from idempotency._engine.adapter import Work
from idempotency._engine.cursors import classified_errors
from idempotency._engine.events import log
from idempotency._engine.outer_transactions import nearest_function, require_autocommit
from idempotency._engine.transactions import OwnBlock, OwnTransaction
from idempotency.models import IdempotencyKey

#: The most keys in one transaction. Each holds two advisory locks until its end, and the server has
#: one table for the locks of all sessions.
MAX_KEYS = 1000


def check_outer_transaction(work: Work, *, using: str) -> None:
    """Raise RuntimeError if a key cannot be claimed in the open transaction of the caller. Only
    work that ``nests`` may be a part of another run's transaction."""
    isolation = work.level()
    require_autocommit(using)
    connection = connections[using]
    is_in_run = any(isinstance(block, OwnBlock) for block in connection.atomic_blocks)
    if is_in_run and not work.nests:
        problem = (
            f"The {work.kind} {work.name} was entered inside the transaction of another run, with"
            " another key. Call it outside."
        )
    elif conf.get().CONFIRM_REPLICATED and not is_in_run:  # A run confirms its own COMMIT.
        problem = (
            f"With CONFIRM_REPLICATED, the {work.kind} {work.name} cannot run inside an outer"
            " transaction, whose COMMIT this app cannot confirm. Leave that transaction first."
        )
    elif isolation is not None and (level := _level(connection)) not in (None, isolation):
        problem = (
            f"The {work.kind} {work.name} requires the isolation {isolation!r}, but it was entered"
            f" inside an outer transaction at {level!r}. Open that transaction at {isolation!r}, or"
            " leave it first."
        )
    else:
        return
    raise RuntimeError(f"{problem} {nearest_function()}".strip())


@contextmanager
def savepoint(*, using: str) -> Iterator[OwnTransaction]:
    """Run the block in a savepoint of the open transaction, which is rolled back on an exception.
    Raises RuntimeError if the block closes the connection or enters a durable block."""
    connection = connections[using]
    own = OwnTransaction(connection, durable=False)
    with classified_errors(connection, own=False), own.block:
        try:
            yield own
            own.end()
        except Exception as error:
            own.raise_misuse(error)
            raise


def hold(key: IdempotencyKey, *, using: str) -> None:
    """Count the claimed key in the open transaction, and log at its COMMIT if that is later than
    its lease. A rollback to an earlier savepoint releases the key and undoes the count. Raises
    RuntimeError above MAX_KEYS."""
    hooks = connections[using].run_on_commit
    if sum(isinstance(hook, _HeldKey) for _, hook, _ in hooks) >= MAX_KEYS:  # type: ignore[misc]  # the stubs know two
        raise RuntimeError(
            f"The outer transaction has claimed {MAX_KEYS:,} idempotency keys already. Each holds"
            " two advisory locks until the end of the transaction, and more could exhaust the"
            " server's table of locks for all sessions. Use smaller transactions."
            f" {nearest_function()}".strip()
        )
    transaction.on_commit(_HeldKey(key), using=using)


class _HeldKey:
    """A hook of ``on_commit``: Django keeps the hooks of the work that the open transaction still
    contains."""

    def __init__(self, key: IdempotencyKey) -> None:
        self._key, self._since = key, time.monotonic()

    def __call__(self) -> None:
        held = time.monotonic() - self._since
        if held > self._key.lease_seconds:
            text = "key %s was held for %d s by an outer transaction, until its COMMIT. %s"
            log(WARNING, text, self._key, held, nearest_function())


def _level(connection: BaseDatabaseWrapper) -> str | None:
    """Return the level of the open transaction; the level of a ``TestCase`` and of SQLite is not
    compared."""
    if connection.vendor != "postgresql" or getattr(
        connection.atomic_blocks[0], "_from_testcase", False
    ):
        return None
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('transaction_isolation')")
        level: str = cursor.fetchone()[0]
        return level
