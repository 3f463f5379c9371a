"""Prompt hand-over: an attempt right after COMMIT, so that a job need not wait for the enqueuer's next pass.

Off by default (``HAND_OVER_AFTER_COMMIT``). A thread of the process that staged the job makes the attempt, with a connection of
its own: no request waits for a broker. It is only an attempt, one batch long: whatever it does not do, or leaves half done when
its process ends, the enqueuer does. Keep that one running.
"""

import logging
import threading
import time
from functools import partial
from typing import Any

from django.db import connections, transaction
from django.db.models.signals import post_save
from django.dispatch import receiver

from idempotency import conf
from idempotency.enqueuer import enqueue_once
from idempotency.models import StagedJob

logger = logging.getLogger("idempotency")

#: More is a backlog, and that is the enqueuer's.
BATCH_SIZE = 100
#: After a failure nothing is attempted for so long: the enqueuer is trying already.
PAUSE_SECONDS = 10
#: An idle thread keeps its connection for so long.
LINGER_SECONDS = 5

_movers: dict[str, "_Mover"] = {}
_starting = threading.Lock()
_paused_until = 0.0


class _Mover(threading.Thread):
    """Hands over the jobs of one database whenever it is woken, and ends when it has been idle for a while."""

    def __init__(self, alias: str) -> None:
        super().__init__(name=f"idempotency-hand-over-{alias}", daemon=True)
        self.alias = alias
        self.wake = threading.Event()

    def run(self) -> None:
        """Do one batch for each time the event was set."""
        try:
            while self.wake.wait(LINGER_SECONDS):
                self.wake.clear()
                connections[self.alias].close_if_unusable_or_obsolete()
                enqueue_once(batch_size=BATCH_SIZE, using=self.alias, stop=partial(next, iter([False, True])))
        except Exception as error:
            global _paused_until
            _paused_until = time.monotonic() + PAUSE_SECONDS
            logger.info("no hand-over after COMMIT for %d s, the enqueuer goes on: %s", PAUSE_SECONDS, error)
        finally:
            connections.close_all()


@receiver(post_save, sender=StagedJob, dispatch_uid="idempotency-prompt")
def _attempt_after_commit(created: bool, using: str, **kwargs: Any) -> None:
    if created and conf.get().HAND_OVER_AFTER_COMMIT:
        # A function of this module: a hand-over that stages a job is not refused for it.
        transaction.on_commit(lambda: _attempt(using), using=using, robust=True)


def _attempt(alias: str) -> None:
    """Wake the thread of the database, or start it; a fork has none. Returns at once."""
    if time.monotonic() < _paused_until:
        return
    with _starting:
        mover = _movers.get(alias)
        if mover is None or not mover.is_alive():
            mover = _movers[alias] = _Mover(alias)
            mover.start()
        mover.wake.set()
