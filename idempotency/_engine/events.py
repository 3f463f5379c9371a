"""Log lines and signals about a key."""

import logging
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress
from logging import WARNING
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.dispatch import Signal

from idempotency import signals
from idempotency._engine.outer_transactions import in_outer_transaction, is_in_outer_transaction
from idempotency._engine.rows import read
from idempotency._text import error_text
from idempotency.models import IdempotencyKey

logger = logging.getLogger("idempotency")


class OwnUid(str):
    """The ``dispatch_uid`` of a receiver of this app, which sends nothing in a transaction."""

    __slots__ = ()


def about(key: IdempotencyKey) -> dict[str, Any]:
    """Return the ``extra`` of a log line about a key. A deferred field is not read for it."""
    known = vars(key)
    return {
        "key_hash": key.key_hash,
        "recovery_point": known.get("recovery_point"),
        "attempt": known.get("attempts"),
        "trace_id": trace_id_of(known.get("traceparent")),
    }


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the id of the trace in which a key was inserted or a job was staged."""
    return traceparent.split("-")[1] if traceparent else None


def log(level: int, text: str, key: IdempotencyKey, *values: object, exc_info: Any = None) -> None:
    """Write a log line about a key. The first value in ``text`` is the hash of the key."""
    extra = about(key)
    values = (extra["key_hash"], *values)
    logger.log(level, text, *values, exc_info=exc_info, extra=extra, stacklevel=2)


def log_committed(write: Callable[[], None], *, using: str) -> None:
    """Call ``write``, which writes a log line: now, or after the COMMIT of an open transaction,
    which the handler of a log must not break."""

    def say() -> None:
        with suppress(Exception):  # The other hooks must be called.
            write()

    if in_outer_transaction(using):
        transaction.on_commit(say, using=using)
    else:
        write()


def emit(signal: Signal, key: IdempotencyKey | None, request: Any, **more: Any) -> None:
    """Send a signal after COMMIT: now, or after the COMMIT of the transactions that the caller has
    opened in any database. In such a transaction an error of a receiver, which ``send_robust``
    hides, would roll the work of the caller back unnoticed."""
    if signal.receivers:
        _send(signal, key, request, more, key)


def emit_uncommitted(signal: Signal, key: IdempotencyKey | None, request: Any, **more: Any) -> None:
    """As ``emit()``, where the key had no work. The receivers of this app get the signal now: they
    also count what is rolled back, such as a conflict."""
    if signal.receivers:
        _send(signal, key, request, more, None)


def emit_answered(
    key: IdempotencyKey | None, request: Any, outcome: signals.RequestOutcome, seconds: float
) -> None:
    """Send ``request_answered``. Only the work of a run can still be rolled back, with an outer
    transaction."""
    is_work = key is not None and outcome is signals.RequestOutcome.RAN
    send = emit if is_work else emit_uncommitted
    send(signals.request_answered, key, request, outcome=outcome, seconds=seconds)


def _send(
    signal: Signal,
    key: IdempotencyKey | None,
    request: Any,
    more: dict[str, Any],
    work: IdempotencyKey | None,
) -> None:
    if (outer := _outer_transaction(signal, work)) is not None:
        # A function of this app: _boundary.callbacks() does not count it. It does not call emit(),
        # which a tracer replaces: another run may be the current one at COMMIT.
        outer.on_commit(lambda: _send(signal, key, request, more, work))
        return
    try:
        signal.send_robust(sender=IdempotencyKey, key=key, request=request, **more)
    except (Exception, CancelledError) as error:  # that of a receiver that is a coroutine
        with suppress(Exception):  # The handler of a log must not change what is committed.
            logger.error("a receiver of a signal failed: %s", error_text(error))


def _outer_transaction(signal: Signal, work: IdempotencyKey | None) -> BaseDatabaseWrapper | None:
    """Return a connection for whose COMMIT a signal waits. Receivers of this app break no
    transaction, so they wait only for that of the work."""
    for (uid, _), *_ in signal.receivers:
        if not isinstance(uid, OwnUid):
            every = connections.all(initialized_only=True)
            return next(filter(is_in_outer_transaction, every), None)
    if work is None or not is_in_outer_transaction(own := connections[str(work._state.db)]):
        return None
    return own


def announce_stuck(pk: int, request: Any, *, using: str) -> None:
    key = read(pk, using=using)
    if key is not None:
        log(WARNING, "key %s is stuck (%s): %s", key, key.stuck_code, key.stuck_reason)
    emit(signals.key_stuck, key, request)
