"""Counts of requests and of calls of operations per minute, for the charts of the dashboard. This
module registers the receivers that count, so a process without the admin site counts nothing.

A replay leaves no row, so each process counts its requests in memory. It adds its counts to the
table at most every WRITE_SECONDS, after the end of a request or of an operation, in one
transaction. A process that ends loses the counts since its last write.
"""

import logging
import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import Any

from django.core import mail
from django.core.signals import request_finished
from django.db import connections, router, transaction
from django.db.models import F, Sum
from django.dispatch import receiver

from idempotency import conf
from idempotency._engine.events import COUNTED
from idempotency._engine.limits import limit_waits
from idempotency._text import error_text
from idempotency.models import TrafficCount
from idempotency.signals import RequestOutcome, request_answered

logger = logging.getLogger("idempotency")

WRITE_SECONDS = 10.0
#: The maximum time for which a write waits for a lock (PostgreSQL only), so that a lock on the
#: table does not block all workers.
LOCK_SECONDS = 1.0
#: The time for which counts that cannot be written are kept in memory.
_UNWRITTEN_MINUTES = 60
#: Durations are counted in classes, four for each doubling. The kind of a count is "ran", a space,
#: and the class.
_CLASSES_PER_DOUBLING = 4
#: A percentile is the upper bound of its class, so it is too high by at most this percentage.
MAX_TOO_HIGH = 19
#: A minute is shown after this time, when each process has written its counts.
_SHOWN_AFTER_SECONDS = 15
_RAN = "ran "

_counts: Counter[tuple[int, str]] = Counter()
_lock = Lock()
_next_write = 0.0


@receiver(COUNTED[request_answered], dispatch_uid="idempotency.traffic.count")
def count_request(*, outcome: RequestOutcome, seconds: float, **kwargs: Any) -> None:
    """Count a request or a call of an operation in memory."""
    if conf.get().COUNT_REQUESTS:
        kind = f"{_RAN}{_class_of(seconds)}" if outcome is RequestOutcome.RAN else outcome.value
        with _lock:
            _counts[int(time.time()) // 60, kind] += 1


@receiver(request_finished, dispatch_uid="idempotency.traffic.write")
def write_after_request(**kwargs: Any) -> None:
    """Write the counts if the last write is WRITE_SECONDS ago."""
    global _next_write
    # In tests (``mail.outbox`` exists), a statement at a random request would disturb tests that
    # count statements.
    if not _counts or time.monotonic() < _next_write or hasattr(mail, "outbox"):
        return
    _next_write = time.monotonic() + WRITE_SECONDS
    try:
        write()
    except Exception as error:
        # Catch any error, also of a router. It would reach the server, and the other receivers of
        # the signal would not run.
        logger.info("the counts of requests could not be written: %s", error_text(error))


@receiver(COUNTED[request_answered], dispatch_uid="idempotency.traffic.write_after")
def write_after_operation(*, request: Any, **kwargs: Any) -> None:
    """Write the counts as after a request: a worker or a command that calls operations serves no
    request."""
    if request is None:
        write_after_request()


def write() -> None:
    """Add the counts of this process to the table. If the connection is in a transaction, or an
    exception is raised, the counts are kept for the next write."""
    with _lock:
        # The rows are in the order of the unique index, so that two processes cannot deadlock.
        rows = sorted((minute, kind, number) for (minute, kind), number in _counts.items())
        _counts.clear()
    written = False
    try:
        written = _add(rows)
    finally:
        if not written:
            oldest = int(time.time()) // 60 - _UNWRITTEN_MINUTES
            with _lock:
                _counts.update(
                    {(minute, kind): number for minute, kind, number in rows if minute >= oldest}
                )


def _add(rows: list[tuple[int, str, int]]) -> bool:
    """Add counts to the table in a separate transaction. If the connection is in a transaction
    already, or its autocommit is off, return False without a statement."""
    alias = router.db_for_write(TrafficCount)
    connection = connections[alias]
    if connection.in_atomic_block or (connection.connection and not connection.autocommit):
        return False
    table = connection.ops.quote_name(TrafficCount._meta.db_table)
    values = ", ".join(["(%s, %s, %s)"] * len(rows))
    statement = (
        f"INSERT INTO {table} (minute, kind, count) VALUES {values} "  # noqa: S608  # the name of a table
        f"ON CONFLICT (minute, kind) DO UPDATE SET count = {table}.count + excluded.count"
    )
    # Django does not close a connection that is opened after the end of a request. A broken
    # connection must be closed too.
    opened_here, broken = connection.connection is None, True
    try:
        if rows:
            with transaction.atomic(using=alias), connection.cursor() as cursor:
                if connection.vendor == "postgresql":
                    # The client has its response. The thread must wait neither long for a lock nor
                    # for a standby.
                    cursor.execute("SET LOCAL synchronous_commit = off")
                    limit_waits(cursor, connection, f"{LOCK_SECONDS * 1000:.0f}ms")
                cursor.execute(statement, [cell for row in rows for cell in row])
        broken = False
    finally:
        if opened_here or broken:
            connection.close()
    return True


@dataclass(frozen=True, slots=True)
class Traffic:
    """The counts of an interval, per minute. The percentiles are in seconds, or None if no request
    ran."""

    begin: datetime
    requests: float
    replays: float
    conflicts: float
    errors: float
    p50: float | None
    p95: float | None


def read_intervals(using: str, *, intervals: int, minutes: int) -> list[Traffic]:
    """Return the last ``intervals`` intervals of ``minutes`` minutes, the oldest first. The last
    interval ends with the last whole minute, because a part of a minute would look like a drop."""
    over = int(time.time() - _SHOWN_AFTER_SECONDS) // 60
    last = (over - 1) // minutes
    rows = (
        TrafficCount.objects.using(using)
        .filter(minute__gte=(last - intervals + 1) * minutes, minute__lt=over)
        .annotate(interval=F("minute") / minutes)
        .values_list("interval", "kind")
        .annotate(total=Sum("count"))
    )
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for interval, kind, total in rows:
        found[int(interval)][kind] = total
    return [
        _traffic(interval, min(minutes, over - interval * minutes), minutes, found[interval])
        for interval in range(last - intervals + 1, last + 1)
    ]


def _traffic(interval: int, passed: int, minutes: int, kinds: dict[str, int]) -> Traffic:
    """Return the counts of an interval, of which the first ``passed`` minutes are over."""
    ran = sorted(
        (int(kind.removeprefix(_RAN)), number)
        for kind, number in kinds.items()
        if kind.startswith(_RAN)
    )
    begin = datetime.fromtimestamp(interval * minutes * 60, UTC)
    return Traffic(
        begin,
        sum(kinds.values()) / passed,
        kinds.get(RequestOutcome.REPLAYED, 0) / passed,
        kinds.get(RequestOutcome.CONFLICT, 0) / passed,
        kinds.get(RequestOutcome.FAILED, 0) / passed,
        _percentile(ran, 0.5),
        _percentile(ran, 0.95),
    )


def _class_of(seconds: float) -> int:
    return math.ceil(_CLASSES_PER_DOUBLING * math.log2(max(seconds, 0.001) / 0.001))


def _percentile(ran: list[tuple[int, int]], share: float) -> float | None:
    """Return the upper bound of the class in which the percentile lies."""
    below, wanted = 0, share * sum(number for _, number in ran)
    for number_of_class, number in ran:
        below += number
        if below >= wanted:
            return float(0.001 * 2 ** (number_of_class / _CLASSES_PER_DOUBLING))
    return None
