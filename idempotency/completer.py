"""The completer: claims abandoned keys, rebuilds their requests and runs their views.

Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" (the completer).
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from django.db import connections, router

from idempotency._bulk_work import Turns
from idempotency._engine.outer_transactions import require_no_transaction
from idempotency._key_completion import AbandonedKeys, complete_by_id
from idempotency.models import IdempotencyKey


@dataclass(frozen=True, slots=True)
class CompletePass:
    """The counts of one pass: keys that were finished, that failed and will be retried, and that
    became stuck."""

    finished: int = 0
    failed: int = 0
    stuck: int = 0


def complete_once(
    *,
    batch_size: int = 100,
    concurrency: int = 1,
    dry_run: bool = False,
    using: str | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> CompletePass:
    """Run the request of each abandoned key from its recovery point, as its sender. Several
    completers may run concurrently.

    On return each key that was claimed is finished, stuck, or released. A released key is due again
    after a wait that doubles with each run. Exceptions of views are logged and stored on the key.
    Scopes take turns, so that failing keys of one scope do not delay the others. The pass also runs
    keys that become due while it runs other keys. Between the keys it does bulk work of the admin.
    The pass ends when all keys that were due at its beginning have run, and no bulk work is left.

    - ``batch_size``: the number of keys read at a time, at most ten of each scope.
    - ``concurrency``: the number of threads, each with its own connections. With 1 the keys run in
      the thread of the caller.
    - ``dry_run``: run no key. The count ``finished`` of the result is the number of keys that would
      be run. The outcomes of these runs are unknown.
    - ``stop``: called before each key; True ends the pass.

    Raises RuntimeError in a transaction, and if autocommit is off.
    Raises OperationalError or InterfaceError if the database cannot be reached.
    """
    alias = using or router.db_for_write(IdempotencyKey)
    if dry_run:
        return CompletePass(finished=IdempotencyKey.objects.using(alias).abandoned().count())
    keys = AbandonedKeys(alias, batch_size)
    keys.begin()
    run_keys = partial(keys.complete, stop, Turns(alias).take)

    def run_keys_and_disconnect() -> Counter[str]:
        try:
            return run_keys()
        finally:
            connections.close_all()

    if concurrency == 1:
        return CompletePass(**run_keys())
    with ThreadPoolExecutor(concurrency, thread_name_prefix="completer") as pool:
        runs = [pool.submit(run_keys_and_disconnect) for _ in range(concurrency)]
    return CompletePass(**sum((run.result() for run in runs), Counter()))


def complete_key(pk: int, *, using: str | None = None) -> str | None:
    """Run one key from its recovery point now, whatever its age.

    Return the result of the run: "finished", "stuck" or "failed". After "failed", the key is
    released with its error, and is due again after COMPLETER_IDLE_SECONDS. If a part of its request
    is not stored, and the key is untouched, only a retry of the client runs it. Exceptions of the
    view are logged and stored on the key.

    Return None, without any change, in these cases:

    - A run holds the key, or its lock expired less than 1.5 leases ago.
    - The key is finished or refused.
    - The key is stuck with a code other than ``unknown_recovery_point``, ``operation_missing`` and
      ``arguments_changed``.
    - The delay after the last run of the completer is not over.

    Raises RuntimeError in a transaction, and if autocommit is off.
    Raises OperationalError or InterfaceError if the database cannot be reached.
    """
    alias = using or router.db_for_write(IdempotencyKey)
    require_no_transaction(alias)
    return complete_by_id(pk, 0, alias)
