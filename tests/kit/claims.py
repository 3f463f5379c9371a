"""Claims without HTTP."""

from typing import Any

from django.db import connection

from idempotency import conf
from idempotency._engine import claims, fence
from idempotency._engine.adapter import ClaimedRequest
from idempotency._engine.advisory_locks import lock_parameters
from idempotency.models import IdempotencyKey

POINTS = ("started", "paid")


def request(
    key: str = "key", *, scope: str = "user:1", fingerprint: str = "v1:one"
) -> ClaimedRequest:
    """Return the description of a request that the HTTP layer would pass."""
    return ClaimedRequest(
        scope=scope,
        idempotency_key=key,
        user_id=None,
        request_method="POST",
        request_path="/rides",
        request_body=b"{}",
        request_content_type="application/json",
        request_headers={},
        remote_addr="127.0.0.1",
        request_fingerprint=fingerprint,
        fingerprint_as=lambda stored: None,
        plain_fingerprint=lambda: fingerprint,
        retention_hours=72,
        lease_seconds=conf.get().LOCK_TIMEOUT_SECONDS,
    )


def claim(described: ClaimedRequest | None = None) -> claims.Claim:
    """Claim a key like a phased view."""
    return claims.claim_phased(described or request(), POINTS, using="default")


def claim_plain(described: ClaimedRequest | None = None) -> claims.Claim:
    """Claim a key like a plain view."""
    described = described or request()
    return claims.claim_plain(described, connection, claims.first_of_plain(described, connection))


def claim_as_completer(
    key: IdempotencyKey, *, delay: float = 60, early: bool = False
) -> IdempotencyKey | None:
    """Claim a key like the completer, or with ``early`` like the reaper."""
    if not early:
        return claims.claim_by_id(key.pk, delay_seconds=delay, using="default")
    seen = IdempotencyKey.objects.get(pk=key.pk).claim_token
    return claims.claim_by_id(key.pk, delay_seconds=delay, using="default", by="reaper", seen=seen)


def finish(key: IdempotencyKey) -> None:
    """Store an empty 200 response."""
    fence.finish(key, fence.StoredResponse(200, {}, b""), using="default")


def hand_back_and_meet_another_run(hand_back: Any, pk: int, *args: Any, **kwargs: Any) -> bool:
    """Hand a key back, and claim it for another run before the function returns."""
    done: bool = hand_back(pk, *args, **kwargs)
    assert claims.claim_by_id(pk, delay_seconds=0, using="default")
    return done


def locks(asked: ClaimedRequest) -> dict[str, int]:
    """Return the numbers of the advisory locks of a request."""
    return lock_parameters(asked.scope, asked.idempotency_key, asked.request_fingerprint)
