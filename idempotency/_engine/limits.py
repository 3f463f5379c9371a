"""The time limits of transactions. They are only lowered: a stricter limit of the project or of a
role stays."""

import re
from collections.abc import Sequence
from functools import lru_cache

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from idempotency._engine import database_product, round_trips

IDLE, LOCK = "idle_in_transaction_session_timeout", "lock_timeout"

_UNITS = {"": 1, "ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
#: The limits that the last transaction on a database has found, as SHOW writes them; 0 is no limit.
_found: dict[tuple[str, str], str] = {}


class Limits:
    """The limits with these names that BEGIN sets, each at most ``most`` milliseconds.

    They are sent in one message: SHOW reads what holds, and SET expects what the last transaction
    has found. Unlike a query, SHOW and SET take no snapshot, so the first statement of the work
    takes it.
    """

    def __init__(self, connection: BaseDatabaseWrapper, names: tuple[str, ...], most: int) -> None:
        self._connection, self._names, self._most = connection, names, most
        shown = tuple([_found.get((connection.alias, name), "0") for name in names])
        self._expected = _lowered(most, shown)
        self.show = [f"SHOW {name}" for name in names]
        self.set = self._statements(dict(zip(names, self._expected, strict=True)))

    def corrections(self, shown: Sequence[str]) -> list[str]:
        """Return the statements that correct the limits, mostly none. ``shown`` has the results of
        SHOW."""
        for name, text in zip(self._names, shown, strict=True):
            _found[self._connection.alias, name] = text
        right = _lowered(self._most, tuple(shown))
        if right == self._expected:
            return []
        each = zip(self._names, right, self._expected, strict=True)
        return self._statements({name: limit for name, limit, set_to in each if limit != set_to})

    def _statements(self, limits: dict[str, int]) -> list[str]:
        idle = [f"SET LOCAL {IDLE} = {limits[IDLE]}"] if IDLE in limits else []
        return idle + (
            database_product.lock_timeout(self._connection, f"{limits[LOCK]}ms")
            if LOCK in limits
            else []
        )


def found_seconds(name: str, alias: str) -> float:
    """Return the limit that the last transaction of BEGIN has found on a database; 0 is no
    limit."""
    return _milliseconds(_found.get((alias, name), "0")) / 1000


def lowered(name: str, limit: str) -> str:
    """Return an expression that lowers a limit until the end of the transaction, and has the result
    as its value."""
    own = f"current_setting('{name}')"
    lower = f"{own}::interval > interval '0' AND {own}::interval < interval '{limit}'"
    return f"set_config('{name}', CASE WHEN {lower} THEN {own} ELSE '{limit}' END, true)"


def limit_waits(cursor: CursorWrapper, connection: BaseDatabaseWrapper, limit: str) -> str:
    """Lower the limit of each wait for a lock in the open transaction. Return the limit before."""
    cursor.execute(f"SELECT current_setting('{LOCK}'), {lowered(LOCK, limit)}")
    before, now = cursor.fetchone()
    limit_waits_on_workers(cursor, connection, now)
    return str(before)


def limit_waits_on_workers(
    cursor: CursorWrapper, connection: BaseDatabaseWrapper, limit: str
) -> None:
    """Limit the waits on the workers of Citus too, which get the text of SET LOCAL, but not what a
    function sets."""
    if database_product.is_citus(connection):
        for statement in database_product.lock_timeout(connection, limit):
            cursor.execute(statement)


@lru_cache(maxsize=32)
def _lowered(most: int, shown: tuple[str, ...]) -> tuple[int, ...]:
    """Return the limits in milliseconds, each at most the one that holds."""
    return tuple(min(most, _milliseconds(text) or most) for text in shown)


def _milliseconds(shown: str) -> int:
    found = re.fullmatch(r"(\d+)(\D*)", shown)
    return int(found[1]) * _UNITS[found[2]] if found else 0


def send_beginning(connection: BaseDatabaseWrapper, statements: list[str]) -> tuple[str, ...]:
    """Send the statements in one message; return the values of SHOW. The lock timeout of Citus is a
    message of its own."""
    if database_product.is_citus(connection) and LOCK in statements[-1]:
        shown = round_trips.send(connection, statements[:-1])
        round_trips.send(connection, statements[-1:])
        return shown
    return round_trips.send(connection, statements)
