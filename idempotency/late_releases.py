"""Releases that an outage prevented, tried again until the lock has expired: no client waits for the whole lease.

A thread of the process that holds the claim tries them, with a connection of its own. Each is the fenced statement that failed
in the request: it changes nothing once another run has claimed the key.
"""

import random
import threading
import time
from collections import deque

from django.db import Error, connections

from idempotency import conf, keys
from idempotency.models import IdempotencyKey
from idempotency.transactions import drop_connection

#: Further ones push the oldest out, whose lock expires first.
_MAX_WAITING = 1000
#: The mean time between two tries, which one connection serves.
_PAUSE_SECONDS = 1.0

_waiting: deque[tuple[float, IdempotencyKey, str, str]] = deque(maxlen=_MAX_WAITING)
_starting = threading.Lock()
_thread: threading.Thread | None = None


def release_later(key: IdempotencyKey, error: str, *, using: str) -> None:
    """Let a thread release the key as soon as its database takes the statement, for LOCK_TIMEOUT_SECONDS at most."""
    global _thread
    # What the fence needs, without the request that its run holds.
    held = IdempotencyKey(pk=key.pk, scope=key.scope, idempotency_key=key.idempotency_key)
    held.fence = key.fence
    with _starting:
        _waiting.append((time.monotonic() + conf.get().LOCK_TIMEOUT_SECONDS, held, error, using))
        if _thread is None or not _thread.is_alive():  # A fork has none.
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
                keys.release(key, error, using=using)
                continue
            except Error:
                drop_connection(connections[using])
                unreachable.add(using)
        if time.monotonic() < until:
            _waiting.append((until, key, error, using))
