"""The completer: finishes requests whose client has gone away.

It claims an abandoned key by its row, has its request run again (``idempotency.rebuilt``), and sees what became of the key.
Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres" (the completer).
"""

import logging
import threading
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from django.db import Error, connections, router
from django.db.models import Window
from django.db.models.functions import Now, RowNumber
from django.urls import Resolver404

from idempotency import claims, conf, http, keys, signals
from idempotency.abandonment import on_abandon_of
from idempotency.exceptions import KeyStuck, LockLost
from idempotency.execution import HTTP_EXCEPTIONS
from idempotency.models import REFUSED_WHEN_REBUILT, IdempotencyKey, IdempotencyKeyQuerySet
from idempotency.options import match_of, options_of
from idempotency.rebuilt import CannotRun, run_again
from idempotency.transactions import connection_lost, takes_no_writes

logger = logging.getLogger("idempotency")

#: The stuck code of a key that the completer has run often enough.
ATTEMPTS_EXHAUSTED = "attempts_exhausted"
#: After so many runs a key whose rebuilt request is refused, with nothing begun under it, is left to its client.
_RUNS_BEFORE_REFUSED = 5
#: The longest wait between two runs of one key. With it 25 attempts last for three days: from Friday to Monday.
_MAX_DELAY_SECONDS = 4 * 3600
#: So many keys of one scope are taken, then the database is asked again which scopes have some.
_IN_A_ROW = 10


@dataclass(frozen=True, slots=True)
class CompletePass:
    """What one pass did with the keys that it took: finished them, will try them again, or handed them to a person."""

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
    """Run each abandoned key on from its recovery point, as its own user; several completers may run at once.

    On return each key that was taken is finished, stuck, or released and due again after a wait that doubles with each run.
    What a view raises is logged and kept on its key. Scopes take turns, so that the failing keys of one scope do not hold up
    the keys of others. ``batch_size``: how many keys are read at a time, at most ten of each scope. ``concurrency``: how many
    run at once, each in a thread with connections of its own, which are closed on return; a single one runs in the caller's
    thread. ``stop`` is asked before each key. ``dry_run`` only counts, as failed, those that would be run.
    """
    alias = using or router.db_for_write(IdempotencyKey)
    if dry_run:
        return CompletePass(failed=_abandoned(alias).count())
    left: list[int] = []
    waiting, one_at_a_time = _waiting(alias, batch_size, left), threading.Lock()

    def run_keys() -> Counter[str]:
        counts: Counter[str] = Counter()
        while not stop():
            with one_at_a_time:
                key = next(waiting, None)
            if key is None:
                break
            if outcome := _complete(*key, alias):
                counts[outcome] += 1
            else:
                left.append(key[0])
        return counts

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
    """Run one unlocked key that is not stuck on from its recovery point, now, however young it is.

    Return "finished", "stuck", or "failed" for a key that was released with its error, and is due again after
    COMPLETER_IDLE_SECONDS; None, with nothing done, when a run holds it, a person has it, it has its response, its client was
    refused, or its next run is not due. What the view raises is logged and kept on the key; a lost database is raised. Not for
    use in a transaction.
    """
    return _complete(pk, 0, using or router.db_for_write(IdempotencyKey))


def _abandoned(alias: str) -> IdempotencyKeyQuerySet:
    return IdempotencyKeyQuerySet(IdempotencyKey, using=alias).abandoned()


def _waiting(alias: str, batch_size: int, left: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the id of each abandoned key and the number of its runs, each key once, the scopes in turn.

    A key that was claimed is recognised by the time of its last run; ``left`` has those that were not claimed.
    """
    begun = None
    turn = Window(RowNumber(), partition_by="scope", order_by="pk")
    while True:
        waiting = _abandoned(alias).filter(last_run_at__lt=begun or Now()).exclude(pk__in=left)
        in_turn = waiting.annotate(turn=turn).filter(turn__lte=_IN_A_ROW).order_by("turn", "pk")
        batch = list(in_turn.values_list("pk", "completer_attempts", "stuck_code", Now())[:batch_size])
        if not batch:
            return
        begun = begun or batch[0][-1]
        for pk, attempts, stuck_code, _ in batch:
            # What a deploy left is not claimed in vain: a claim would fill its history, and come between a person and the key.
            if stuck_code and not _knows_point_of(pk, alias):
                left.append(pk)
            else:
                yield pk, attempts


def _knows_point_of(pk: int, alias: str) -> bool:
    """Tell whether the code that runs now can go on from the recovery point of a key."""
    key = keys.read(pk, using=alias)
    if key is None:
        return False
    try:
        options = options_of(match_of(key).func, key.request_method)
    except Resolver404:
        return False
    return options is not None and key.recovery_point in options.every_point()


def _complete(pk: int, attempts: int, alias: str) -> str | None:
    """Run one key; return what became of it, None if somebody else has it."""
    limits = conf.get()
    if attempts >= limits.COMPLETER_MAX_ATTEMPTS and _give_up(pk, alias):
        return "stuck"  # A run that ended this process could not do it.
    delay = min(limits.COMPLETER_IDLE_SECONDS * 2**attempts, _MAX_DELAY_SECONDS)
    key = claims.claim_by_id(pk, delay_seconds=delay, using=alias)
    if key is None:
        return None
    keys.emit(signals.key_claimed, key, None)
    refused = False
    try:
        response = run_again(key)
        refused = http.is_refusal(response)
        ended = f"A decorator or the framework answered with status {response.status_code}, before @idempotent ran the view."
    except (CannotRun, KeyStuck) as error:
        ended = ""
        with suppress(LockLost):  # Somebody has settled it from the admin meanwhile.
            keys.mark_stuck(key, error.code, error.reason, using=alias)
            keys.announce_stuck(pk, None, using=alias)
    except (Exception, SystemExit, CancelledError) as error:  # A view may call sys.exit(), or let out what it cancelled.
        if connection_lost(error, alias) and not _answers(alias):
            raise  # The next key would fare no better. This one's lock expires.
        refused = isinstance(error, HTTP_EXCEPTIONS)
        ended = f"{type(error).__name__}: {error}"
        logger.exception("the completer could not finish key %s", key.key_hash, extra=keys.about(key))
    # The status returned says little (a 409 may mean that a client came back): the row says what became of the key.
    after = keys.read(pk, using=alias)
    if after is not None and after.fence == key.fence and after.locked_at is not None:
        # The run did not come as far as to @idempotent, which leaves no key locked.
        keys.release(key, ended, using=alias)
    if after is None or after.finished_at is not None:
        return "finished"
    if refused and after.untouched and after.completer_attempts >= _RUNS_BEFORE_REFUSED and _leave_to_client(key, alias):
        return "stuck"
    if after.stuck_at is None and after.completer_attempts >= limits.COMPLETER_MAX_ATTEMPTS and _give_up(pk, alias):
        return "stuck"
    return "failed" if after.stuck_at is None else "stuck"


def _answers(alias: str) -> bool:
    """Tell whether the database of the keys is there and takes writes; a view may have lost another one."""
    try:
        connections[alias].ensure_connection()
        return bool(connections[alias].is_usable()) and not takes_no_writes(connections[alias])
    except Error:
        return False


def _leave_to_client(key: IdempotencyKey, alias: str) -> bool:
    """Mark a key stuck whose rebuilt request is refused again and again; return whether this call did it.

    What a middleware adds may be missing in the rebuilt request, so that the answer is not one for the client. Its own retry
    still runs. Not done when anybody has claimed the key since, nor for a view with ``on_abandon``, which settles it.
    """
    if on_abandon_of(key) is not None:
        return False
    reason = (
        f"The completer ran it {key.completer_attempts} times, and the request that it had rebuilt was refused before anything "
        f"was begun. The last error says how. A retry of the client still runs."
    )
    try:
        keys.mark_stuck(key, REFUSED_WHEN_REBUILT, reason, using=alias)
    except LockLost:
        return False
    keys.announce_stuck(key.pk, None, using=alias)
    return True


def _give_up(pk: int, alias: str) -> bool:
    """Hand a key to a person after its last attempt; return whether this call did it.

    Not one that a person has just handed back, with all its attempts. Nor one whose view has an ``on_abandon``: that settles
    it when the retention is over, and until then it is tried.
    """
    key = keys.read(pk, using=alias)
    if key is None or key.completer_attempts < conf.get().COMPLETER_MAX_ATTEMPTS or on_abandon_of(key) is not None:
        return False
    reason = f"The completer ran it {key.completer_attempts} times without success. Its last error and its history say why."
    if not keys.give_up(pk, ATTEMPTS_EXHAUSTED, reason, using=alias):
        return False
    keys.announce_stuck(pk, None, using=alias)
    return True
