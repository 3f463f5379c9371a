"""The claim: to take the lock on a key, or to learn why that cannot be.

On PostgreSQL a claim is one statement and one round trip. Source: Brandur Leach, "Implementing Stripe-like Idempotency Keys in
Postgres", whose SELECT-then-INSERT under SERIALIZABLE is one upsert here.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from django.db import Error, connections

from idempotency import sql
from idempotency.fingerprint import way_of
from idempotency.keys import key_as_read
from idempotency.models import OPEN_TO_RETRIES, IdempotencyKey, random_seed
from idempotency.rows import execute, fetch, key_of_row, statements, token_parameter, vendor
from idempotency.transactions import refuse_second_wait, retryable_failure

#: How often a claim looks again when the row it met changed under its eyes: each time somebody else got on.
_CLAIM_TRIES = 10


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
    #: Returns the fingerprint of this request made in the way of a stored one, None if this code does not know that way.
    made_alike: Callable[[str], str | None] | None = None


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
    expired key moved out of the way. ``recovery_points`` are all at which the view can go on: the first, and those it declares.
    """
    postgresql = vendor(using) == "postgresql"
    text = statements(using)
    token, parameters = _parameters(request, using)
    parameters["points"] = list(recovery_points) if postgresql else json.dumps(recovery_points)
    for _ in range(_CLAIM_TRIES):
        try:
            look = _look(text.claim_phased if postgresql else text.read, parameters, request, using)
        except Error as error:
            if retryable_failure(error, None) is None or connections[using].in_atomic_block:
                raise
            continue  # The connection's own level is a high one, and somebody else was faster.
        row = look.row
        if row is not None and row.expired:
            execute(text.retire, {"id": row.key.pk, "scope": request.scope}, using)
            continue
        if not postgresql and (row is None or _refusal(row, request, recovery_points) is None):
            look = _look(text.upsert, parameters, request, using)
        if look.claimed is not None:
            # A claim takes back what is stuck, and a key that can be claimed has no response yet.
            return Claim(Outcome.CLAIMED, _claimed_key(look.claimed, request, token, using, finished_at=None))
        if row is None:
            if postgresql and (refusal := _refusal_by_holder(parameters, using)):
                return refusal
            continue  # Lost the race for a new key: the next look finds the winner.
        if (comparable := _comparable(row, request)) is None:
            return Claim(Outcome.IN_PROGRESS, row.key, lock_seconds=1)
        if comparable is not request:
            return claim_phased(comparable, recovery_points, using=using)
        if refusal := _refusal(row, request, recovery_points):
            return refusal
    return Claim(Outcome.IN_PROGRESS, lock_seconds=1)


def claim_plain(request: ClaimedRequest, *, using: str) -> Claim:
    """Claim the key of a plain view inside its transaction.

    On CLAIMED the row is inserted, and nobody else sees it before COMMIT; duplicates are refused at once, by advisory
    locks that last as long as the transaction. On anything else nothing was written. On SQLite a duplicate
    waits for the writer.
    """
    postgresql = vendor(using) == "postgresql"
    text = statements(using)
    token, parameters = _parameters(request, using)
    for _ in range(_CLAIM_TRIES):
        look = _look(text.claim_plain if postgresql else text.insert_plain, parameters, request, using)
        if look.claimed is not None:
            key = _claimed_key(look.claimed, request, token, using)
            key.born_monotonic = None  # The seed is drawn anew by each attempt: nothing may be derived from it.
            return Claim(Outcome.CLAIMED, key)
        if look.verdict == "same":
            return Claim(Outcome.IN_PROGRESS, lock_seconds=1)
        if look.verdict == "other":
            return _refusal_by_holder(parameters, using) or Claim(Outcome.IN_PROGRESS, lock_seconds=1)
        row = look.row if postgresql else _look(text.read, parameters, request, using).row
        if row is None:
            continue  # The row that was in the way has just gone, or has just come.
        if not row.expired:
            if (comparable := _comparable(row, request)) is None:
                return Claim(Outcome.IN_PROGRESS, row.key, lock_seconds=1)
            if comparable is not request:
                return claim_plain(comparable, using=using)
            # A plain view leaves no unfinished row: such a one was phased before a deploy, and has no point known here.
            return _refusal(row, request, ()) or Claim(Outcome.UNKNOWN_POINT, row.key)
        execute(text.retire, {"id": row.key.pk, "scope": request.scope}, using)
    return Claim(Outcome.IN_PROGRESS, lock_seconds=1)


def claim_by_id(pk: int, *, delay_seconds: float, using: str, early: bool = False) -> IdempotencyKey | None:
    """Claim an abandoned key for the completer, which leaves it alone for ``delay_seconds`` if this run fails too.

    ``early``: for the reaper, whose run of ``on_abandon`` does not wait for the end of the delay that an earlier run has set.
    Return the claimed key; None if it is not due yet, or somebody else was faster, finished it, or marked it as stuck, or
    its client was refused.
    """
    parameters = {
        "id": pk,
        "claim_token": token_parameter(uuid.uuid4(), using),
        "delay": delay_seconds,
        "early": early,
        "event": "claimed",
        "detail": "reaper" if early else "completer",
    }
    try:
        return key_as_read(fetch(statements(using).claim_by_id, parameters, using), using)
    except Error as error:
        if retryable_failure(error, None) is None or connections[using].in_atomic_block:
            raise
        return None  # The connection's own level is a high one, and somebody else was faster.


@dataclass(frozen=True, slots=True)
class _Look:
    """What a statement of a claim returned: the columns of the key that it claimed, or the row that it met."""

    claimed: tuple[Any, ...] | None = None
    row: _Row | None = None
    verdict: str = ""


def _look(text: str, parameters: dict[str, Any], request: ClaimedRequest, using: str) -> _Look:
    try:
        values = fetch(text, parameters, using)
    except Error as error:
        refuse_second_wait(error)
        raise
    if values is None:
        return _Look()
    claimed, (*columns, expired, lock_seconds), verdict = sql.parts(values)
    if claimed is not None:
        return _Look(claimed)
    if columns[0] is None:
        return _Look(verdict=verdict)
    known = {"scope": request.scope, "idempotency_key": request.idempotency_key}
    return _Look(row=_Row(key_of_row(sql.MET, columns, using, **known), bool(expired), lock_seconds), verdict=verdict)


def _claimed_key(row: tuple[Any, ...], request: ClaimedRequest, token: uuid.UUID, using: str, **known: Any) -> IdempotencyKey:
    """Return the key that this claim holds: what the statement returned, and what the claim itself has written."""
    *columns, age_seconds, place = row
    key = key_of_row(
        sql.CLAIMED,
        columns,
        using,
        scope=request.scope,
        idempotency_key=request.idempotency_key,
        request_method=request.method,
        request_path=request.path,
        request_fingerprint=request.fingerprint,
        claim_token=token,
        stuck_at=None,
        stuck_code="",
        stuck_reason="",
        response_code=None,
        response_headers=None,
        response_body=None,
        **known,
    )
    # Its age goes by the database's clock up to here, and from here by one that never jumps.
    key.born_monotonic = time.monotonic() - age_seconds
    key.fence, key.place = token, place
    return key


def _comparable(row: _Row, request: ClaimedRequest) -> ClaimedRequest | None:
    """Return the request with its fingerprint made in the way of this key's: by another version, or under another secret.

    None if that way is not known here: newer code or a newer secret made it, and only there can a retry be told from another
    request.
    """
    stored = row.key.request_fingerprint
    if request.made_alike is None or way_of(stored) == way_of(request.fingerprint):
        return request
    made = request.made_alike(stored)
    return replace(request, fingerprint=made) if made is not None else None


def _refusal(row: _Row, request: ClaimedRequest, recovery_points: tuple[str, ...]) -> Claim | None:
    """Return why this key cannot be claimed, None if it can. A mismatch comes first: it must learn nothing of the rest."""
    key = row.key
    if key.request_fingerprint != request.fingerprint:
        return Claim(Outcome.MISMATCH, key)
    if key.finished_at is not None:
        return None if row.expired else Claim(Outcome.FINISHED, key)
    if row.lock_seconds > 0:
        return Claim(Outcome.IN_PROGRESS, key, lock_seconds=row.lock_seconds)
    if key.stuck_at is not None and key.stuck_code not in OPEN_TO_RETRIES:
        return Claim(Outcome.STUCK, key)
    if key.recovery_point not in recovery_points:
        return Claim(Outcome.UNKNOWN_POINT, key)
    return None


def _refusal_by_holder(parameters: dict[str, Any], using: str) -> Claim | None:
    """Return why this key cannot be claimed while another session holds its lock; None if none does (any more)."""
    held, another_request = fetch(sql.HOLDER, parameters, using) or (False, False)
    if not held:
        return None
    return Claim(Outcome.MISMATCH if another_request else Outcome.IN_PROGRESS, lock_seconds=1)


def _parameters(request: ClaimedRequest, using: str) -> tuple[uuid.UUID, dict[str, Any]]:
    """Return the token of a new claim and the parameters of its statement."""
    token = uuid.uuid4()
    return token, _lock_parameters(request) | {
        "scope": request.scope,
        "idempotency_key": request.idempotency_key,
        "user_id": IdempotencyKey._meta.get_field("user").get_db_prep_save(request.user_id, connections[using]),
        "claim_token": token_parameter(token, using),
        "request_method": request.method,
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
    """Return the numbers of the advisory locks: 64 bits for the key, and 64 bits, in two numbers, that mark its request.

    The scope is preceded by its length: no two pairs look alike. The first number of the mark names the key alone, by which
    a session recognises the mark of another request. The second one is made of the key and its request: equal requests
    under two keys collide only if both numbers do.
    """
    name = f"{len(request.scope)}:{request.scope}{request.idempotency_key}".encode()
    key_hash = hashlib.blake2b(name, digest_size=12).digest()
    # Begins with the way in which the fingerprint was made: fingerprints that were made in two ways cannot be compared.
    way_hash = hashlib.blake2b(way_of(request.fingerprint).encode(), digest_size=1).digest()
    request_hash = way_hash + hashlib.blake2b(key_hash + request.fingerprint.encode(), digest_size=3).digest()
    return {
        "lock": int.from_bytes(key_hash[:8], "big", signed=True),
        "mark_key": int.from_bytes(key_hash[8:], "big", signed=True),
        "mark_request": int.from_bytes(request_hash, "big", signed=True),
    }
