"""Log lines and signals about a key."""

import logging
from contextlib import ExitStack, suppress
from functools import partial
from logging import WARNING
from typing import Any

from django.db import Error, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.dispatch import Signal

from idempotency import signals
from idempotency._engine.errors import has_ended
from idempotency._engine.outer_transactions import in_outer_transaction, is_in_outer_transaction
from idempotency._engine.rows import read
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


def log_committed(text: str, key: IdempotencyKey, *values: object, using: str) -> None:
    """Write a warning about a key: now, or after the COMMIT of an open transaction, which the
    handler of a log must not break."""
    write = partial(log, WARNING, text, key, *values)
    if in_outer_transaction(using):
        transaction.on_commit(write, using=using, robust=True)
    else:
        write()


def emit(signal: Signal, key: IdempotencyKey | None, request: Any, **more: Any) -> None:
    """Send a signal. In an open transaction the receivers of a project run in a savepoint: the
    error of one, which ``send_robust`` hides, would roll the work of the caller back unnoticed.
    Raises OperationalError if the transaction was lost meanwhile."""
    if not signal.receivers:
        return
    if not [uid for (uid, _), *_ in signal.receivers if not isinstance(uid, OwnUid)]:
        signal.send_robust(sender=IdempotencyKey, key=key, request=request, **more)
        return
    opened: list[BaseDatabaseWrapper] = []
    with ExitStack() as savepoints:
        for connection in connections.all(initialized_only=True):
            if (
                is_in_outer_transaction(connection)
                and not connection.needs_rollback
                and not has_ended(connection)
            ):
                savepoint = transaction.atomic(using=connection.alias)
                with suppress(Exception):  # A broken transaction cannot be broken any more.
                    savepoint.__enter__()
                    savepoints.push(partial(_leave, savepoint))
                    opened.append(connection)
        signal.send_robust(sender=IdempotencyKey, key=key, request=request, **more)
    if any(connection.needs_rollback for connection in opened):
        # Django would roll the transaction back without an error.
        raise OperationalError("A transaction was lost while the receivers of a signal ran.")


def _leave(savepoint: transaction.Atomic, *error: Any) -> None:
    """Leave a savepoint, whose writes are rolled back if a receiver has broken it."""
    with suppress(Error):
        savepoint.__exit__(None, None, None)


def emit_committed(signal: Signal, key: IdempotencyKey, request: Any, **more: Any) -> None:
    """Send a signal about the work of a key: now, or after the COMMIT of an outer transaction that
    contains the work."""
    using = str(key._state.db)
    if signal.receivers and in_outer_transaction(using):
        # A function of this app: _boundary.callbacks() does not count it. It does not call emit(),
        # which a tracer replaces: another run may be the current one at COMMIT.
        transaction.on_commit(
            lambda: signal.send_robust(sender=IdempotencyKey, key=key, request=request, **more),
            using=using,
        )
    else:
        emit(signal, key, request, **more)


def announce_stuck(pk: int, request: Any, *, using: str) -> None:
    key = read(pk, using=using)
    if key is not None:
        log(WARNING, "key %s is stuck (%s): %s", key, key.stuck_code, key.stuck_reason)
    emit(signals.key_stuck, key, request)
