"""The text of each statement on keys, for PostgreSQL and for SQLite; ``claims`` and ``keys`` run them.

What is formatted into a text is the name of a column or a number of seconds from the settings; what comes with a request
is always a parameter. Durations are seconds, times are the database's clock.
"""
# ruff: noqa: S608 - see above

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from idempotency import conf
from idempotency.models import FINISHED, OPEN_TO_RETRIES, STARTED, UNKNOWN_RECOVERY_POINT, IdempotencyKey

#: How many events a key remembers: without a limit 4,000 retries of one key made a 12 ms claim.
HISTORY_LIMIT = 50

TABLE = IdempotencyKey._meta.db_table
#: What is read of a key by its id, with its age and its place. The rest is large, or for people: the model loads it when it
#: is asked for.
READ = tuple(
    field.attname
    for field in IdempotencyKey._meta.concrete_fields
    if field.name not in {"request_body", "request_content_type", "request_headers", "remote_addr", "last_error", "history"}
)
#: What a claim returns of the key that it claimed, with its age and its place: all that the claim has not written itself.
CLAIMED = ("id", "user_id", "attempts", "untouched_attempts", "seed", "recovery_point")
#: What a claim returns of a key that it met, with whether it is expired and what is left of its lock.
MET = (
    *("id", "user_id", "attempts", "recovery_point", "request_fingerprint", "finished_at", "stuck_at", "stuck_code"),
    *("response_code", "response_headers", "response_body"),
)
_COLUMNS = {field.attname: field.column for field in IdempotencyKey._meta.concrete_fields}


#: Follow a fenced statement on PostgreSQL: the row is at its place (``ctid``) unless somebody moved it. Under SERIALIZABLE
#: the index would be locked by the page, which all young keys share, and runs of different keys be set against each other.
AT_PLACE = " AND k.ctid = %(place)s::tid RETURNING k.ctid"
ANYWHERE = " RETURNING k.ctid"


def parts(values: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, tuple[Any, ...], str]:
    """Return what a claim's row says: of the key it claimed, None if it claimed none; of the one it met; its verdict."""
    claimed, met, verdict = values[: len(CLAIMED) + 2], values[len(CLAIMED) + 2 : -1], values[-1]
    return (claimed if claimed[0] is not None else None), met, verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dialect:
    now: str
    ago: str  # {} is a number of seconds
    later: str  # {} is a parameter, a number of seconds
    seconds_since: str  # {} is a column
    append_event: str
    first_event: str
    known_point: str
    place: str


_POSTGRESQL = _Dialect(
    now="clock_timestamp()",
    ago="(clock_timestamp() - interval '{} seconds')",
    later="(clock_timestamp() + {}::double precision * interval '1 second')",
    seconds_since="extract(epoch FROM clock_timestamp() - {})::double precision",
    append_event=(
        f"(CASE WHEN jsonb_array_length(k.history) >= {HISTORY_LIMIT} THEN k.history - 0 ELSE k.history END) || "
        "jsonb_build_array(jsonb_build_object('at', clock_timestamp(), 'event', %(event)s::text, 'detail', %(detail)s::text))"
    ),
    first_event=(
        "jsonb_build_array(jsonb_build_object('at', clock_timestamp(), 'event', %(event)s::text, 'detail', %(detail)s::text))"
    ),
    known_point="k.recovery_point = ANY(%(points)s)",
    place="ctid",
)
_SQLITE_EVENT = "json_object('at', strftime('%%Y-%%m-%%dT%%H:%%M:%%fZ', 'now'), 'event', %(event)s, 'detail', %(detail)s)"
_SQLITE = _Dialect(
    now="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')",
    ago="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '-{} seconds')",
    later="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '+' || {} || ' seconds')",
    seconds_since="((julianday('now') - julianday({})) * 86400.0)",
    append_event=(
        f"json_insert(CASE WHEN json_array_length(k.history) >= {HISTORY_LIMIT} THEN json_remove(k.history, '$[0]') "
        f"ELSE k.history END, '$[#]', {_SQLITE_EVENT})"
    ),
    first_event=f"json_array({_SQLITE_EVENT})",
    known_point="k.recovery_point IN (SELECT value FROM json_each(%(points)s))",
    place="NULL",
)

#: For a claim of the client, and of the completer.
_OPEN_TO_RETRIES = f"(k.stuck_at IS NULL OR k.stuck_code IN {OPEN_TO_RETRIES!r})"
_NOT_STUCK = f"(k.stuck_at IS NULL OR k.stuck_code = '{UNKNOWN_RECOVERY_POINT}')"
#: One attempt more. Both counts go up, so that a key which is once touched never becomes untouched.
_NEXT_ATTEMPT = "attempts = k.attempts + 1, untouched_attempts = k.untouched_attempts + 1, refused_at = NULL"
CLEAR_STUCK = "stuck_at = NULL, stuck_code = '', stuck_reason = ''"
_OF_CLIENT = "k.scope = %(scope)s AND k.idempotency_key = %(idempotency_key)s"
#: A run that does not know that its own last COMMIT went through must not write over what it committed.
_REACHED = "k.recovery_point = %(reached)s"
_UNTOUCHED = "k.untouched_attempts = k.attempts"
_NOTHING_CLAIMED = ", ".join(["NULL"] * (len(CLAIMED) + 2))
_NOTHING_MET = ", ".join(["NULL"] * (len(MET) + 2))
_OF_MET = ", ".join(f"met.{name}" for name in [*(_COLUMNS[name] for name in MET), "expired", "lock_seconds"])
_FENCE = "k.id = %(id)s AND k.claim_token = %(token)s"
#: Advisory locks belong to the database, not to a schema. Tenants in schemas have a table of keys each, or share one: the
#: identity of the table that this session sees is part of each number, so that keys of two tables never meet.
_TABLE_ID = f"'{TABLE}'::regclass::oid"
_KEY_LOCK = f"(%(lock)s::bigint # {_TABLE_ID}::bigint)"
_MARK_KEY = f"(%(mark_key)s::int # {_TABLE_ID}::int)"


class Statements:
    """The statements for one database vendor and one pair of time limits."""

    def __init__(self, vendor: str, lock_timeout_seconds: int, retention_seconds: int) -> None:
        self.dialect = dialect = _POSTGRESQL if vendor == "postgresql" else _SQLITE
        self.lock_timeout_seconds = lock_timeout_seconds
        self.now = dialect.now
        self.unlocked = f"(k.locked_at IS NULL OR k.locked_at < {dialect.ago.format(lock_timeout_seconds)})"
        self.expired = f"COALESCE(k.finished_at < {dialect.ago.format(retention_seconds)}, false)"
        # A stuck key is claimed only when a deploy or the completer alone left it, and only by code that knows its point.
        self.claimable = (
            f"(k.finished_at IS NULL AND k.request_fingerprint = %(request_fingerprint)s AND {self.unlocked} "
            f"AND {_OPEN_TO_RETRIES} AND {dialect.known_point})"
        )

    def _columns(self, names: tuple[str, ...], prefix: str) -> str:
        return ", ".join(f"{prefix}{_COLUMNS[name]}" for name in names)

    def _read(self, prefix: str) -> str:
        age = self.dialect.seconds_since.format(f"{prefix}created_at")
        return f"{self._columns(READ, prefix)}, {age} AS age_seconds, {self.dialect.place} AS place"

    @property
    def _claimed(self) -> str:
        # SQLite knows no alias in RETURNING.
        age = self.dialect.seconds_since.format("created_at")
        return f"{self._columns(CLAIMED, '')}, {age} AS age_seconds, {self.dialect.place} AS place"

    @property
    def _met(self) -> str:
        left = f"{self.lock_timeout_seconds} - {self.dialect.seconds_since.format('k.locked_at')}"
        return f"{self._columns(MET, 'k.')}, {self.expired} AS expired, COALESCE({left}, 0) AS lock_seconds"

    @cached_property
    def read(self) -> str:
        """The key of a scope, in the shape of a claim that met it."""
        return f"SELECT {_NOTHING_CLAIMED}, {self._met}, 'exists' FROM {TABLE} AS k WHERE {_OF_CLIENT}"  # nosec B608  # see the docstring

    @cached_property
    def read_by_id(self) -> str:
        """The key with an id."""
        return f"SELECT {self._read('k.')} FROM {TABLE} AS k WHERE k.id = %(id)s"  # nosec B608  # see the docstring

    def _insert(self, *, finished: bool, source: str) -> str:
        """Insert the request that the parameters describe, for each row of ``source``."""
        values = {
            "created_at": self.now,
            "last_run_at": self.now,
            # A plain view finishes in this same transaction. Saying so now keeps its UPDATE off every index (HOT).
            "finished_at": self.now if finished else "NULL",
            "recovery_point": f"'{FINISHED if finished else STARTED}'",
            "locked_at": "NULL" if finished else self.now,
            "attempts": "1",
            "untouched_attempts": "1",
            "completer_attempts": "0",
            "stuck_code": "''",
            "stuck_reason": "''",
            "last_error": "''",
            "history": self.dialect.first_event,
        } | {name: f"%({name})s" for name in PARAMETERS}
        return f"INSERT INTO {TABLE} AS k ({', '.join(values)}) SELECT {', '.join(values.values())} {source} "

    @cached_property
    def upsert(self) -> str:
        """Claim the key of a phased view: insert it, or take it over if it is claimable. No row: somebody else has it."""
        return f"{self._upsert('WHERE true')}, {_NOTHING_MET}, 'free'"

    def _upsert(self, source: str) -> str:
        return (
            self._insert(finished=False, source=source)
            + f"ON CONFLICT (scope, idempotency_key) DO UPDATE SET claim_token = excluded.claim_token, locked_at = {self.now}, "  # nosec B608  # see the docstring
            f"last_run_at = {self.now}, {_NEXT_ATTEMPT}, {CLEAR_STUCK}, history = {self.dialect.append_event} "
            f"WHERE {self.claimable} RETURNING {self._claimed}"
        )

    @cached_property
    def claim_phased(self) -> str:
        """Read, and claim if there is something to claim, in one round trip. PostgreSQL alone has INSERT in WITH.

        The read comes first so that a replay writes nothing, takes no lock and needs no transaction id.
        """
        # A plain view's row is not visible before COMMIT, and an INSERT would wait for it: its lock tells at once.
        guard = (
            "WHERE CASE WHEN EXISTS (SELECT 1 FROM met) THEN (SELECT met.claimable FROM met) "
            f"ELSE pg_try_advisory_xact_lock({_KEY_LOCK}) END"  # nosec B608  # see the docstring
        )
        return (
            f"WITH met AS MATERIALIZED (SELECT {self._met}, {self.claimable} AS claimable FROM {TABLE} AS k "  # nosec B608  # see the docstring
            f"WHERE {_OF_CLIENT}), "
            f"claimed AS ({self._upsert(guard)}) "
            f"SELECT claimed.*, {_OF_MET}, '' FROM (SELECT) AS one LEFT JOIN claimed ON true LEFT JOIN met ON true"
        )

    @cached_property
    def claim_plain(self) -> str:
        """Read, and insert if there is nothing, in one round trip; the locks last until the transaction ends.

        ``same``: a run of the same request holds the key. ``other``: some run does. ``free``: nobody did, and now this
        transaction does. CASE fixes the order: the mark of the request is always taken before the lock of the key.
        """
        source = "FROM verdict WHERE verdict.verdict = 'free'"
        return (
            f"WITH met AS MATERIALIZED (SELECT {self._met} FROM {TABLE} AS k WHERE {_OF_CLIENT}), "  # nosec B608  # see the docstring
            "verdict AS MATERIALIZED (SELECT CASE "
            "WHEN EXISTS (SELECT 1 FROM met WHERE NOT met.expired) THEN 'exists' "
            f"WHEN NOT pg_try_advisory_xact_lock({_MARK_KEY}, %(mark_request)s::int) THEN 'same' "
            f"WHEN NOT pg_try_advisory_xact_lock({_KEY_LOCK}) THEN 'other' ELSE 'free' END AS verdict), "
            f"claimed AS ({self._insert(finished=True, source=source)} ON CONFLICT DO NOTHING RETURNING {self._claimed}) "
            f"SELECT claimed.*, {_OF_MET}, verdict.verdict FROM verdict LEFT JOIN claimed ON true LEFT JOIN met ON true"
        )

    @cached_property
    def insert_plain(self) -> str:
        """Claim for a plain view on SQLite, which has one writer at a time and needs no other lock."""
        return (
            self._insert(finished=True, source="WHERE true")
            + f"ON CONFLICT DO NOTHING RETURNING {self._claimed}, {_NOTHING_MET}, 'free'"
        )

    @cached_property
    def claim_by_id(self) -> str:
        """Claim for the completer, which sets when it will come back, or for ``on_abandon`` in the reaper."""
        return (
            f"UPDATE {TABLE} AS k SET claim_token = %(claim_token)s, locked_at = {self.now}, last_run_at = {self.now}, "  # nosec B608  # see the docstring
            f"{_NEXT_ATTEMPT}, completer_attempts = k.completer_attempts + 1, "
            f"next_run_at = {self.dialect.later.format('%(delay)s')}, {CLEAR_STUCK}, history = {self.dialect.append_event} "
            f"WHERE k.id = %(id)s AND k.finished_at IS NULL AND NOT k.refused AND {self.unlocked} AND {_NOT_STUCK} "
            f"AND (%(early)s OR k.next_run_at IS NULL OR k.next_run_at <= {self.now}) RETURNING {self._read('')}"
        )

    @cached_property
    def retire(self) -> str:
        """Move an expired key out of its client's way, under a scope that no client can have.

        The row stays: a user's model may point at it, with a unique foreign key.
        """
        return (
            f"UPDATE {TABLE} AS k SET scope = '{RETIRED_SCOPE}' || k.id "  # nosec B608  # see the docstring
            f"WHERE k.id = %(id)s AND k.scope = %(scope)s AND {self.expired}"
        )

    @cached_property
    def advance(self) -> str:
        """Set the recovery point and renew the lock."""
        return (
            f"UPDATE {TABLE} AS k SET recovery_point = %(recovery_point)s, locked_at = {self.now}, {CLEAR_STUCK}, "  # nosec B608  # see the docstring
            f"history = {self.dialect.append_event} WHERE {_FENCE} AND {_REACHED}"
        )

    @cached_property
    def renew(self) -> str:
        """Renew the lock, and note that something is begun. A run that was given up begins nothing while a person looks at
        its key."""
        return (
            f"UPDATE {TABLE} AS k SET locked_at = {self.now}, untouched_attempts = 0 "  # nosec B608  # see the docstring
            f"WHERE {_FENCE} AND {_REACHED} AND k.stuck_at IS NULL"
        )

    @cached_property
    def begin_call(self) -> str:
        """The same before a call under a derived key, which the history names; for ``on_abandon`` under its own mark."""
        return (
            f"UPDATE {TABLE} AS k SET locked_at = {self.now}, untouched_attempts = 0, call_begun_at = {self.now}, "  # nosec B608  # see the docstring
            f"history = {self.dialect.append_event} WHERE {_FENCE} AND {_REACHED} AND k.stuck_code = %(stuck_code)s"
        )

    @cached_property
    def finish(self) -> str:
        """Store the response."""
        return (
            f"UPDATE {TABLE} AS k SET recovery_point = '{FINISHED}', finished_at = COALESCE(k.finished_at, {self.now}), "  # nosec B608  # see the docstring
            f"locked_at = NULL, {CLEAR_STUCK}, response_code = %(code)s, response_headers = %(headers)s, "
            f"response_body = %(body)s, history = {self.dialect.append_event} WHERE {_FENCE} AND {_REACHED}"
        )

    @cached_property
    def finish_untouched(self) -> str:
        """Store the response of a request that has begun nothing."""
        return f"{self.finish} AND {_UNTOUCHED}"

    @cached_property
    def release(self) -> str:
        """Free the lock and say why."""
        return (
            f"UPDATE {TABLE} AS k SET locked_at = NULL, last_error = %(error)s, history = {self.dialect.append_event} "  # nosec B608  # see the docstring
            f"WHERE {_FENCE} AND k.finished_at IS NULL"
        )

    @cached_property
    def refuse(self) -> str:
        """Free the lock of a key under which nothing was begun, and leave it to its client alone."""
        return (
            f"UPDATE {TABLE} AS k SET locked_at = NULL, refused_at = {self.now}, {CLEAR_STUCK}, last_error = %(error)s, "  # nosec B608  # see the docstring
            f"history = {self.dialect.append_event} WHERE {_FENCE} AND {_REACHED} AND {_UNTOUCHED}"
        )

    def _mark_stuck(self, condition: str) -> str:
        return (
            f"UPDATE {TABLE} AS k SET locked_at = NULL, stuck_at = {self.now}, stuck_code = %(code)s, "  # nosec B608  # see the docstring
            f"completer_attempts = k.completer_attempts * %(counting)s, "
            f"stuck_reason = %(reason)s, history = {self.dialect.append_event} WHERE {condition} AND k.finished_at IS NULL"
        )

    @cached_property
    def mark_stuck(self) -> str:
        """Hand the key to a person, from the run that holds it."""
        return self._mark_stuck(_FENCE)

    @cached_property
    def give_up(self) -> str:
        """Hand the key to a person, when no run holds it and nobody has it yet."""
        return self._mark_stuck(f"k.id = %(id)s AND k.stuck_at IS NULL AND NOT k.refused AND {self.unlocked}")


#: The parameters of a claim that describe the request; each is a column.
PARAMETERS = (
    "scope",
    "idempotency_key",
    "user_id",
    "claim_token",
    "request_method",
    "request_path",
    "request_body",
    "request_content_type",
    "request_headers",
    "remote_addr",
    "request_fingerprint",
    "seed",
)
#: Scopes of retired keys begin with it; a scope callable may not return one that does.
RETIRED_SCOPE = "expired:"

#: Does another session hold the lock of a key, and does it run another request than this one?
#: pg_locks is read in one piece: a holder that is just letting go shows no mark, and is no proof of another request. Nor is
#: a mark whose fingerprint was made in another way, as its first eight bits tell: the same request may have it.
HOLDER = f"""
WITH held AS MATERIALIZED (
    SELECT pid, classid::bigint, objid::bigint, objsubid FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
), lock AS (
    SELECT pid FROM held WHERE objsubid = 1 AND (classid << 32 | objid) = {_KEY_LOCK}
), mark AS (
    SELECT pid FROM held WHERE objsubid = 2 AND classid = {_MARK_KEY}::bigint & 4294967295
    AND objid <> %(mark_request)s::bigint & 4294967295 AND objid >> 24 = (%(mark_request)s::bigint & 4294967295) >> 24
)
SELECT EXISTS (SELECT 1 FROM lock), EXISTS (SELECT 1 FROM lock JOIN mark USING (pid))
"""  # nosec B608  # see the docstring


@lru_cache(maxsize=16)
def _statements(vendor: str, lock_timeout_seconds: int, retention_seconds: int) -> Statements:
    return Statements(vendor, lock_timeout_seconds, retention_seconds)


def statements(vendor: str) -> Statements:
    """Return the statements for the database vendor under the project's settings."""
    limits = conf.get()
    return _statements(vendor, limits.LOCK_TIMEOUT_SECONDS, limits.RETENTION_HOURS * 3600)
