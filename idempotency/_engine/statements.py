"""The SQL statements that read and claim keys, for PostgreSQL and for SQLite, beside the updates.
Durations are seconds; times are those of the database.
"""

# ruff: noqa: S608 - only names and constants are formatted into a text

from functools import cached_property

from idempotency._engine.advisory_locks import KEY_LOCK, MARK_KEY, MARK_REQUEST
from idempotency._engine.updates import (
    CLEAR_STUCK,
    NOT_REFUSED,
    RETIRED,
    TABLE,
    UNTOUCHED,
    Updates,
    one_line,
)
from idempotency.exceptions import OPEN_TO_RETRIES, WAITS_FOR_DEPLOY
from idempotency.models import FINISHED, STARTED, IdempotencyKey

_COLUMNS = {field.attname: field.column for field in IdempotencyKey._meta.concrete_fields}
#: The columns that are large or for display, and that no statement reads.
_DEFERRED = {
    *("request_body", "request_content_type", "request_headers", "remote_addr"),
    *("last_error", "history"),
}
#: The columns that are read by id, with age and ctid.
READ = tuple(name for name in _COLUMNS if name not in _DEFERRED)
#: The columns that a claim returns, with age and ctid: those that it does not write itself.
CLAIMED = ("id", "user_id", "attempts", "begun", "seed", "recovery_point", "traceparent")
#: The columns of an existing key that a claim returns, with ``expired`` and the remaining seconds
#: of its lock.
EXISTING = (
    *("id", "user_id", "attempts", "begun", "recovery_point", "request_fingerprint"),
    *("finished_at", "stuck_at", "stuck_code", "traceparent"),
    *("response_code", "response_headers", "response_body"),
)
#: While nothing is begun, each request of the client replaces these parts of the stored one: the
#: completer runs the last one.
_REPLACED = (
    *("user_id", "request_path", "request_body", "request_content_type", "request_headers"),
    *("remote_addr", "retention_hours"),
)
#: The columns of a request: fields of ``ClaimedRequest``, and parameters of a claim.
REQUEST = (
    *("scope", "idempotency_key", "request_method", "request_fingerprint", "lease_seconds"),
    *_REPLACED,
)

#: The first is for claims of clients, the second for the completer.
_OPEN_TO_RETRIES = f"(k.stuck_at IS NULL OR k.stuck_code IN {tuple(map(str, OPEN_TO_RETRIES))!r})"
_NOT_GIVEN_UP = f"(k.stuck_at IS NULL OR k.stuck_code IN {tuple(map(str, WAITS_FOR_DEPLOY))!r})"
_NEXT_ATTEMPT = f"attempts = k.attempts + 1, {NOT_REFUSED}"
_OF_CLIENT = "k.scope = %(scope)s AND k.idempotency_key = %(idempotency_key)s"
_LAST_REQUEST = ", ".join(
    f"{name} = CASE WHEN {UNTOUCHED} THEN excluded.{name} ELSE k.{name} END" for name in _REPLACED
)
_LEASE_OF_COMPLETER = (
    "CASE WHEN k.lease_seconds < %(least_lease)s THEN %(least_lease)s ELSE k.lease_seconds END"
)
#: The number of columns of a claimed key in the row of a claim. Those of the existing key follow,
#: and the verdict of ``claim_plain``, else empty.
OF_CLAIMED = len(CLAIMED) + 2
_NOTHING_CLAIMED = ", ".join(["NULL"] * OF_CLAIMED)
_NO_EXISTING = ", ".join(["NULL"] * (len(EXISTING) + 2))
_EXISTING_COLUMNS = ", ".join(
    f"existing.{name}" for name in [*map(_COLUMNS.get, EXISTING), "expired", "lock_seconds"]
)


class Statements(Updates):
    """All statements for one database vendor."""

    @cached_property
    def _existing(self) -> str:
        left = self.dialect.seconds_between.format(self.now, "k.locked_until")
        return (
            f"{_columns(EXISTING, 'k.')}, COALESCE({self.expired}, false) AS expired,"
            f" COALESCE({left}, 0) AS lock_seconds"
        )

    def _claimable(self, unlocked: str) -> str:
        # A retry may claim a stuck key only with a code of OPEN_TO_RETRIES, and if the code
        # declares its recovery point.
        return one_line(f"""
            (k.finished_at IS NULL AND k.request_fingerprint = %(request_fingerprint)s
            AND {unlocked} AND {_OPEN_TO_RETRIES} AND {self.dialect.known_point})
        """)

    def _claimed(self, names: tuple[str, ...] = CLAIMED) -> str:
        # SQLite does not support an alias in RETURNING. Each claim sets last_run_at to the time of
        # its statement.
        age = self.dialect.seconds_between.format("created_at", "last_run_at")
        return f"{_columns(names)}, {age} AS age_seconds, {self.dialect.ctid}"

    @cached_property
    def read(self) -> str:
        return (
            f"SELECT {_NOTHING_CLAIMED}, {self._existing}, '' FROM {TABLE} AS k WHERE {_OF_CLIENT}"
        )

    @cached_property
    def read_by_id(self) -> str:
        age = self.dialect.seconds_between.format("k.created_at", self.now)
        return one_line(f"""
            SELECT {_columns(READ, "k.")}, {age} AS age_seconds, {self.dialect.ctid}
            FROM {TABLE} AS k WHERE k.id = %(id)s
        """)

    def _insert(self, *, finished: bool, source: str, call: bool = False) -> str:
        later_by = self.dialect.later_by
        # A plain run finishes in this transaction. Setting the times now lets its UPDATE be
        # heap-only (HOT).
        expiry = later_by.format("%(retention_hours)s", "hour") if finished else "NULL"
        lock = "NULL" if finished else later_by.format("%(lease_seconds)s", "second")
        events = [self.dialect.event, self._call_event] if call else [self.dialect.event]
        values = {
            **{"created_at": self.now, "last_run_at": self.now},
            **{"finished_at": self.now if finished else "NULL", "expires_at": expiry},
            **{"recovery_point": f"'{FINISHED if finished else STARTED}'", "locked_until": lock},
            **{"attempts": "1", "begun": "true" if call else "false", "completer_attempts": "0"},
            **{"stuck_code": "''", "stuck_reason": "''", "last_error": "''"},
            "history": self.dialect.first_event.format(event=", ".join(events)),
            **{name: f"%({name})s" for name in ("claim_token", "seed", "traceparent", *REQUEST)},
            # A parameter of two expressions must have one type in both.
            "lease_seconds": "CAST(%(lease_seconds)s AS integer)",
            "retention_hours": "CAST(%(retention_hours)s AS integer)",
        }
        if call:
            values["call_begun_at"] = self.now
        selected = ", ".join(values.values())
        return f"INSERT INTO {TABLE} AS k ({', '.join(values)}) SELECT {selected} {source}"

    @cached_property
    def _call_event(self) -> str:
        return self.dialect.event.replace("(event)", "(call_event)").replace("(detail)", "(call)")

    @cached_property
    def upsert(self) -> str:
        """Claim the key of a phased run: insert it, or take it over if it is claimable. No row
        means neither."""
        return f"{self._upsert('WHERE true')}, {_NO_EXISTING}, ''"

    @cached_property
    def upsert_with_call(self) -> str:
        """As ``upsert``. A new key begins its first call."""
        return f"{self._upsert('WHERE true', call=True)}, {_NO_EXISTING}, ''"

    def _upsert(self, source: str, *, call: bool = False) -> str:
        unlocked = "(k.locked_until IS NULL OR k.locked_until <= excluded.created_at)"
        history = self.dialect.append_after_lock.format(event=self.dialect.event_of_insert)
        return one_line(f"""
            {self._insert(finished=False, source=source, call=call)}
            ON CONFLICT (scope, idempotency_key) DO UPDATE
            SET claim_token = excluded.claim_token, locked_until = excluded.locked_until,
                lease_seconds = excluded.lease_seconds, last_run_at = excluded.last_run_at,
                {_NEXT_ATTEMPT}, {CLEAR_STUCK}, {_LAST_REQUEST}, history = {history}
            WHERE {self._claimable(unlocked)}
            RETURNING {self._claimed()}
        """)

    def for_phased(self, *, with_call: bool) -> tuple[str, str]:
        """Return the statements ``claim_phased`` and ``upsert``, or those that begin a call."""
        if with_call:
            return self.claim_phased_with_call, self.upsert_with_call
        return self.claim_phased, self.upsert

    @cached_property
    def claim_phased(self) -> str:
        """Read the key, and claim it if it is claimable, in one statement. A replay only reads: it
        takes no lock and no transaction id. Only PostgreSQL supports INSERT in WITH."""
        return self._claim_phased(call=False)

    @cached_property
    def claim_phased_with_call(self) -> str:
        """As ``claim_phased``. A new key begins its first call."""
        return self._claim_phased(call=True)

    def _claim_phased(self, *, call: bool) -> str:
        # An INSERT would wait for the uncommitted row of a plain run; the advisory lock does not.
        guard = f"""
            WHERE CASE WHEN EXISTS (SELECT 1 FROM existing)
            THEN (SELECT existing.claimable AND NOT existing.expired FROM existing)
            ELSE pg_try_advisory_xact_lock({KEY_LOCK}) END
        """
        return one_line(f"""
            WITH existing AS MATERIALIZED (
                SELECT {self._existing}, {self._claimable(self.unlocked)} AS claimable
                FROM {TABLE} AS k WHERE {_OF_CLIENT}
            ), claimed AS ({self._upsert(guard, call=call)})
            SELECT claimed.*, {_EXISTING_COLUMNS}, ''
            FROM (SELECT) AS one LEFT JOIN claimed ON true LEFT JOIN existing ON true
        """)

    @cached_property
    def claim_plain(self) -> str:
        """Read the key, and insert it if there is none, in one statement; the locks last until the
        transaction ends. The verdict is ``exists``, ``same`` if a run of the same request holds the
        key, ``other`` if another run holds it, or ``free``. CASE fixes the order of the locks:
        first the mark of the request, then the lock of the key."""
        insert = self._insert(finished=True, source="FROM verdict WHERE verdict.verdict = 'free'")
        return one_line(f"""
            WITH existing AS MATERIALIZED (
                SELECT {self._existing} FROM {TABLE} AS k WHERE {_OF_CLIENT}
            ), verdict AS MATERIALIZED (
                SELECT CASE
                    WHEN EXISTS (SELECT 1 FROM existing WHERE NOT existing.expired) THEN 'exists'
                    WHEN NOT pg_try_advisory_xact_lock({MARK_KEY}, {MARK_REQUEST}) THEN 'same'
                    WHEN NOT pg_try_advisory_xact_lock({KEY_LOCK}) THEN 'other'
                    ELSE 'free'
                END AS verdict
            ), claimed AS ({insert} ON CONFLICT DO NOTHING RETURNING {self._claimed()})
            SELECT claimed.*, {_EXISTING_COLUMNS}, verdict.verdict
            FROM verdict LEFT JOIN claimed ON true LEFT JOIN existing ON true
        """)

    @cached_property
    def insert_plain(self) -> str:
        """Claim for a plain run on SQLite, whose single writer needs no advisory lock."""
        return one_line(f"""
            {self._insert(finished=True, source="WHERE true")} ON CONFLICT DO NOTHING
            RETURNING {self._claimed()}, {_NO_EXISTING}, ''
        """)

    @cached_property
    def claim_by_id(self) -> str:
        """Claim for the completer, which sets the next run, or for the reaper, with a lease of at
        least ``least_lease``."""
        return one_line(f"""
            UPDATE {TABLE} AS k
            SET claim_token = %(claim_token)s, lease_seconds = {_LEASE_OF_COMPLETER},
                locked_until = {self.dialect.later_by.format(_LEASE_OF_COMPLETER, "second")},
                last_run_at = {self.now}, {_NEXT_ATTEMPT},
                completer_attempts = k.completer_attempts + 1,
                next_run_at = {self.dialect.later.format("%(delay)s")},
                {CLEAR_STUCK}, history = {self.history_of_unlocked}
            WHERE k.id = %(id)s AND k.finished_at IS NULL AND k.refused_at IS NULL
            AND {self.unlocked} AND {_NOT_GIVEN_UP} AND (
                k.claim_token = %(seen)s OR NOT %(early)s
                AND {self.abandoned} AND (k.next_run_at IS NULL OR k.next_run_at <= {self.now})
            )
            RETURNING {self._claimed(READ)}
        """)

    @cached_property
    def retire(self) -> str:
        """Rename the scope of an expired key, so that its client can use the key again."""
        expired = f"k.id = %(id)s AND k.scope = %(scope)s AND {self.expired}"
        return f"UPDATE {TABLE} AS k SET {RETIRED} WHERE {expired}"


def _columns(names: tuple[str, ...], prefix: str = "") -> str:
    return ", ".join(f"{prefix}{_COLUMNS[name]}" for name in names)
