"""Claim, fence, release: what may happen to a key, and who may do it.

A claim is one statement. Each later change of a claimed key names the claim's token in its WHERE clause: that is the fence. A
run that lost its key to another changes no row, learns of it, and rolls its own writes back.

Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in Postgres", whose SELECT-then-INSERT under SERIALIZABLE is
one upsert here, and whose lock has no token.
"""

import hashlib
import json
import logging
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from django.db import Error, connections
from django.dispatch import Signal
from django.http import HttpRequest

from idempotency import conf, sql
from idempotency.exceptions import LockLost
from idempotency.models import UNKNOWN_RECOVERY_POINT, IdempotencyKey, random_seed
from idempotency.transactions import own_cursor, retryable_failure

logger = logging.getLogger("idempotency")

#: The key whose run is under way here; a staged job points at it.
current: ContextVar[IdempotencyKey | None] = ContextVar("idempotency_key", default=None)

#: So often does a claim look again when the row it met changed under its eyes: each time somebody else got on.
_CLAIM_TRIES = 10
_MAX_ERROR_LENGTH = 2000
_MAX_SUMMARY_LENGTH = 200


class Outcome(Enum):
    """What a claim found."""

    CLAIMED = "claimed"
    FINISHED = "finished"
    MISMATCH = "mismatch"
    IN_PROGRESS = "in progress"
    STUCK = "stuck"
    UNKNOWN_POINT = "unknown recovery point"


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    """What a claim writes down of a request: enough to refuse another one, and to run this one again."""

    scope: str
    idempotency_key: str
    user_id: Any
    method: str
    path: str
    body: bytes | None
    content_type: str
    headers: dict[str, str]
    remote_addr: str
    fingerprint: str
    #: What the fingerprint would be under the secrets of before; a key that bears one of them is this request's.
    former_fingerprints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim: the key if there is one, and, while another run holds it, what is left of its lock."""

    outcome: Outcome
    key: Any = None
    lock_seconds: float = 0


@dataclass(frozen=True, slots=True)
class _Row:
    key: IdempotencyKey
    expired: bool
    lock_seconds: float


def claim_phased(request: ClaimedRequest, recovery_points: tuple[str, ...], *, using: str) -> Claim:
    """Claim the key of a phased view, in autocommit, with one statement when nobody is in the way.

    On CLAIMED the row is there, locked, and carries this claim's token. On anything else nothing was written, but for an
    expired key moved out of the way. ``recovery_points`` are all that the view knows, the first and the last included.
    """
    postgresql = connections[using].vendor == "postgresql"
    text = sql.statements(connections[using].vendor)
    parameters = _claim_parameters(request, using) | _lock_parameters(request)
    parameters["points"] = list(recovery_points) if postgresql else json.dumps(recovery_points)
    for _ in range(_CLAIM_TRIES):
        try:
            row, claimed = _fetch(text.claim_phased if postgresql else text.read, parameters, using)
        except Error as error:
            if retryable_failure(error, None) is None or connections[using].in_atomic_block:
                raise
            continue  # The connection's own level is a high one, and somebody else was faster.
        if row is not None and row.expired:
            _execute(text.retire, {"id": row.key.pk, "scope": request.scope}, using)
            continue
        if not postgresql and (row is None or _refusal(row, request, recovery_points) is None):
            row, claimed = _fetch(text.upsert, parameters, using)
        if row is None:
            if postgresql and (refusal := _refusal_by_holder(parameters, using)):
                return refusal
            continue  # Lost the race for a new key: the next look finds the winner.
        if claimed:
            return Claim(Outcome.CLAIMED, row.key)
        if former := _under_former_secret(row, request):
            return claim_phased(former, recovery_points, using=using)
        if refusal := _refusal(row, request, recovery_points):
            return refusal
    return Claim(Outcome.IN_PROGRESS, lock_seconds=1)


def claim_plain(request: ClaimedRequest, *, using: str) -> Claim:
    """Claim the key of a plain view inside its transaction.

    On CLAIMED the row is inserted, and nobody else sees it before COMMIT; duplicates are refused at once, by advisory
    locks that last as long as the transaction. On anything else nothing was written. On SQLite a duplicate
    waits for the writer.
    """
    postgresql = connections[using].vendor == "postgresql"
    text = sql.statements(connections[using].vendor)
    parameters = _claim_parameters(request, using) | _lock_parameters(request)
    for _ in range(_CLAIM_TRIES):
        row, verdict = _fetch(text.claim_plain if postgresql else text.insert_plain, parameters, using)
        if verdict == "claimed":
            return Claim(Outcome.CLAIMED, row and row.key)
        if verdict == "same":
            return Claim(Outcome.IN_PROGRESS, lock_seconds=1)
        if verdict == "other":
            return _refusal_by_holder(parameters, using) or Claim(Outcome.IN_PROGRESS, lock_seconds=1)
        if not postgresql:
            row, _ = _fetch(text.read, parameters, using)
        if row is None:
            continue  # The row that was in the way has just gone, or has just come.
        if former := _under_former_secret(row, request):
            return claim_plain(former, using=using)
        if not row.expired:
            # A plain view leaves no unfinished row: such a one was phased before a deploy, and has no point known here.
            return _refusal(row, request, ()) or Claim(Outcome.UNKNOWN_POINT, row.key)
        _execute(text.retire, {"id": row.key.pk, "scope": request.scope}, using)
    return Claim(Outcome.IN_PROGRESS, lock_seconds=1)


def claim_by_id(pk: int, *, delay_seconds: float, using: str) -> IdempotencyKey | None:
    """Claim an abandoned key for the completer, which leaves it alone for ``delay_seconds`` if this run fails too.

    Return the claimed key; None if somebody else was faster, finished it, or handed it to a person.
    """
    text = sql.statements(connections[using].vendor).claim_by_id
    parameters = {
        "id": pk,
        "claim_token": _token(uuid.uuid4(), using),
        "delay": delay_seconds,
        "event": "claimed",
        "detail": "completer",
    }
    row, _ = _fetch(text, parameters, using)
    return row.key if row else None


def read(pk: int, *, using: str) -> IdempotencyKey | None:
    """Return the key as it is now; None if it is gone."""
    row, _ = _fetch(sql.statements(connections[using].vendor).read_by_id, {"id": pk}, using)
    return row.key if row else None


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
    """Renew the lock. Raises LockLost if another claim has taken the key over."""
    _fenced("renew", key, using)


def finish(key: IdempotencyKey, code: int, headers: dict[str, str], body: bytes | None, *, using: str) -> None:
    """Store the response; ``body`` None says that it was not kept. Raises LockLost if another claim has taken the key over."""
    _fenced(
        "finish",
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
        _fenced("release", key, using, error=_printable(error), event="error", detail=_summary(error))
    except LockLost:
        logger.info("key %s was taken over by another run before it was released", key.key_hash)


def mark_stuck(key: IdempotencyKey, code: str, reason: str, *, using: str) -> None:
    """Hand a key to a person, from the run that holds it. Raises LockLost if another claim has taken the key over."""
    _fenced("mark_stuck", key, using, **_stuck_parameters(code, reason))
    logger.warning("key %s is stuck (%s): %s", key.key_hash, code, reason)


def give_up(pk: int, code: str, reason: str, *, using: str) -> bool:
    """Hand a key to a person when no run holds it; return whether this call did it."""
    text = sql.statements(connections[using].vendor).give_up
    return _execute(text, {"id": pk, **_stuck_parameters(code, reason)}, using) == 1


def emit(signal: Signal, key: IdempotencyKey | None, request: HttpRequest | None) -> None:
    """Send a signal; what a receiver raises is logged by Django and goes no further."""
    signal.send_robust(sender=IdempotencyKey, key=key, request=request)


def _under_former_secret(row: _Row, request: ClaimedRequest) -> ClaimedRequest | None:
    """Return the same request with the fingerprint of this key, if a secret that has been changed since made it."""
    if row.key.request_fingerprint not in request.former_fingerprints:
        return None
    return replace(request, fingerprint=row.key.request_fingerprint, former_fingerprints=())


def _refusal(row: _Row, request: ClaimedRequest, recovery_points: tuple[str, ...]) -> Claim | None:
    """Return why this key cannot be claimed, None if it can. A mismatch comes first: it must learn nothing of the rest."""
    key = row.key
    if key.request_fingerprint != request.fingerprint:
        return Claim(Outcome.MISMATCH, key)
    if key.finished_at is not None:
        return None if row.expired else Claim(Outcome.FINISHED, key)
    if row.lock_seconds > 0:
        return Claim(Outcome.IN_PROGRESS, key, lock_seconds=row.lock_seconds)
    if key.stuck_at is not None and key.stuck_code != UNKNOWN_RECOVERY_POINT:
        return Claim(Outcome.STUCK, key)
    if key.recovery_point not in recovery_points:
        return Claim(Outcome.UNKNOWN_POINT, key)
    return None


def _refusal_by_holder(parameters: dict[str, Any], using: str) -> Claim | None:
    """Return why this key cannot be claimed while another session holds its lock; None if none does (any more)."""
    with own_cursor(using) as cursor:
        cursor.execute(sql.HOLDER, parameters)
        held, another_request = cursor.fetchone()
    if not held:
        return None
    return Claim(Outcome.MISMATCH if another_request else Outcome.IN_PROGRESS, lock_seconds=1)


def _fenced(statement: str, key: IdempotencyKey, using: str, **parameters: Any) -> None:
    text: str = getattr(sql.statements(connections[using].vendor), statement)
    if _execute(text, {"id": key.pk, "token": _token(key.fence, using), **parameters}, using) != 1:
        raise LockLost


def _execute(text: str, parameters: dict[str, Any], using: str) -> int:
    with own_cursor(using) as cursor:
        cursor.execute(text, parameters)
        return int(cursor.rowcount)


def _fetch(text: str, parameters: dict[str, Any], using: str) -> tuple[_Row | None, Any]:
    """Return the key that a statement found, if any, and what the statement says about it in its last column."""
    connection = connections[using]
    with own_cursor(using) as cursor:
        cursor.execute(text, parameters)
        values = cursor.fetchone()
    if values is None:
        return None, None
    *columns, expired, age_seconds, lock_seconds, verdict = values
    if columns[0] is None:
        return None, verdict
    for position, (converters, expression) in _converters(using).items():
        for converter in converters:
            columns[position] = converter(columns[position], expression, connection)
    key = IdempotencyKey.from_db(using, [field.attname for field in sql.FIELDS], columns)
    # Its age goes by the database's clock up to here, and from here by one that never jumps.
    key.born_monotonic = time.monotonic() - age_seconds
    key.fence = key.claim_token
    return _Row(key, bool(expired), lock_seconds), verdict


@lru_cache(maxsize=16)
def _converters(using: str) -> dict[int, tuple[list[Any], Any]]:
    compiler = IdempotencyKey.objects.using(using).all().query.get_compiler(using)
    converters: dict[int, tuple[list[Any], Any]] = compiler.get_converters([field.get_col(sql.TABLE) for field in sql.FIELDS])
    return converters


def _claim_parameters(request: ClaimedRequest, using: str) -> dict[str, Any]:
    return {
        "scope": request.scope,
        "idempotency_key": request.idempotency_key,
        "user_id": IdempotencyKey._meta.get_field("user").get_db_prep_save(request.user_id, connections[using]),
        "claim_token": _token(uuid.uuid4(), using),
        "request_method": request.method[:20],
        "request_path": request.path,
        "request_body": request.body,
        "request_content_type": request.content_type,
        "request_headers": json.dumps(request.headers),
        "remote_addr": request.remote_addr,
        "request_fingerprint": request.fingerprint,
        "seed": random_seed(),
        "event": "claimed",
        "detail": "client",
    }


def _lock_parameters(request: ClaimedRequest) -> dict[str, Any]:
    """Return the numbers of the advisory locks. Each part is preceded by its length: no two pairs look alike."""
    name = f"{len(request.scope)}:{request.scope}{request.idempotency_key}".encode()
    key_hash = hashlib.blake2b(name, digest_size=12).digest()
    request_hash = hashlib.blake2b(request.fingerprint.encode(), digest_size=4).digest()
    return {
        "lock": int.from_bytes(key_hash[:8], "big", signed=True),
        "mark_key": int.from_bytes(key_hash[8:], "big", signed=True),
        "mark_request": int.from_bytes(request_hash, "big", signed=True),
        "lock_ms": str(conf.get().LOCK_TIMEOUT_SECONDS * 1000),
    }


def _stuck_parameters(code: str, reason: str) -> dict[str, Any]:
    return {
        "code": code,
        "reason": _printable(reason),
        # That one deploy could not run the key says nothing about the next: its attempts do not count.
        "counting": 0 if code == UNKNOWN_RECOVERY_POINT else 1,
        "event": "stuck",
        "detail": _summary(reason),
    }


def _token(token: uuid.UUID | None, using: str) -> Any:
    return token if token is None or connections[using].features.has_native_uuid_field else token.hex


def _printable(text: str) -> str:
    """Return ``text`` as both databases take it: no NUL, no lone surrogate, not endless."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode()[:_MAX_ERROR_LENGTH] or "No reason was given."


def _summary(text: str) -> str:
    """Return the first line of ``text`` for the history, which keeps many."""
    return _printable(text).partition("\n")[0][:_MAX_SUMMARY_LENGTH]
