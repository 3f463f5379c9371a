"""Heartbeats of the loops. They are stored in the database, so that the admin can show loops that
run on any machine."""

import os
import socket
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

from django.db import Error, connections
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from idempotency.models import ProcessHeartbeat

ENQUEUER, COMPLETER, REAPER = "enqueue_jobs", "complete_keys", "reap_keys"
#: The loops that a site needs, each at least once, and the consequence if a loop does not run.
LOOPS = {
    ENQUEUER: _("staged jobs wait"),
    COMPLETER: _("abandoned requests wait"),
    REAPER: _("old keys stay"),
}
#: The minimum time between two heartbeats of a loop. Each is one row, written in a separate
#: transaction.
WRITE_SECONDS = 10.0
#: A loop is silent if its last heartbeat is older than this. The limit is above the default of
#: LOCK_TIMEOUT_SECONDS, because a loop writes no heartbeat during a run of a key, and a run may
#: last that long.
SILENT_SECONDS = 180.0
#: The heartbeat of a killed process is kept for this time, so that the dashboard can show it. After
#: this time, the next process that starts the same loop deletes it.
KEPT_DAYS = 1


def silent_here(names: Iterable[str], *, using: str) -> list[str]:
    """Return those of the loops ``names`` that have no heartbeat of this host younger than
    SILENT_SECONDS."""
    young = ProcessHeartbeat.objects.using(using).filter(
        beat_at__gt=Now() - timedelta(seconds=SILENT_SECONDS)
    )
    alive = set(young.filter(host=_this_host()).values_list("name", flat=True))
    return [name for name in names if name not in alive]


def _this_host() -> str:
    return socket.gethostname()[:100]


def _is_running(pid: int) -> bool:
    """Return whether this host may have a process with this id."""
    if os.name != "posix":
        return True  # On Windows, signal 0 is Ctrl-C.
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # It may be a process of another user.
    return True


class Heartbeat:
    """The heartbeat of one loop of this process. If the heartbeat cannot be written, the loop
    continues; its next pass logs the error."""

    def __init__(self, name: str, *, using: str) -> None:
        self._using = using
        self._row = {"name": name, "host": _this_host(), "pid": os.getpid()}
        self._due, self._one_at_a_time = 0.0, threading.Lock()

    def beat(self) -> None:
        """Write the heartbeat, if the last one is WRITE_SECONDS old. Several threads call this,
        never in a transaction."""
        with self._one_at_a_time:
            if time.monotonic() < self._due:
                return
            first, self._due = self._due == 0, time.monotonic() + WRITE_SECONDS
        try:
            rows = self._rows()
            if first:
                rows.filter(
                    name=self._row["name"], beat_at__lt=Now() - timedelta(days=KEPT_DAYS)
                ).delete()
            if not rows.filter(**self._row).update(beat_at=Now()):
                rows.bulk_create([ProcessHeartbeat(**self._row)], ignore_conflicts=True)
        except Error:
            self._give_up()

    def remove(self) -> None:
        """Delete the heartbeat, and those of killed processes that ran the same loop on this host.
        The loop calls this method when it stops."""
        try:
            here = self._rows().filter(name=self._row["name"], host=self._row["host"])
            silent = here.filter(beat_at__lt=Now() - timedelta(seconds=SILENT_SECONDS)).values_list(
                "pid", flat=True
            )
            killed = [pid for pid in silent if not _is_running(pid)]
            here.filter(pid__in=[self._row["pid"], *killed]).delete()
        except Error:
            self._give_up()

    def _rows(self) -> QuerySet[ProcessHeartbeat]:
        return ProcessHeartbeat.objects.using(self._using)

    def _give_up(self) -> None:
        if not connections[self._using].in_atomic_block:
            connections[self._using].close()
