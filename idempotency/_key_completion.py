"""The keys that the completer runs, and the run of one key."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from logging import ERROR, WARNING

from django.db.models import Window
from django.db.models.functions import Now, RowNumber

from idempotency import conf, signals
from idempotency._boundary import checked_at_end
from idempotency._engine import claims, decisions, events, fence, rows
from idempotency._engine.adapter import StoredWork, with_stored_work
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.errors import accepts_writes, connection_lost
from idempotency._engine.outer_transactions import require_no_transaction
from idempotency._engine.phased_run import FinalState
from idempotency._states import completer_delay_seconds, due_at
from idempotency._text import summary
from idempotency.exceptions import WAITS_FOR_DEPLOY, LockLost, NotReplicated, StuckCode
from idempotency.models import IdempotencyKey

#: The id of a key, the number of its completer runs, and the time for which a deploy has kept it
#: stuck.
_Waiting = tuple[int, int, timedelta | None]

#: The number of refused runs after which a key without any effect is left to its client.
_RUNS_BEFORE_REFUSED = 5
#: The longest time after which the completer looks again at a key whose recovery point is unknown.
_MAX_WAIT_FOR_DEPLOY = timedelta(hours=1)
#: The number of keys of one scope in a batch.
_IN_A_ROW = 10


class AbandonedKeys:
    """The keys of one pass. Several threads may run them at once: a key that runs for long occupies
    one thread only."""

    def __init__(self, alias: str, batch_size: int) -> None:
        self._alias, self._batch_size = alias, batch_size
        self._one_at_a_time = threading.Lock()
        self._waiting: Iterator[_Waiting] | None = None
        #: The keys that could not be claimed.
        self._left: list[int] = []

    def begin(self) -> None:
        """Begin a pass, or join that of other threads. Raises RuntimeError in a transaction, and if
        autocommit is off."""
        require_no_transaction(self._alias)
        with self._one_at_a_time:
            if self._waiting is None:
                self._left = []
                self._waiting = _waiting(self._alias, self._batch_size, self._left)

    def complete(
        self, stop: Callable[[], bool], between: Callable[[Callable[[], bool]], bool]
    ) -> Counter[str]:
        """Run keys until none is left in the pass, or ``stop`` returns True. Return the numbers of
        results. Before each key call ``between``, which does other work, and returns whether more
        of it is left."""
        counts: Counter[str] = Counter()
        while not stop():
            more = between(stop)
            if (key := self._next()) is None:
                if more:
                    continue
                break
            pk, attempts, stuck_for = key
            # Do not claim a key whose recovery point is unknown: each claim would add to its
            # history.
            if stuck_for is not None and not _knows_point_of(pk, self._alias):
                _postpone(pk, self._alias, stuck_for)
            elif outcome := complete_by_id(pk, attempts, self._alias):
                counts[outcome] += 1
            else:
                self._left.append(pk)
        return counts

    def _next(self) -> _Waiting | None:
        with self._one_at_a_time:
            key = next(self._waiting, None) if self._waiting is not None else None
            if key is None:
                self._waiting = None
            return key


def _waiting(alias: str, batch_size: int, left: list[int]) -> Iterator[_Waiting]:
    """Yield the id of each abandoned key, the number of its completer runs, and the time for which
    a deploy has kept it stuck (or None). Scopes take turns; within a scope the key that has been
    due longest is first. Keys that become due meanwhile are included. The iterator ends when no key
    is left that was due at its start, so that a pass ends under any load. The list ``left`` has the
    keys that could not be claimed."""
    begun = None
    turn = Window(RowNumber(), partition_by="scope", order_by=["due", "pk"])
    while True:
        waiting = (
            IdempotencyKey.objects.using(alias)
            .abandoned()
            .exclude(pk__in=left)
            .annotate(due=due_at(), turn=turn)
        )
        in_turn = waiting.filter(turn__lte=_IN_A_ROW).order_by("turn", "due", "pk")
        batch = list(
            in_turn.values_list("due", Now(), "pk", "completer_attempts", "stuck_at")[:batch_size]
        )
        if not batch:
            return
        longest_due, now, *_ = batch[0]
        begun = begun or now
        if longest_due > begun:
            return
        for _, now, pk, attempts, stuck_at in batch:
            yield pk, attempts, now - stuck_at if stuck_at is not None else None


def _knows_point_of(pk: int, alias: str) -> bool:
    if (key := rows.read(pk, using=alias)) is None:
        return False
    return with_stored_work(key, lambda work: work.declares(key.recovery_point))


def _postpone(pk: int, alias: str, stuck_for: timedelta) -> None:
    """Let the completer look at a key with an unknown recovery point again after a tenth of the
    time for which it has been stuck, so that many such keys do not delay the others."""
    wait = min(
        max(stuck_for / 10, timedelta(seconds=conf.get().COMPLETER_IDLE_SECONDS)),
        _MAX_WAIT_FOR_DEPLOY,
    )
    keys = IdempotencyKey.objects.using(alias).filter(pk=pk, stuck_code__in=WAITS_FOR_DEPLOY)
    keys.update(next_run_at=Now() + wait)


def complete_by_id(pk: int, attempts: int, alias: str, by: str = "completer") -> str | None:
    """Run a key from its recovery point; return the result for ``complete_key``. The argument
    ``attempts`` is the number of its completer runs; the history names ``by``."""
    last = rows.read(pk, using=alias) if attempts >= conf.get().COMPLETER_MAX_ATTEMPTS else None
    if last is not None and with_stored_work(last, partial(_give_up, last, alias)):
        return "stuck"  # A run that killed its process could not mark it.
    delay = completer_delay_seconds(attempts)
    key = claims.claim_by_id(pk, delay_seconds=delay, using=alias, by=by)
    if key is None:
        return None
    return with_stored_work(key, partial(_run, key, alias))


def _run(key: ClaimedKey, alias: str, work: StoredWork) -> str:
    """Run the work of a claimed key; return the result for ``complete_key``. Raises the exceptions
    with which the next key would fail too. If the lock of this key cannot be released then, it
    expires."""
    events.emit(signals.key_claimed, key, None)
    with checked_at_end():
        rerun = work.run()
    error = rerun.error
    if isinstance(error, NotReplicated) or (
        error and connection_lost(error, alias) and not accepts_writes(alias)
    ):
        raise error
    waits = False
    if rerun.stuck is not None:
        code, reason = rerun.stuck
        # Only its client can send such a request again. With ``on_abandon``, the reaper settles it.
        only_its_client = code == StuckCode.BODY_NOT_KEPT
        settled = only_its_client and work.has_on_abandon() is not False
        waits = only_its_client and key.untouched and not settled
        if not (settled or waits) and _mark_stuck(key, code, reason, alias):
            return "stuck"
        events.log(WARNING, "the completer cannot run key %s (%s): %s", key, code, reason)
    elif error is not None:
        events.log(ERROR, "the completer could not finish key %s", key, exc_info=error)
    if (run := rerun.run) is None:
        (fence.leave_to_client if waits else fence.release)(key, rerun.description, using=alias)
    elif run.final_state in (FinalState.FINISHED, FinalState.STUCK):
        return str(run.final_state.value)
    else:
        key = run.key
    given_up = (rerun.is_refused and _leave_to_client(key, alias, work)) or _give_up(
        key, alias, work
    )
    return "stuck" if given_up else "failed"


def _leave_to_client(key: ClaimedKey, alias: str, work: StoredWork) -> bool:
    """Mark a key as stuck whose rebuilt request is refused repeatedly; return whether this call did
    it. The rebuilt request may lack an attribute that a middleware sets, so the refusal is not a
    response for the client. A retry of the client still runs. A key with ``on_abandon`` is not
    marked, because the reaper settles it."""
    if not key.untouched or key.completer_attempts < _RUNS_BEFORE_REFUSED or work.has_on_abandon():
        return False
    refused = rows.read(key.pk, using=alias)
    reason = (
        f"{key.completer_attempts} runs of the rebuilt request were refused before any effect; a"
        " retry of the client still runs. The last refusal:"
        f" {summary(refused.last_error if refused else '')}"
    )
    return _mark_stuck(key, StuckCode.REFUSED_WHEN_REBUILT, reason, alias)


def _mark_stuck(key: ClaimedKey, code: str, reason: str, alias: str) -> bool:
    """Mark a claimed key as stuck. Return whether it was; an operator may have settled it
    meanwhile."""
    try:
        fence.mark_stuck(key, code, reason, using=alias)
    except LockLost:
        return False
    events.announce_stuck(key.pk, None, using=alias)
    return True


def _give_up(key: ClaimedKey, alias: str, work: StoredWork) -> bool:
    """Mark a key as stuck after its last attempt; return whether this call did it. A key that was
    just handed back has all its attempts again. A key with ``on_abandon`` is retried until the
    reaper settles it."""
    most = conf.get().COMPLETER_MAX_ATTEMPTS
    last = rows.read(key.pk, using=alias) if key.completer_attempts >= most else None
    if last is None or last.completer_attempts < most or work.has_on_abandon():
        return False
    reason = (
        f"{last.completer_attempts} runs of the completer failed, the last with:"
        f" {summary(last.last_error)}"
    )
    return decisions.give_up(last.pk, StuckCode.ATTEMPTS_EXHAUSTED, reason, using=alias)
