"""Errors that code of the project, such as a receiver of a signal, has caught in a transaction.

Such an error has broken the transaction. COMMIT then rolls back without an error. If such code can
run after the last statement of a transaction of this app, check the transaction before its end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction
from django.db.transaction import TransactionManagementError
from psycopg.pq import TransactionStatus

ROLLED_BACK = (
    "The block caught an error that broke its transaction, or marked it for rollback, so all its"
    " writes were rolled back. Put the statement whose error the block catches into a separate"
    " transaction.atomic(), and do not close the connection."
)


@contextmanager
def checked_atomic(using: str | None, *, durable: bool = False) -> Iterator[None]:
    """Run the block in ``atomic()``, with ``refuse_rollback()`` at its end."""
    with transaction.atomic(using=using, durable=durable):
        yield
        refuse_rollback(using)


def refuse_rollback(using: str | None) -> None:
    """Raise TransactionManagementError if the open transaction or savepoint can only be rolled
    back."""
    if can_only_roll_back(using):
        raise TransactionManagementError(ROLLED_BACK)


def can_only_roll_back(using: str | None) -> bool:
    """Return whether a transaction is open that can only be rolled back. Django notes
    errors of some writes only; PostgreSQL notes each error."""
    connection = transaction.get_connection(using)
    if connection.needs_rollback:
        return True
    own = connection.connection
    if connection.vendor != "postgresql" or own is None:
        return False
    return bool(own.info.transaction_status == TransactionStatus.INERROR)
