"""Claims: take the lock of a key, or find out why that is not possible.

On PostgreSQL a claim is one statement. Source: Brandur Leach, "Implementing Stripe-like Idempotency
Keys in Postgres", whose SELECT and INSERT under SERIALIZABLE are one upsert here.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Any
from uuid import UUID, uuid4

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from idempotency import conf
from idempotency._engine import errors, rows, statements
from idempotency._engine.adapter import ClaimedRequest
from idempotency._engine.advisory_locks import HOLDER, lock_parameters, version_of
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.history import HistoryEvent
from idempotency._engine.late_releases import release_later
from idempotency._engine.rows import execute, fetch, statements_for, token_parameter, vendor
from idempotency._engine.transactions import First
from idempotency._hidden import Hidden, Parameters
from idempotency.exceptions import OPEN_TO_RETRIES
from idempotency.models import IdempotencyKey, random_seed

#: The number of attempts if other runs change the row concurrently, and thus progress.
_CLAIM_TRIES = 10

#: The columns that a claim clears, or that no unfinished key has.
_CLEARED: dict[str, Any] = dict.fromkeys(("stuck_code", "stuck_reason"), "") | dict.fromkeys(
    ("stuck_at", "response_code", "response_headers", "response_body")
)
_columns_of = attrgetter(*statements.REQUEST)


class ClaimOutcome(Enum):
    CLAIMED = "claimed"
    FINISHED = "finished"
    MISMATCH = "mismatch"
    IN_PROGRESS = "in progress"
    STUCK = "stuck"
    UNKNOWN_POINT = "unknown recovery point"


@dataclass(frozen=True, slots=True, repr=False)
class Claim:
    """The result of a claim. ``lock_seconds`` is the remaining time of the lock of another run; 1
    if it is unknown."""

    outcome: ClaimOutcome
    key: Any = None
    lock_seconds: float = 1


@dataclass(frozen=True, slots=True, repr=False)
class _Found:
    """The result of a claim statement, and the time before it. It has the columns of the claimed
    key, or the existing key."""

    sent: float
    claimed: tuple[Any, ...] | None = None
    key: ClaimedKey | None = None
    expired: bool = False
    lock_seconds: float = 0
    verdict: str = ""


def claim_phased(request: ClaimedRequest, recovery_points: tuple[str, ...], *, using: str) -> Claim:
    """Claim the key of a phased run, in autocommit. On CLAIMED the row is locked with the token of
    this claim. Otherwise at most an expired key was retired. The ``recovery_points`` are those that
    the running code declares, and the first. Raises ``request.unstorable`` if the claim would store
    the request, because the key is new or nothing was begun for it."""
    in_one = vendor(using) == "postgresql" and request.unstorable is None
    text, connection = statements_for(using), connections[using]
    claim, upsert = text.for_phased(with_call=bool(request.first_call))
    parameters = _parameters(request, connection)
    parameters.value["points"] = rows.array_parameter(recovery_points, using)
    for _ in range(_CLAIM_TRIES):
        try:
            found = _send_claim(claim if in_one else text.read, parameters, request, connection)
            key = found.key
            if key is not None:
                if found.expired:
                    _retire(key, request, using)
                    continue
                if conflict := _conflict(found, request):
                    return conflict
                if key.recovery_point not in recovery_points:
                    return Claim(ClaimOutcome.UNKNOWN_POINT, key)
                # It has another version.
                if key.request_fingerprint != request.request_fingerprint:
                    alike = replace(request, request_fingerprint=key.request_fingerprint)
                    return claim_phased(alike, recovery_points, using=using)
            if not in_one:
                if request.unstorable is not None and (key is None or key.untouched):
                    raise request.unstorable
                found = _send_claim(upsert, parameters, request, connection)
        except Error as error:
            claimed = ClaimedKey(scope=request.scope, idempotency_key=request.idempotency_key)
            claimed.lease_seconds = request.lease_seconds
            _raise_unless_race(error, claimed, parameters, using)
            continue
        if found.claimed is not None:
            key = _key_of_claim(found, request, parameters, connection)
            key.finished_at = None
            key.begun_call = request.first_call if key.attempts == 1 else ""
            return Claim(ClaimOutcome.CLAIMED, key)
        # Another claim has inserted or changed the key, and the next attempt reads it; or a plain
        # view holds the key.
        if key is None and (conflict := _holder_conflict(parameters, request, using)):
            return conflict
    return Claim(ClaimOutcome.IN_PROGRESS)


def first_of_plain(request: ClaimedRequest, connection: BaseDatabaseWrapper) -> First:
    """Return the claim of a plain run, which may be sent with BEGIN."""
    text = statements_for(connection.alias)
    claim = text.claim_plain if connection.vendor == "postgresql" else text.insert_plain
    return First(claim, _parameters(request, connection))


def claim_plain(request: ClaimedRequest, connection: BaseDatabaseWrapper, first: First) -> Claim:
    """Claim the key of a plain run in its transaction, which may have begun with ``first``. On
    CLAIMED the row is inserted, and visible after COMMIT. Until then advisory locks refuse a
    duplicate; on SQLite the duplicate waits for the write lock. Otherwise only an expired row
    changes."""
    parameters, using = first.parameters, connection.alias
    for attempt in range(_CLAIM_TRIES):
        if first.ran and attempt == 0:
            found = _parse(Hidden(first.row), 0.0, request, connection)
        else:
            found = _send_claim(first.text, parameters, request, connection)
        if found.claimed is not None:
            key = _key_of_claim(found, request, parameters, connection)
            # Each attempt has a new seed, so no key may be derived from it.
            key.created_monotonic = None
            return Claim(ClaimOutcome.CLAIMED, key)
        # A run of the same request holds the key, and has not committed.
        if found.verdict == "same":
            return Claim(ClaimOutcome.IN_PROGRESS)
        # Another run holds the key: its holder tells whether the request is the same.
        if found.verdict == "other":
            return _holder_conflict(parameters, request, using) or Claim(ClaimOutcome.IN_PROGRESS)
        if connection.vendor != "postgresql":
            found = _send_claim(statements_for(using).read, parameters, request, connection)
        if found.key is None:
            continue  # The row was inserted or deleted concurrently.
        if not found.expired:
            # A plain run leaves no unfinished row: the work was phased before a deploy.
            return _conflict(found, request) or Claim(ClaimOutcome.UNKNOWN_POINT, found.key)
        _retire(found.key, request, using)
    return Claim(ClaimOutcome.IN_PROGRESS)


def claim_by_id(
    pk: int, *, delay_seconds: float, using: str, by: str = "completer", seen: UUID | None = None
) -> ClaimedKey | None:
    """Claim an abandoned key, with ``seen`` also before it is due, if it still has this token. The
    history names ``by``. If this run fails too, the key is due again after ``delay_seconds``.
    Return None if the key is not due, locked, finished, stuck or refused, or has another token."""
    parameters: Parameters = Hidden({"id": pk, "delay": delay_seconds, "early": seen is not None})
    parameters.value["least_lease"] = conf.get().LOCK_TIMEOUT_SECONDS
    parameters.value |= _of_claim(by, using) | {"seen": token_parameter(seen, using)}
    try:
        return rows.fetch_key(statements_for(using).claim_by_id, parameters, using)
    except Error as error:
        _raise_unless_race(error, ClaimedKey(pk=pk), parameters, using)
        return None


def _send_claim(
    text: str, parameters: Parameters, request: ClaimedRequest, connection: BaseDatabaseWrapper
) -> _Found:
    sent = time.monotonic()
    row = Hidden(_in_one_wait(fetch, text, parameters, connection.alias))
    return _parse(row, sent, request, connection)


def _retire(key: ClaimedKey, request: ClaimedRequest, using: str) -> None:
    parameters: Parameters = Hidden({"id": key.pk, "scope": request.scope})
    _in_one_wait(execute, statements_for(using).retire, parameters, using)


def _in_one_wait(send: Callable[..., Any], text: str, parameters: Parameters, using: str) -> Any:
    try:
        return send(text, parameters, using)
    except Error as error:
        errors.raise_writer_busy(error)
        raise


def _parse(
    values: Hidden[Any], sent: float, request: ClaimedRequest, connection: BaseDatabaseWrapper
) -> _Found:
    if values.value is None:
        return _Found(sent)
    if values.value[0] is not None:
        return _Found(sent, values.value[: statements.OF_CLAIMED])
    expired, lock_seconds, verdict = values.value[-3:]
    if values.value[statements.OF_CLAIMED] is None:
        return _Found(sent, verdict=verdict)
    key = rows.key_of_row(
        statements.EXISTING,
        Hidden(values.value[statements.OF_CLAIMED : -3]),
        connection,
        scope=request.scope,
        idempotency_key=request.idempotency_key,
    )
    return _Found(sent, None, key, bool(expired), lock_seconds, verdict)


def _raise_unless_race(error: Error, key: ClaimedKey, parameters: Parameters, using: str) -> None:
    """Raise the error of a claim statement, unless another claim won under a high level of
    isolation. After a lost connection or standby, release the claim: it may have been committed. A
    session that timed out is marked first, so that no outer run counts it as lost."""
    if errors.serialization_failed(error) and not connections[using].in_atomic_block:
        return
    sent = vendor(using) == "postgresql" and connections[using].connection is not None
    if sent and (errors.session_timed_out(error, using) or errors.connection_lost(error, using)):
        key.fence = parameters.value["token"]
        release_later(key, "The result of the claim was lost with the connection.", using=using)
    raise error


def _key_of_claim(
    found: _Found, request: ClaimedRequest, parameters: Parameters, connection: BaseDatabaseWrapper
) -> ClaimedKey:
    claimed = Hidden(found.claimed or ())
    key = rows.key_of_row(
        statements.CLAIMED,
        Hidden(claimed.value[:-2]),
        connection,
        scope=request.scope,
        idempotency_key=request.idempotency_key,
        request_method=request.request_method,
        request_path=request.request_path,
        request_fingerprint=request.request_fingerprint,
        lease_seconds=request.lease_seconds,
        claim_token=parameters.value["token"],
        **_CLEARED,
    )
    return rows.note_row(key, claimed.value[-2:], found.sent)


def _conflict(found: _Found, request: ClaimedRequest) -> Claim | None:
    """Return why the found key cannot be claimed, or None. A mismatch is first: another request
    must learn nothing else."""
    key: Any = found.key
    stored, fingerprint = key.request_fingerprint, request.request_fingerprint
    if fingerprint != stored and version_of(fingerprint) != version_of(stored):
        if (recomputed := request.fingerprint_as(stored)) is None:
            return Claim(ClaimOutcome.IN_PROGRESS, key)
        fingerprint = recomputed
    if fingerprint != stored:
        return Claim(ClaimOutcome.MISMATCH, key)
    if key.finished_at is not None:
        return Claim(ClaimOutcome.FINISHED, key)
    if found.lock_seconds > 0:
        return Claim(ClaimOutcome.IN_PROGRESS, key, lock_seconds=found.lock_seconds)
    if key.stuck_at is not None and key.stuck_code not in OPEN_TO_RETRIES:
        return Claim(ClaimOutcome.STUCK, key)
    return None


def _holder_conflict(parameters: Parameters, request: ClaimedRequest, using: str) -> Claim | None:
    if vendor(using) != "postgresql":
        return None
    # Only plain runs set marks.
    fingerprint = request.plain_fingerprint()
    locks = Hidden(lock_parameters(request.scope, request.idempotency_key, fingerprint))
    row = fetch(HOLDER, Hidden(parameters.value | locks.value), using)
    if row is None or not row[0]:
        return None
    return Claim(ClaimOutcome.MISMATCH if row[1] else ClaimOutcome.IN_PROGRESS)


def _parameters(request: ClaimedRequest, connection: BaseDatabaseWrapper) -> Parameters:
    # The field of the project's user model runs here.
    field = IdempotencyKey._meta.get_field("user")
    user_id = field.get_db_prep_save(request.user_id, connection)
    return Hidden(
        lock_parameters(request.scope, request.idempotency_key, request.request_fingerprint)
        | dict(zip(statements.REQUEST, _columns_of(request), strict=True))
        | {"request_headers": json.dumps(headers) if (headers := request.request_headers) else "{}"}
        | {"user_id": user_id, "seed": random_seed(), "traceparent": None}
        | {"call_event": HistoryEvent.CALL_BEGUN, "call": request.first_call}
        | _of_claim("client", connection.alias)
    )


def _of_claim(claimant: str, using: str) -> dict[str, Any]:
    token = uuid4()
    tokens = {"token": token, "claim_token": token_parameter(token, using)}
    return {**tokens, "event": HistoryEvent.CLAIMED, "detail": claimant}
