"""The end of a request that nobody could finish: the view's ``on_abandon`` settles it, once, or a person does."""

import logging
from asyncio import CancelledError
from functools import partial

from django.http import HttpResponseBase
from django.urls import Resolver404

from idempotency import claims, conf, http, keys, signals
from idempotency.calls import rendered
from idempotency.contexts import awaited
from idempotency.exceptions import CallInDoubt, LockLost
from idempotency.models import ForeignCall, IdempotencyKey
from idempotency.options import OnAbandon, match_of, options_of

logger = logging.getLogger("idempotency")

#: The stuck code of a key that was not finished within the retention, and has nobody but a person to settle it.
RETENTION_PASSED = "retention_passed"
#: The stuck code while ``on_abandon`` is at work, and for good when it does not come to its end.
ON_ABANDON = "on_abandon"
BEGUN = "on_abandon was begun and did not come to its end: what it did elsewhere may be done. Look there, then settle it."
IN_DOUBT = "A foreign call was begun, and its result was never recorded. Look there for what happened, then settle it."


def settle(pk: int, *, using: str) -> bool | None:
    """Settle an unfinished key past its retention; several processes may try, one does it.

    On return the key is finished with the response of its view's ``on_abandon`` (True), or stuck (False); None when a run or
    another process has it. ``on_abandon`` runs once and outside any transaction: the key is marked stuck before, so that a
    death in the middle leaves it to a person.
    """
    key = keys.read(pk, using=using)
    on_abandon = on_abandon_of(key) if key is not None else None
    if on_abandon is None:
        reason = (
            f"The request was not finished within {conf.get().RETENTION_HOURS} hours of its creation, or of being handed "
            f"back. Its last error and its history say where it stopped; whether to run it again or to answer it by hand is "
            f"for a person to decide."
        )
        if not keys.give_up(pk, RETENTION_PASSED, reason, using=using):
            return None
    else:
        key = claims.claim_by_id(pk, delay_seconds=0, early=True, using=using)
        if key is None:
            return None
        try:
            if _run(on_abandon, key, using):
                keys.emit(signals.key_finished, keys.read(pk, using=using), None)
                return True
        except LockLost:
            return None  # Somebody has settled it from the admin meanwhile.
    keys.announce_stuck(pk, None, using=using)
    return False


def _run(on_abandon: OnAbandon, key: IdempotencyKey, using: str) -> bool:
    """Run it and store its response; return whether that settled the key. Raises LockLost if a person was faster."""
    if ForeignCall.objects.using(using).filter(key_id=key.pk, recorded_at__isnull=True).exists():
        # Whether it took effect decides what is to be undone.
        keys.mark_stuck(key, CallInDoubt.code, IN_DOUBT, using=using)
        return False
    keys.mark_stuck(key, ON_ABANDON, BEGUN, using=using)
    key.begin_call = partial(keys.begin_call, key, using=using, stuck_code=ON_ABANDON)
    try:
        response = rendered(awaited(on_abandon(key)))
        if not isinstance(response, HttpResponseBase):
            raise TypeError(f"it returned {type(response).__name__}, not a response")
        if http.is_stored(response):
            keys.finish(key, *http.stored_parts(response), using=using)
            return True
        failure = f"on_abandon returned status {response.status_code}, which is never stored."
    except LockLost:
        raise
    except (Exception, CancelledError) as error:
        withheld = key.request_body is None or http.REDACTED_MARK in key.request_headers
        failure = f"on_abandon failed: {keys.error_text(error, withheld=withheld)}"
        logger.error("on_abandon of key %s failed", key.key_hash, exc_info=not withheld, extra=keys.about(key))
    keys.mark_stuck(key, ON_ABANDON, failure, using=using)
    return False


def on_abandon_of(key: IdempotencyKey) -> OnAbandon | None:
    """Return the ``on_abandon`` of the view that answers a key's request; None if it has none, or is gone."""
    try:
        view = match_of(key).func
    except Resolver404:
        return None
    options = options_of(view, key.request_method)
    return options.on_abandon if options else None
