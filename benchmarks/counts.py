"""What a request costs whatever the machine: statements, commits, WAL, rows written, and how many updates were HOT.

What PostgreSQL counts for this process's own connection needs PostgreSQL 18.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from django.db import connection
from django.test.utils import CaptureQueriesContext

from benchmarks.views import TABLE

_FLUSH = "SELECT pg_stat_force_next_flush(), pg_stat_clear_snapshot()"
_WAL = "SELECT wal_records, wal_bytes FROM pg_stat_get_backend_wal(pg_backend_pid())"
_ROWS = "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del), sum(n_tup_upd), sum(n_tup_hot_upd) FROM pg_stat_user_tables"


@dataclass(frozen=True)
class Counts:
    """What one call cost."""

    #: All messages that were sent, BEGIN and COMMIT and the work included, in their order: a round trip each.
    statements: tuple[str, ...]
    wal_records: int
    wal_bytes: int
    rows_written: int
    updates: int
    hot_updates: int

    @property
    def commits(self) -> int:
        """Return the commits that wait for the disk: those of transactions, and statements outside of one."""
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
        """Return the statements that are neither the work nor the ends of a transaction, alone or together with one."""
        return [
            text for text in self.statements if "bench_row" not in text and re.search("SELECT|INSERT|UPDATE|prepared", text)
        ]


def count(call: Callable[[], object]) -> Counts:
    """Return what ``call()`` cost on the default connection."""
    # To read the tables' counts may tidy a page of the catalogue, which writes WAL: they are read outside of what is counted.
    rows = _read(_ROWS)
    wal = _read(_WAL)
    with CaptureQueriesContext(connection) as captured:
        call()
    numbers = [*_growth(wal, _read(_WAL)), *_growth(rows, _read(_ROWS))]
    # Django does not know the text of every statement that was bound in the server; it is one all the same.
    return Counts(tuple(query["sql"] or "(prepared)" for query in sent(captured.captured_queries)), *numbers)


def sent(queries: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Return the queries without each COMMIT that Django has logged, but not sent: the message before it had one."""
    found: list[dict[str, str]] = []
    for query in queries:
        if query["sql"] != "COMMIT" or not found or not (found[-1]["sql"] or "").endswith("; COMMIT"):
            found.append(query)
    return found


def create_table() -> None:
    """Create the table of the work."""
    with connection.cursor() as cursor:
        cursor.execute(TABLE)


def _read(statement: str) -> list[int]:
    with connection.cursor() as cursor:
        # The counts of this connection are handed in at the end of the statement.
        cursor.execute(_FLUSH)
        cursor.execute(statement)
        return [int(number) for number in cursor.fetchone()]


def _growth(before: list[int], after: list[int]) -> list[int]:
    return [end - start for start, end in zip(before, after, strict=True)]
