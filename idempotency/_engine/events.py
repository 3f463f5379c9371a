"""Log lines and signals about a key."""

import logging
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from logging import WARNING
from typing import Any

from django.db import Error, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.dispatch import Signal

from idempotency import signals
from idempotency._engine.caught_errors import can_only_roll_back
from idempotency._engine.errors import has_ended
from idempotency._engine.outer_transactions import (
    in_outer_transaction,
    is_active,
    is_in_outer_transaction,
)
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
    """Send a signal. In an open transaction the receivers of a project run in a savepoint: the
    error of one, which ``send_robust`` hides, would roll the work of the caller back unnoticed. If
    a transaction was lost meanwhile, only log that, because the key may have committed work."""
    if signal.receivers:
        _send(signal, key, request, more)


def emit_uncommitted(signal: Signal, key: IdempotencyKey | None, request: Any, **more: Any) -> None:
    """As ``emit()``, where the key had no work. Raises OperationalError if a transaction of the
    caller was lost meanwhile."""
    if signal.receivers:
        _send(signal, key, request, more, raises=True)


def emit_committed(signal: Signal, key: IdempotencyKey, request: Any, **more: Any) -> None:
    """Send a signal about the work of a key: now, or after the COMMIT of an outer transaction that
    contains the work."""
    using = str(key._state.db)
    if signal.receivers and in_outer_transaction(using):
        # A function of this app: _boundary.callbacks() does not count it. It does not call emit(),
        # which a tracer replaces: another run may be the current one at COMMIT.
        transaction.on_commit(lambda: _send(signal, key, request, more), using=using)
    else:
        emit(signal, key, request, **more)


def emit_answered(
    key: IdempotencyKey | None, request: Any, outcome: signals.RequestOutcome, seconds: float
) -> None:
    """Send ``request_answered``. Only the work of a run can still be rolled back, with an outer
    transaction."""
    more = {"outcome": outcome, "seconds": seconds}
    if key is not None and outcome is signals.RequestOutcome.RAN:
        emit_committed(signals.request_answered, key, request, **more)
    elif outcome is signals.RequestOutcome.FAILED:  # perhaps after phases
        emit(signals.request_answered, key, request, **more)
    else:
        emit_uncommitted(signals.request_answered, key, request, **more)


def _send(
    signal: Signal,
    key: IdempotencyKey | None,
    request: Any,
    more: dict[str, Any],
    *,
    raises: bool = False,
) -> None:
    for (uid, _), *_ in signal.receivers:
        if not isinstance(uid, OwnUid):
            break
    else:
        signal.send_robust(sender=IdempotencyKey, key=key, request=request, **more)
        return
    sessions = [(connection, connection.connection) for connection in _in_transaction()]
    with ExitStack() as savepoints:
        for connection, own in sessions:
            if is_active(connection):
                continue
            savepoint = transaction.atomic(using=connection.alias)
            savepoints.callback(_leave_manual, connection, own)
            with suppress(Exception):
                savepoint.__enter__()
                savepoints.push(partial(_leave, savepoint))
        try:
            signal.send_robust(sender=IdempotencyKey, key=key, request=request, **more)
        except (Exception, CancelledError) as error:  # that of a receiver that is a coroutine
            _log_error(f"a receiver of a signal failed: {error_text(error)}")
    lost = [
        connection.alias
        for connection, own in sessions
        if connection.connection is not own or can_only_roll_back(connection.alias)
    ]
    if lost:
        text = f"The transaction on {lost[0]!r} was lost while the receivers of a signal ran."
        if raises:  # Django would roll it back without an error.
            raise OperationalError(text)
        _log_error(text)


def _log_error(text: str) -> None:
    with suppress(Exception):  # The handler of a log must not change what is committed.
        logger.error("%s", text)


def _in_transaction() -> list[BaseDatabaseWrapper]:
    """Return the connections of this thread with an open transaction that can be committed."""
    return [
        each
        for each in connections.all(initialized_only=True)
        if each.connection is not None
        and (is_in_outer_transaction(each) or _is_manual(each))
        and not has_ended(each)
        and not can_only_roll_back(each.alias)
    ]


def _is_manual(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the caller has switched autocommit off. If the project has done so in its
    settings, its receivers commit by themselves."""
    is_off = not (connection.in_atomic_block or connection.autocommit)
    return is_off and connection.settings_dict["AUTOCOMMIT"]


def _leave(savepoint: transaction.Atomic, *error: Any) -> None:
    """Leave a savepoint, whose writes are rolled back if a receiver has broken it."""
    with suppress(Error):
        savepoint.__exit__(None, None, None)


def _leave_manual(connection: BaseDatabaseWrapper, own: Any) -> None:
    """Remove the marks that Django leaves on a connection without autocommit whose session is lost
    in ``atomic()``: it could not be opened again. The caller's next statement fails, since a new
    session would commit the rest of the transaction alone."""
    if not connection.atomic_blocks:
        connection.in_atomic_block = connection.closed_in_transaction = False
        if connection.connection is None and getattr(own, "closed", True):
            connection.connection = own


def announce_stuck(pk: int, request: Any, *, using: str) -> None:
    key = read(pk, using=using)
    if key is not None:
        log(WARNING, "key %s is stuck (%s): %s", key, key.stuck_code, key.stuck_reason)
    emit(signals.key_stuck, key, request)
