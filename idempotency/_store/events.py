"""Log lines and signals about a key."""

import logging
from typing import Any

from django.dispatch import Signal
from django.http import HttpRequest

from idempotency import signals
from idempotency._store.rows import read
from idempotency.models import IdempotencyKey

logger = logging.getLogger("idempotency")


def about(key: IdempotencyKey) -> dict[str, str]:
    return {"key_hash": key.key_hash}


def emit(signal: Signal, key: IdempotencyKey | None, request: HttpRequest | None, **more: Any) -> None:
    signal.send_robust(sender=IdempotencyKey, key=key, request=request, **more)


def announce_stuck(pk: int, request: HttpRequest | None, *, using: str) -> None:
    key = read(pk, using=using)
    if key is not None:
        logger.warning("key %s is stuck (%s): %s", key.key_hash, key.stuck_code, key.stuck_reason, extra=about(key))
    emit(signals.key_stuck, key, request)
