"""Repeat releases that failed in an outage until the lock expires, so that clients need not wait
for the expiry.

A thread of the process retries them with its own connection. Each is the fenced statement of the
request, so it changes nothing if another run has claimed the key.
"""

import random
import threading
import time
from collections import deque

from django.db import Error, connections

from idempotency._engine import fence, replication
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.errors import drop_connection
from idempotency.exceptions import NotReplicated
from idempotency.models import IdempotencyKey

#: Beyond this number the oldest release, whose lock expires first, is dropped.
_MAX_WAITING = 1000
_PAUSE_SECONDS = 1.0

_waiting: deque[tuple[float, ClaimedKey, str, str]] = deque(maxlen=_MAX_WAITING)
_starting = threading.Lock()
_thread: threading.Thread | None = None


def release_later(key: ClaimedKey, error: str, *, using: str) -> None:
    """Let a thread retry to release the key, for the length of its lease. A key without an id is
    found by its claim."""
    global _thread
    # A copy for the fence: the key itself would keep its request in memory.
    held = ClaimedKey(
        pk=key.pk,
        scope=key.scope,
        idempotency_key=key.idempotency_key,
        lease_seconds=key.lease_seconds,
    )
    held.fence = key.fence
    with _starting:
        _waiting.append((time.monotonic() + held.lease_seconds, held, error, using))
        if _thread is None or not _thread.is_alive():  # It has ended, or this is a forked process.
            _thread = threading.Thread(target=_run, name="idempotency-late-releases", daemon=True)
            _thread.start()


def _run() -> None:
    global _thread
    while True:
        time.sleep(random.uniform(0.5, 1.5) * _PAUSE_SECONDS)  # nosec B311  # spreads processes; no secret
        try:
            _try_each()
        finally:
            connections.close_all()
        with _starting:
            if not _waiting:
                _thread = None
                return


def _try_each() -> None:
    unreachable = set()
    for _ in range(len(_waiting)):
        until, key, error, using = _waiting.popleft()
        if using not in unreachable:
            try:
                _release(key, error, using)
                continue
            except Error as failure:
                drop_connection(connections[using])
                if not isinstance(failure, NotReplicated):
                    unreachable.add(using)
        if time.monotonic() < until:
            _waiting.append((until, key, error, using))


def _release(key: ClaimedKey, error: str, using: str) -> None:
    """Release the key. Raises NotReplicated if there is nothing to release here, but a failover may
    undo the end of the run."""
    if key.pk is None:  # The result of its claim was lost.
        keys = IdempotencyKey.objects.using(using).filter(
            scope=key.scope, idempotency_key=key.idempotency_key
        )
        key.pk = keys.filter(claim_token=key.fence).values_list("pk", flat=True).first()
    if key.pk is None:
        replication.confirm(using)
    else:
        fence.release(key, error, using=using)
