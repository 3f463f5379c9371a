"""Prompt hand-over: an attempt to enqueue staged jobs right after COMMIT, before the next pass of
the enqueuer.

The setting ``HAND_OVER_AFTER_COMMIT`` turns it on. A thread of the process that staged the job
makes the attempt with its own connection, so no request waits for a broker. Each attempt takes one
batch at most. The enqueuer must still run: it moves the jobs that an attempt leaves behind.
"""

import logging
import threading
import time
from functools import partial
from typing import Any

from django.db import close_old_connections, connections, transaction
from django.db.models.signals import post_save
from django.dispatch import receiver

from idempotency import conf
from idempotency.enqueuer import enqueue_once
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")

BATCH_SIZE = 100
#: The pause after a failed attempt. The enqueuer continues to retry.
PAUSE_SECONDS = 10
#: The time after which an idle thread closes its connection and ends.
LINGER_SECONDS = 5

_movers: dict[str, "_Mover"] = {}
_starting = threading.Lock()
_paused_until = 0.0


class _Mover(threading.Thread):
    def __init__(self, alias: str) -> None:
        super().__init__(name=f"idempotency-hand-over-{alias}", daemon=True)
        self.alias = alias
        self.wake = threading.Event()

    def run(self) -> None:
        try:
            while self.wake.wait(LINGER_SECONDS):
                self.wake.clear()
                close_old_connections()
                stop = partial(next, iter([False, True]))
                enqueue_once(batch_size=BATCH_SIZE, using=self.alias, stop=stop)
        except Exception as error:
            global _paused_until
            _paused_until = time.monotonic() + PAUSE_SECONDS
            text = "HAND_OVER_AFTER_COMMIT pauses for %d s, only the enqueuer hands jobs over: %s"
            logger.info(text, PAUSE_SECONDS, error)
        finally:
            connections.close_all()


@receiver(post_save, sender=StagedJob, dispatch_uid="idempotency-prompt")
def _attempt_after_commit(created: bool, using: str, **kwargs: Any) -> None:
    if created and conf.get().HAND_OVER_AFTER_COMMIT:
        # A callback of this package: _boundary.callbacks() does not count it.
        transaction.on_commit(lambda: _attempt(using), using=using, robust=True)


def _attempt(alias: str) -> None:
    """Wake or start the thread of the database. Return at once. A forked process has no thread."""
    if time.monotonic() < _paused_until:
        return
    with _starting:
        mover = _movers.get(alias)
        if mover is None or not mover.is_alive():
            mover = _movers[alias] = _Mover(alias)
            mover.start()
        mover.wake.set()
