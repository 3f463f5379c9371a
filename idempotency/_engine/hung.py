"""Project code that runs for a key and hangs: the watchdog of a loop ends its claim."""

from contextlib import AbstractContextManager
from functools import partial

from idempotency._engine import decisions, events
from idempotency._engine.adapter import with_stored_work
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._states import HUNG_AFTER_LEASES, completer_delay_seconds
from idempotency._watchdog import watched


def watched_key(key: ClaimedKey) -> AbstractContextManager[None]:
    """Register project code that runs for a claimed key, or for one that was only read. The
    watchdog of a loop marks the key if the code hangs."""
    limit = HUNG_AFTER_LEASES * key.lease_seconds
    return watched(
        f"the run of key {key.key_hash}",
        limit_seconds=limit,
        mark=partial(_mark_hung, key),
        key=key,
    )


def _mark_hung(key: ClaimedKey, location: str) -> None:
    using = str(key._state.db)
    delay = max(
        completer_delay_seconds(key.completer_attempts), HUNG_AFTER_LEASES * key.lease_seconds
    )
    if decisions.mark_hung(key, location, delay_seconds=delay, using=using):
        with_stored_work(key, lambda work: events.announce_stuck(key.pk, None, using=using))
