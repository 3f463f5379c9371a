"""The transactions of several databases: those of ATOMIC_REQUESTS beside the one of the key."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from django.db import connections, transaction
from django.db.transaction import TransactionManagementError

from idempotency._store.database_errors import has_ended


def atomic_aliases(view: Callable[..., Any] | None = None) -> list[str]:
    """Return the databases with ATOMIC_REQUESTS from which the view is not excluded; without a view, all of them."""
    left_out = getattr(view, "_non_atomic_requests", ())
    return [name for name, of in connections.settings.items() if of.get("ATOMIC_REQUESTS") and name not in left_out]


@contextmanager
def atomic_request(view: Callable[..., Any], *, besides: str | None = None) -> Iterator[list[str]]:
    """Run the block in a transaction on each database with ATOMIC_REQUESTS, unless the view is ``non_atomic_requests``. Yield
    their aliases, without ``besides``: its transaction is already open, and commits after these."""
    aliases = [name for name in atomic_aliases(view) if name != besides]
    with ExitStack() as stack:
        for alias in aliases:
            stack.enter_context(transaction.atomic(using=alias))
        yield aliases


def prepare_commits(aliases: list[str], committed: list[str], *, last: str) -> None:
    """Check for errors of the COMMITs of ``aliases`` and ``last`` while all can still be rolled back.

    After its COMMIT, each alias is added to ``committed``. Its on_commit hooks are moved to the COMMIT of ``last``. A
    serialization failure or a lost connection can still make a COMMIT fail.
    Raises IntegrityError for a deferred constraint.
    Raises TransactionManagementError for a transaction that is broken or that the view has ended, whose COMMIT would be a
    silent rollback.
    """
    for alias in (last, *aliases):
        if has_ended(connections[alias]):
            raise TransactionManagementError(f"The view has ended its transaction on {alias!r} by COMMIT or ROLLBACK.")
        connections[alias].validate_no_broken_transaction()
        if connections[alias].features.can_defer_constraint_checks:
            connections[alias].check_constraints()
    for alias in aliases:
        connection = connections[alias]
        if len(connection.atomic_blocks) == 1:  # More in a TestCase, which never commits.
            hooks, connection.run_on_commit = connection.run_on_commit, []
            for _, hook, robust in hooks:  # type: ignore[misc]  # the stubs know two of the three
                transaction.on_commit(hook, using=last, robust=robust)
            transaction.on_commit(partial(committed.append, alias), using=alias)
