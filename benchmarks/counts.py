"""The machine-independent costs of a request: statements, commits, WAL, rows written, and HOT
updates.

The WAL counters of a single connection need PostgreSQL 18.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from django.db import connection
from django.test.utils import CaptureQueriesContext

from benchmarks.views import TABLE

_FLUSH = "SELECT pg_stat_force_next_flush(), pg_stat_clear_snapshot()"
_WAL = "SELECT wal_records, wal_bytes FROM pg_stat_get_backend_wal(pg_backend_pid())"
_ROWS = (
    "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del), sum(n_tup_upd), sum(n_tup_hot_upd) FROM"
    " pg_stat_user_tables"
)


@dataclass(frozen=True)
class Counts:
    """The costs of one call."""

    #: All sent messages in order, including BEGIN, COMMIT and the work; each message is a round
    #: trip.
    statements: tuple[str, ...]
    wal_records: int
    wal_bytes: int
    rows_written: int
    updates: int
    hot_updates: int

    @property
    def commits(self) -> int:
        """Return the number of commits that wait for the disk: transactions, and statements outside
        a transaction."""
        depth = commits = 0
        for message in self.statements:
            if message.startswith("BEGIN"):
                depth = 1
            elif message.endswith(("COMMIT", "ROLLBACK")):
                commits, depth = commits + message.endswith("COMMIT"), 0
            else:
                commits += not depth
        return commits

    @property
    def besides_the_work(self) -> list[str]:
        """Return the messages with a statement that is neither the work nor only BEGIN, COMMIT or
        ROLLBACK."""
        return [
            text
            for text in self.statements
            if "bench_row" not in text and re.search("SELECT|INSERT|UPDATE|prepared", text)
        ]


def count(call: Callable[[], object]) -> Counts:
    """Return the costs of ``call()`` on the default connection."""
    # Reading the counters of the tables may prune a page of the catalogue, which writes WAL. Read
    # them outside the WAL count.
    rows = _read(_ROWS)
    wal = _read(_WAL)
    with CaptureQueriesContext(connection) as captured:
        call()
    numbers = [*_growth(wal, _read(_WAL)), *_growth(rows, _read(_ROWS))]
    # Django does not know the text of every statement that the server bound; such a statement
    # counts too.
    return Counts(
        tuple(query["sql"] or "(prepared)" for query in sent(captured.captured_queries)), *numbers
    )


def count_least(call: Callable[[], object]) -> Counts:
    """Return the costs of the cheapest of three calls of ``call()``. PostgreSQL may itself write
    during a call: a reader prunes a page of the catalogue after an autovacuum."""
    return min((count(call) for _ in range(3)), key=lambda each: each.wal_bytes)


def sent(queries: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Return the queries without each COMMIT that Django logged but did not send: the message
    before contains it."""
    found: list[dict[str, str]] = []
    for query in queries:
        if (
            query["sql"] != "COMMIT"
            or not found
            or not (found[-1]["sql"] or "").endswith("; COMMIT")
        ):
            found.append(query)
    return found


def create_table() -> None:
    """Create the table of the work."""
    with connection.cursor() as cursor:
        cursor.execute(TABLE)


def _read(statement: str) -> list[int]:
    with connection.cursor() as cursor:
        # PostgreSQL publishes the counts of this connection at the end of this statement.
        cursor.execute(_FLUSH)
        cursor.execute(statement)
        return [int(number) for number in cursor.fetchone()]


def _growth(before: list[int], after: list[int]) -> list[int]:
    return [end - start for start, end in zip(before, after, strict=True)]
