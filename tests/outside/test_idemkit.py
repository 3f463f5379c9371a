"""The vectors that idemkit publishes for any store of keys, on this one.

The adapter translates names and durations, and decides nothing: each of its calls is one of the
store. What idemkit gives with each call, this app has in its settings, so that the translation has
two peculiarities.

- A lease, or a time to live, that is shorter than that of the settings: the row is dated back by
  the difference. Whether it has run out is then said by the claim, not by the adapter.
- Released: idemkit forgets the key. Here the row stays, with its fingerprint and its recovery
  point, because another request may not have the key and a phase may have been committed. A claim
  of a released key is ``NEW_CLAIMED`` nevertheless, one of a key whose lock ran out is
  ``LEASE_RECLAIMED``; the row's history tells them apart.
"""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar, cast

import pytest
from django.db import connection
from django.db.models import F
from idemkit.conformance import BackendConformance
from idemkit.core.state import ClaimResult, ClaimResultType, State, StoredRecord

from idempotency import conf
from idempotency._engine import claims, fence, rows
from idempotency._engine.adapter import ClaimedRequest
from idempotency._engine.attempts import Wait
from idempotency._engine.claims import Claim, ClaimOutcome
from idempotency.exceptions import LockLost
from idempotency.models import STARTED, IdempotencyKey
from idempotency.phases import ClaimedKey

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

Result = TypeVar("Result")

SCOPE = "idemkit"
ALIAS = "default"
#: The lease that most vectors ask for.
LOCK_TIMEOUT_SECONDS = 30


class Backend:
    """The store under the names of idemkit's protocol; each call in a thread with a connection of
    its own."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    async def claim(
        self,
        effective_key: str,
        fingerprint: str,
        fingerprint_version: int,
        lease_ttl_seconds: float,
    ) -> ClaimResult:
        request = _request(effective_key, f"{fingerprint}:{fingerprint_version}")

        def run() -> ClaimResult:
            claim = claims.claim_phased(request, (STARTED,), using=ALIAS)
            if claim.outcome is ClaimOutcome.CLAIMED:
                _date_back("locked_until", claim.key, LOCK_TIMEOUT_SECONDS - lease_ttl_seconds)
            return _result(claim, request)

        return await self._call(run)

    async def complete(
        self,
        effective_key: str,
        claim_token: str,
        response_status: int,
        response_headers: dict[str, str],
        response_body: bytes,
        expires_after_seconds: float,
    ) -> bool:
        def run(key: ClaimedKey) -> None:
            fence.finish(
                key,
                fence.StoredResponse(response_status, response_headers, response_body),
                using=ALIAS,
            )
            _date_back("expires_at", key, conf.get().RETENTION_HOURS * 3600 - expires_after_seconds)

        return await self._fenced(effective_key, claim_token, run)

    async def release(self, effective_key: str, claim_token: str) -> bool:
        def run(key: ClaimedKey) -> None:
            before = key.history  # It is read from the database now.
            fence.release(key, "released", using=ALIAS)
            if before == IdempotencyKey.objects.get(pk=key.pk).history:
                raise LockLost  # It is only logged: the app has nothing to do about it.

        return await self._fenced(effective_key, claim_token, run)

    async def renew(self, effective_key: str, claim_token: str, lease_ttl_seconds: float) -> bool:
        def run(key: ClaimedKey) -> None:
            fence.renew(key, using=ALIAS)
            _date_back("locked_until", key, LOCK_TIMEOUT_SECONDS - lease_ttl_seconds)

        return await self._fenced(effective_key, claim_token, run)

    async def wait_for_completion(
        self, effective_key: str, timeout_seconds: float
    ) -> StoredRecord | None:
        def run() -> StoredRecord | None:
            wait = Wait(timeout_seconds)
            while (key := _row(effective_key)).finished_at is None:
                if not wait.pause():
                    return None
            return _record(key)

        return await self._call(run)

    async def _fenced(
        self, effective_key: str, claim_token: str, change: Callable[[ClaimedKey], None]
    ) -> bool:
        def run() -> bool:
            key = _row(effective_key)
            # The run that was given the token: it knows no other, and was not told how far others
            # have come.
            key.fence, key.recovery_point = _uuid(claim_token), STARTED
            try:
                change(key)
            except LockLost:
                return False
            return True

        return await self._call(run)

    async def _call(self, run: Callable[[], Result]) -> Result:
        def with_connection() -> Result:
            try:
                return run()
            finally:
                connection.close()

        return await asyncio.get_running_loop().run_in_executor(self._threads, with_connection)


def _uuid(token: str) -> uuid.UUID:
    """Return the token as one of this app's; a foreign one becomes a UUID too, so that the database
    has to refuse it."""
    try:
        return uuid.UUID(token)
    except ValueError:
        return uuid.uuid5(uuid.NAMESPACE_OID, token)


def _request(effective_key: str, fingerprint: str) -> ClaimedRequest:
    return ClaimedRequest(
        scope=SCOPE,
        idempotency_key=effective_key,
        user_id=None,
        request_method="POST",
        request_path="/idemkit",
        request_body=b"",
        request_content_type="",
        request_headers={},
        remote_addr="",
        request_fingerprint=fingerprint,
        fingerprint_as=lambda stored: fingerprint,
        plain_fingerprint=lambda: fingerprint,
        retention_hours=conf.get().RETENTION_HOURS,
        lease_seconds=LOCK_TIMEOUT_SECONDS,
    )


def _row(effective_key: str) -> ClaimedKey:
    pk = IdempotencyKey.objects.values_list("pk", flat=True).get(
        scope=SCOPE, idempotency_key=effective_key
    )
    return cast(ClaimedKey, rows.read(pk, using=ALIAS))


def _date_back(column: str, key: IdempotencyKey, seconds: float) -> None:
    """Let a duration that began just now end ``seconds`` earlier."""
    if seconds:
        IdempotencyKey.objects.filter(pk=key.pk).update(
            **{column: F(column) - timedelta(seconds=seconds)}
        )


def _result(claim: Claim, request: ClaimedRequest) -> ClaimResult:
    if claim.outcome is ClaimOutcome.CLAIMED:
        before = [entry["event"] for entry in _row(request.idempotency_key).history][-2:-1]
        kind = (
            ClaimResultType.LEASE_RECLAIMED
            if before == ["run lost"]
            else ClaimResultType.NEW_CLAIMED
        )
        return ClaimResult(kind, _record(claim.key), str(claim.key.claim_token))
    kinds = {
        ClaimOutcome.IN_PROGRESS: ClaimResultType.ALREADY_CLAIMED,
        ClaimOutcome.FINISHED: ClaimResultType.ALREADY_COMPLETED,
    }
    # While the winner of a race has not committed, nobody can see its row.
    return ClaimResult(
        kinds[claim.outcome], _record(claim.key) if claim.key else _unseen_record(request)
    )


def _record(key: ClaimedKey) -> StoredRecord:
    claimed_at, finished = key.last_run_at.timestamp(), key.finished_at is not None
    return StoredRecord(
        effective_key=key.idempotency_key,
        state=State.COMPLETED if finished else State.CLAIMED,
        fingerprint=key.request_fingerprint,
        fingerprint_version=1,
        claim_token=str(key.claim_token),
        claimed_at=claimed_at,
        lease_until=claimed_at + LOCK_TIMEOUT_SECONDS,
        completed_at=key.finished_at.timestamp() if finished else None,
        response_status=key.response_code,
        response_headers=key.response_headers or {},
        response_body=bytes(key.response_body or b""),
    )


def _unseen_record(request: ClaimedRequest) -> StoredRecord:
    return StoredRecord(
        effective_key=request.idempotency_key,
        state=State.CLAIMED,
        fingerprint=request.request_fingerprint,
        fingerprint_version=1,
        claim_token="",
        claimed_at=0,
        lease_until=0,
    )


def test_44_the_vectors_of_idemkit_hold(
    settings: Any, record_property: Callable[[str, object], None]
) -> None:
    settings.IDEMPOTENCY = {"LOCK_TIMEOUT_SECONDS": LOCK_TIMEOUT_SECONDS}
    with ThreadPoolExecutor(max_workers=25) as threads:
        report = asyncio.run(BackendConformance(Backend(threads)).run())

    passed = report.total - len(report.failures)
    record_property("counts", f"idemkit: {passed} of {report.total} vectors")
    assert report.passed, report.report()
    assert report.total == 13
