"""Log lines and signals about a key."""

import logging
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress
from copy import copy
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

#: The signals for the counters of this app. A counter breaks no transaction, and also counts what
#: is rolled back, such as a conflict.
COUNTED: dict[Signal, Signal] = {
    each: Signal()
    for each in (
        *(signals.key_claimed, signals.key_replayed, signals.key_conflict, signals.key_finished),
        *(signals.key_stuck, signals.phase_committed, signals.request_answered),
    )
}


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
    values = (key.key_hash, *values)
    with suppress(Exception):  # A handler or a filter must not change what is committed.
        logger.log(level, text, *values, exc_info=exc_info, extra=about(key), stacklevel=2)


def log_committed(write: Callable[[], None], *, using: str) -> None:
    """Call ``write``, which writes a log line: now, or after the COMMIT of an open transaction,
    which the handler of a log must not break."""

    def say() -> None:
        with suppress(Exception):  # As in log(). The other hooks must be called.
            write()

    if in_outer_transaction(using):
        transaction.on_commit(say, using=using)
    else:
        say()


def emit(signal: Signal, key: IdempotencyKey | None, request: Any, **more: Any) -> None:
    """Send a signal after COMMIT: now, or after the COMMIT of the caller's ``atomic()`` in any
    database. In such a block an error of a receiver, which ``send_robust`` hides, would roll the
    work of the caller back unnoticed."""
    if signal.receivers or COUNTED[signal].receivers:
        _emit(signal, key, request, more, key)


def emit_uncommitted(signal: Signal, key: IdempotencyKey | None, request: Any, **more: Any) -> None:
    """As ``emit()``, where the key had no work whose COMMIT the counters of this app would wait
    for."""
    if signal.receivers or COUNTED[signal].receivers:
        _emit(signal, key, request, more, None)


def emit_answered(
    key: IdempotencyKey | None, request: Any, outcome: signals.RequestOutcome, seconds: float
) -> None:
    """Send ``request_answered``. Only the work of a run can still be rolled back, with an outer
    transaction."""
    is_work = key is not None and outcome is signals.RequestOutcome.RAN
    send = emit if is_work else emit_uncommitted
    send(signals.request_answered, key, request, outcome=outcome, seconds=seconds)


def _emit(
    signal: Signal,
    key: IdempotencyKey | None,
    request: Any,
    more: dict[str, Any],
    work: IdempotencyKey | None,
) -> None:
    outer = connections[str(work._state.db)] if work is not None else None
    if outer is not None and not is_in_outer_transaction(outer):
        outer = None
    for each in (COUNTED[signal], signal):
        if each.receivers:
            _send(each, key, request, more, outer)


def _send(
    signal: Signal,
    key: IdempotencyKey | None,
    request: Any,
    more: dict[str, Any],
    outer: BaseDatabaseWrapper | None = None,
    waited_for: tuple[BaseDatabaseWrapper, ...] = (),
) -> None:
    """Send a signal after the COMMIT of ``outer``. The receivers of a project wait for the
    transactions in other databases too."""
    if outer is None and signal in COUNTED:
        outer = _outer_transaction(but=waited_for)
    if outer is not None:
        then, done = copy(key), (*waited_for, outer)  # A later phase changes the key.
        # A function of this app: _boundary.callbacks() does not count it. It does not call emit(),
        # which a tracer replaces: another run may be the current one at COMMIT.
        outer.on_commit(lambda: _send(signal, then, request, more, None, done))
        return
    try:
        signal.send_robust(sender=IdempotencyKey, key=key, request=request, **more)
    except (Exception, CancelledError) as error:  # that of a receiver that is a coroutine
        with suppress(Exception):  # The handler of a log must not change what is committed.
            logger.error("a receiver of a signal failed: %s", error_text(error))


def _outer_transaction(but: tuple[BaseDatabaseWrapper, ...]) -> BaseDatabaseWrapper | None:
    """Return a connection in ``atomic()`` of the caller. Without autocommit, Django calls no hook
    after COMMIT."""
    every = connections.all(initialized_only=True)
    found = (each for each in every if is_in_outer_transaction(each) and each.commit_on_exit)
    return next((each for each in found if each not in but), None)


def announce_stuck(pk: int, request: Any, *, using: str) -> None:
    key = read(pk, using=using)
    if key is not None:
        log(WARNING, "key %s is stuck (%s): %s", key, key.stuck_code, key.stuck_reason)
    emit(signals.key_stuck, key, request)
