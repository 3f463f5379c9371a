"""The fence: what may happen to a claimed key. ``idempotency.claims`` gives it to a run; here it moves, finishes, or is let go.

Each change by the run that holds the key names the claim's token in its WHERE clause: that is the fence. A run that lost its
key to another changes no row, learns of it, and rolls its own writes back. (``give_up`` is for a key that no run holds: it asks
for a lock that is free or has expired.) Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres", whose
lock has no token.
"""

import json
import logging
import time
from contextvars import ContextVar
from traceback import walk_tb
from typing import Any

from django.dispatch import Signal
from django.http import HttpRequest

from idempotency import signals, sql
from idempotency.exceptions import KeyStuck, LockLost
from idempotency.models import UNKNOWN_RECOVERY_POINT, IdempotencyKey
from idempotency.rows import execute, fetch, key_of_row, statements, token_parameter

logger = logging.getLogger("idempotency")

#: The key whose run is under way here; a staged job points at it.
current: ContextVar[IdempotencyKey | None] = ContextVar("idempotency_key", default=None)

#: The event in a key's history when a block of ``key.call()`` is entered; its detail is the name of the call.
CALL_BEGUN = "call begun"

_MAX_ERROR_LENGTH = 2000
_MAX_SUMMARY_LENGTH = 200
_MAX_CODE_LENGTH = 50


def read(pk: int, *, using: str) -> IdempotencyKey | None:
    """Return the key as it is now; None if it is gone."""
    return key_as_read(fetch(statements(using).read_by_id, {"id": pk}, using), using)


def key_as_read(row: tuple[Any, ...] | None, using: str) -> IdempotencyKey | None:
    """Return the key of a row with ``sql.READ`` and its age; it stands for the claim that holds it now."""
    if row is None:
        return None
    *columns, age_seconds, place = row
    key = key_of_row(sql.READ, columns, using)
    # Its age goes by the database's clock up to here, and from here by one that never jumps.
    key.born_monotonic = time.monotonic() - age_seconds
    key.fence, key.place = key.claim_token, place
    return key


def read_own(key: IdempotencyKey, *, using: str) -> IdempotencyKey:
    """Return a fresh copy of a key that this run holds. Raises LockLost if another claim has taken it over."""
    fresh = read(key.pk, using=using)
    if fresh is None or fresh.fence != key.fence:
        raise LockLost
    return fresh


def advance(key: IdempotencyKey, recovery_point: str, *, using: str) -> None:
    """Set the recovery point and renew the lock. Raises LockLost if another claim has taken the key over."""
    _fenced(
        "advance",
        key,
        using,
        reached=key.recovery_point,
        recovery_point=recovery_point,
        event="recovery point",
        detail=recovery_point,
    )


def renew(key: IdempotencyKey, *, using: str) -> None:
    """Renew the lock, and note that the request has begun something. Raises LockLost if another claim has taken the key over,
    or a person has been called to it."""
    _fenced("renew", key, using, reached=key.recovery_point)


def begin_call(key: IdempotencyKey, name: str, *, using: str, stuck_code: str = "") -> None:
    """Do what ``renew`` does before a call under a derived key, and write the call into the history.

    Raises LockLost if another claim has taken the key over, or the key is stuck with another code than ``stuck_code``.
    """
    called = {"event": CALL_BEGUN, "detail": summary(name)}
    _fenced("begin_call", key, using, reached=key.recovery_point, stuck_code=stuck_code, **called)


def finish(
    key: IdempotencyKey, code: int, headers: dict[str, str], body: bytes | None, *, using: str, untouched: bool = False
) -> None:
    """Store the response; ``body`` None says that it was not kept. Raises LockLost if another claim has taken the key over.

    ``untouched``: raises it also when something was begun. A run does not know it when the answer to its COMMIT was lost.
    """
    _fenced(
        "finish_untouched" if untouched else "finish",
        key,
        using,
        reached=key.recovery_point,
        code=code,
        headers=json.dumps(headers),
        body=body,
        event="finished",
        detail=f"status {code}",
    )


def release(key: IdempotencyKey, error: str, *, using: str) -> None:
    """Free the lock of an unfinished key and keep ``error``, shortened; nothing if another claim has taken it over."""
    try:
        _fenced("release", key, using, error=printable(error), event="error", detail=summary(error))
    except LockLost:
        logger.info("key %s was taken over by another run before it was released", key.key_hash, extra=about(key))


def refuse(key: IdempotencyKey, error: str, *, using: str) -> None:
    """Free the lock of a key whose client is told "no", and keep ``error``.

    A key under which nothing was begun is refused: from now on only a retry of its client runs it. Raises LockLost if another
    claim has taken the key over: its client may get what that one did.
    """
    described = {"error": printable(error), "detail": summary(error)}
    if key.untouched:
        _fenced("refuse", key, using, reached=key.recovery_point, event="refused", **described)
    else:
        _fenced("release", key, using, event="error", **described)


def mark_stuck(key: IdempotencyKey, code: str, reason: str, *, using: str) -> None:
    """Hand a key to a person, from the run that holds it. Raises LockLost if another claim has taken the key over."""
    _fenced("mark_stuck", key, using, **_stuck_parameters(code, reason))


def give_up(pk: int, code: str, reason: str, *, using: str) -> bool:
    """Hand a key to a person when no run holds it; return whether this call did it."""
    return execute(statements(using).give_up, {"id": pk, **_stuck_parameters(code, reason)}, using) == 1


def announce_stuck(pk: int, request: HttpRequest | None, *, using: str) -> None:
    """Tell that a person has been called to a key: in the log, and with ``key_stuck``."""
    key = read(pk, using=using)
    if key is not None:
        logger.warning("key %s is stuck (%s): %s", key.key_hash, key.stuck_code, key.stuck_reason, extra=about(key))
    emit(signals.key_stuck, key, request)


def emit(signal: Signal, key: IdempotencyKey | None, request: HttpRequest | None, **more: str) -> None:
    """Send a signal; what a receiver raises is logged by Django and goes no further."""
    signal.send_robust(sender=IdempotencyKey, key=key, request=request, **more)


def about(key: IdempotencyKey) -> dict[str, str]:
    """Return what a log line about a key carries besides its text (``extra``)."""
    return {"key_hash": key.key_hash}


def _fenced(statement: str, key: IdempotencyKey, using: str, **parameters: Any) -> None:
    text: str = getattr(statements(using), statement)
    parameters |= {"id": key.pk, "token": token_parameter(key.fence, using), "place": key.place}
    if key.place is not None:
        # A rollback or another statement may have moved the row.
        row = fetch(text + sql.AT_PLACE, parameters, using) or fetch(text + sql.ANYWHERE, parameters, using)
        if row is None:
            raise LockLost
        (key.place,) = row
    elif execute(text, parameters, using) != 1:
        raise LockLost


def _stuck_parameters(code: str, reason: str) -> dict[str, Any]:
    # Both may come from a subclass of a user: what the columns do not take must not keep the key from a person.
    code = "".join(filter(str.isprintable, str(code or "")))[:_MAX_CODE_LENGTH].strip() or KeyStuck.code
    reason = str(reason)
    return {
        "code": code,
        "reason": printable(reason),
        # That one deploy could not run the key says nothing about the next: its attempts do not count.
        "counting": 0 if code == UNKNOWN_RECOVERY_POINT else 1,
        "event": "stuck",
        "detail": summary(reason),
    }


def error_text(error: BaseException, *, withheld: bool) -> str:
    """Return what is kept and logged of an exception.

    ``withheld``: parts of its request must not be kept. Its text may quote them, so its type and its place are all that is.
    """
    if not withheld:
        return f"{type(error).__name__}: {error}"
    *_, place = ["nowhere", *(f"{frame.f_globals.get('__name__')}:{line}" for frame, line in walk_tb(error.__traceback__))]
    return f"{type(error).__name__} in {place}"


def printable(text: str) -> str:
    """Return ``text`` as both databases take it: no NUL, no lone surrogate, not endless."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode()[:_MAX_ERROR_LENGTH] or "No reason was given."


def summary(text: str) -> str:
    """Return the first line of ``text`` for the history, which keeps many."""
    return printable(text).partition("\n")[0][:_MAX_SUMMARY_LENGTH]
