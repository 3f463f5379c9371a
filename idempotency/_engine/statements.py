"""The SQL statements on keys, for PostgreSQL and for SQLite. Durations are seconds; times are those
of the database.

Two columns decide about times, and no setting does: a lock holds until ``locked_until``, and a key
is expired after ``expires_at``, which is NULL until the key is finished or refused. Only names of
columns and constants are formatted into a text; values of a request are parameters.
"""

# ruff: noqa: S608 - see above

from functools import cached_property
from typing import Any

from idempotency._engine.advisory_locks import KEY_LOCK, MARK_KEY, MARK_REQUEST
from idempotency._engine.dialects import POSTGRESQL, SQLITE
from idempotency._states import ABANDONED_AFTER_LEASES
from idempotency.exceptions import OPEN_TO_RETRIES, StuckCode
from idempotency.models import FINISHED, RETIRED_SCOPE, STARTED, IdempotencyKey

TABLE = IdempotencyKey._meta.db_table
#: The columns that are read by id, with age and place. The others are large or for display, and
#: deferred.
READ = tuple(
    field.attname
    for field in IdempotencyKey._meta.concrete_fields
    if field.name
    not in {
        "request_body",
        "request_content_type",
        "request_headers",
        "remote_addr",
        "last_error",
        "history",
    }
)
#: The columns that a claim returns, with age and place: those that it does not write itself.
CLAIMED = ("id", "user_id", "attempts", "begun", "seed", "recovery_point")
#: The columns of an existing key that a claim returns, with ``expired`` and the remaining seconds
#: of its lock.
MET = (
    *("id", "user_id", "attempts", "begun", "recovery_point", "request_fingerprint"),
    *(
        "finished_at",
        "stuck_at",
        "stuck_code",
        "response_code",
        "response_headers",
        "response_body",
    ),
)
_COLUMNS = {field.attname: field.column for field in IdempotencyKey._meta.concrete_fields}

#: The end of a fenced statement on PostgreSQL: it finds the row by its place (``ctid``) first.
#: Under SERIALIZABLE an index scan locks a page that all young keys share, so runs of different
#: keys would conflict.
AT_PLACE = " AND k.ctid = %(place)s::tid RETURNING k.ctid"
ANYWHERE = " RETURNING k.ctid"


def parts(values: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, tuple[Any, ...], str]:
    """Split the row of a claim: the claimed columns or None, the columns of the existing key, and
    the verdict of ``claim_plain``, else empty."""
    claimed, met, verdict = values[: len(CLAIMED) + 2], values[len(CLAIMED) + 2 : -1], values[-1]
    return (claimed if claimed[0] is not None else None), met, verdict


#: The first is for claims of clients, the second for the completer.
_OPEN_TO_RETRIES = f"(k.stuck_at IS NULL OR k.stuck_code IN {tuple(map(str, OPEN_TO_RETRIES))!r})"
_NOT_GIVEN_UP = f"(k.stuck_at IS NULL OR k.stuck_code = '{StuckCode.UNKNOWN_RECOVERY_POINT}')"
_NOT_REFUSED = "refused_at = NULL, expires_at = NULL"
_NEXT_ATTEMPT = f"attempts = k.attempts + 1, {_NOT_REFUSED}"
#: A refusal ends too: an asyncio task of the view may begin a phase or call after the view was
#: refused.
_BEGUN = f"begun = true, {_NOT_REFUSED}"
CLEAR_STUCK = "stuck_at = NULL, stuck_code = '', stuck_reason = ''"
_OF_CLIENT = "k.scope = %(scope)s AND k.idempotency_key = %(idempotency_key)s"
#: A run may not know that its last COMMIT succeeded. Its next statement must not overwrite that
#: commit.
_REACHED = "k.recovery_point = %(reached)s"
_UNTOUCHED = "NOT k.begun"
#: While nothing is begun, each request of the client replaces these parts of the stored one: the
#: completer runs the last one.
_REPLACED = (
    *(
        "user_id",
        "request_path",
        "request_body",
        "request_content_type",
        "request_headers",
        "remote_addr",
    ),
    "retention_hours",
)
#: The columns of a request: fields of ``ClaimedRequest``, and parameters of a claim.
REQUEST = (
    "scope",
    "idempotency_key",
    "request_method",
    "request_fingerprint",
    "lease_seconds",
    *_REPLACED,
)
_LAST_REQUEST = ", ".join(
    f"{name} = CASE WHEN {_UNTOUCHED} THEN excluded.{name} ELSE k.{name} END" for name in _REPLACED
)
_NOTHING_CLAIMED = ", ".join(["NULL"] * (len(CLAIMED) + 2))
_NOTHING_MET = ", ".join(["NULL"] * (len(MET) + 2))
_OF_MET = ", ".join(
    f"met.{name}" for name in [*(_COLUMNS[name] for name in MET), "expired", "lock_seconds"]
)
_FENCE = "k.id = %(id)s AND k.claim_token = %(token)s"


class Statements:
    """The statements for one database vendor."""

    def __init__(self, vendor: str) -> None:
        self.dialect = dialect = POSTGRESQL if vendor == "postgresql" else SQLITE
        self.now = dialect.now
        self.unlocked = f"(k.locked_until IS NULL OR k.locked_until <= {self.now})"
        silent = dialect.seconds_between.format("k.locked_until", self.now)
        self.abandoned = (
            f"(k.locked_until IS NULL OR {silent} > {ABANDONED_AFTER_LEASES - 1} * k.lease_seconds)"
        )
        #: The end of a lock that is taken or renewed now.
        self.lease_end = dialect.later_by.format("k.lease_seconds", "second")
        self.history = dialect.append.format(event=dialect.event)
        #: The new history of an unlocked key. An expired lock is that of a lost run, as each end of
        #: a run clears it.
        self.history_of_unlocked = dialect.append_after_lock.format(event=dialect.event)
        self.expired = f"k.expires_at < {self.now}"
        self.expiry = dialect.later_by.format("k.retention_hours", "hour")

    def _claimable(self, unlocked: str) -> str:
        # A retry may claim a stuck key only with a code of OPEN_TO_RETRIES, and if the code
        # declares its recovery point.
        return (
            "(k.finished_at IS NULL AND k.request_fingerprint = %(request_fingerprint)s AND"
            f" {unlocked} AND {_OPEN_TO_RETRIES} AND {self.dialect.known_point})"
        )

    def _columns(self, names: tuple[str, ...], prefix: str) -> str:
        return ", ".join(f"{prefix}{_COLUMNS[name]}" for name in names)

    def _claimed(self, names: tuple[str, ...] = CLAIMED) -> str:
        # SQLite does not support an alias in RETURNING. Each claim sets last_run_at to the time of
        # its statement.
        age = self.dialect.seconds_between.format("created_at", "last_run_at")
        return f"{self._columns(names, '')}, {age} AS age_seconds, {self.dialect.place} AS place"

    @property
    def _met(self) -> str:
        left = self.dialect.seconds_between.format(self.now, "k.locked_until")
        return (
            f"{self._columns(MET, 'k.')}, COALESCE({self.expired}, false) AS expired,"
            f" COALESCE({left}, 0) AS lock_seconds"
        )

    @cached_property
    def read(self) -> str:
        return (  # nosec B608  # see the docstring
            f"SELECT {_NOTHING_CLAIMED}, {self._met}, '' FROM {TABLE} AS k WHERE {_OF_CLIENT}"
        )

    @cached_property
    def read_by_id(self) -> str:
        age = self.dialect.seconds_between.format("k.created_at", self.now)
        return (
            f"SELECT {self._columns(READ, 'k.')}, {age} AS age_seconds, {self.dialect.place} AS"
            " place "  # nosec B608  # see the docstring
            f"FROM {TABLE} AS k WHERE k.id = %(id)s"
        )

    def _insert(self, *, finished: bool, source: str) -> str:
        values = {
            "created_at": self.now,
            "last_run_at": self.now,
            # A plain view finishes in this transaction. Setting it now lets its UPDATE be heap-only
            # (HOT).
            "finished_at": self.now if finished else "NULL",
            "expires_at": (
                self.dialect.later_by.format("%(retention_hours)s", "hour") if finished else "NULL"
            ),
            "recovery_point": f"'{FINISHED if finished else STARTED}'",
            "locked_until": (
                "NULL" if finished else self.dialect.later_by.format("%(lease_seconds)s", "second")
            ),
            "attempts": "1",
            "begun": "false",
            "completer_attempts": "0",
            "stuck_code": "''",
            "stuck_reason": "''",
            "last_error": "''",
            "history": self.dialect.first_event.format(event=self.dialect.event),
        } | {name: f"%({name})s" for name in ("claim_token", "seed", *REQUEST)}
        # A parameter of two expressions must have one type in both.
        values |= {
            name: f"CAST(%({name})s AS integer)" for name in ("lease_seconds", "retention_hours")
        }
        return (
            f"INSERT INTO {TABLE} AS k ({', '.join(values)}) SELECT {', '.join(values.values())}"
            f" {source} "
        )

    @cached_property
    def upsert(self) -> str:
        """Claim the key of a phased view: insert it, or take it over if it is claimable. No row
        means neither."""
        return f"{self._upsert('WHERE true')}, {_NOTHING_MET}, ''"

    def _upsert(self, source: str) -> str:
        claimable = self._claimable(
            "(k.locked_until IS NULL OR k.locked_until <= excluded.created_at)"
        )
        history = self.dialect.append_after_lock.format(event=self.dialect.event_of_insert)
        return (
            self._insert(finished=False, source=source)
            + "ON CONFLICT (scope, idempotency_key) DO UPDATE SET claim_token ="
            " excluded.claim_token, "  # nosec B608  # see the docstring
            "locked_until = excluded.locked_until, lease_seconds = excluded.lease_seconds, "
            f"last_run_at = excluded.last_run_at, {_NEXT_ATTEMPT}, {CLEAR_STUCK}, {_LAST_REQUEST},"
            f" history = {history} "
            f"WHERE {claimable} RETURNING {self._claimed()}"
        )

    @cached_property
    def claim_phased(self) -> str:
        """Read the key, and claim it if it is claimable, in one statement. A replay only reads: it
        takes no lock and no transaction id. Only PostgreSQL supports INSERT in WITH."""
        # An INSERT would wait for the uncommitted row of a plain view; the advisory lock does not.
        guard = (
            "WHERE CASE WHEN EXISTS (SELECT 1 FROM met) THEN (SELECT met.claimable AND NOT"
            " met.expired FROM met) "
            f"ELSE pg_try_advisory_xact_lock({KEY_LOCK}) END"  # nosec B608  # see the docstring
        )
        return (
            f"WITH met AS MATERIALIZED (SELECT {self._met}, {self._claimable(self.unlocked)} AS"
            f" claimable FROM {TABLE} AS k "  # nosec B608  # see the docstring
            f"WHERE {_OF_CLIENT}), "
            f"claimed AS ({self._upsert(guard)}) "
            f"SELECT claimed.*, {_OF_MET}, '' FROM (SELECT) AS one LEFT JOIN claimed ON true LEFT"
            " JOIN met ON true"
        )

    @cached_property
    def claim_plain(self) -> str:
        """Read the key, and insert it if there is none, in one statement; the locks last until the
        transaction ends. The verdict is ``exists``, ``same`` if a run of the same request holds the
        key, ``other`` if another run holds it, or ``free``. CASE fixes the order of the locks:
        first the mark of the request, then the lock of the key."""
        source = "FROM verdict WHERE verdict.verdict = 'free'"
        return (
            f"WITH met AS MATERIALIZED (SELECT {self._met} FROM {TABLE} AS k WHERE {_OF_CLIENT}), "  # nosec B608  # see the docstring
            "verdict AS MATERIALIZED (SELECT CASE "
            "WHEN EXISTS (SELECT 1 FROM met WHERE NOT met.expired) THEN 'exists' "
            f"WHEN NOT pg_try_advisory_xact_lock({MARK_KEY}, {MARK_REQUEST}) THEN 'same' "
            f"WHEN NOT pg_try_advisory_xact_lock({KEY_LOCK}) THEN 'other' ELSE 'free' END AS"
            " verdict), "
            f"claimed AS ({self._insert(finished=True, source=source)} ON CONFLICT DO NOTHING"
            f" RETURNING {self._claimed()}) "
            f"SELECT claimed.*, {_OF_MET}, verdict.verdict FROM verdict LEFT JOIN claimed ON true"
            " LEFT JOIN met ON true"
        )

    @cached_property
    def insert_plain(self) -> str:
        """Claim for a plain view on SQLite, whose single writer needs no advisory lock."""
        insert = self._insert(finished=True, source="WHERE true")
        return f"{insert}ON CONFLICT DO NOTHING RETURNING {self._claimed()}, {_NOTHING_MET}, ''"

    @cached_property
    def claim_by_id(self) -> str:
        """Claim for the completer, which sets the next run, or for the reaper, with a lease of at
        least ``least_lease``."""
        lease = (
            "CASE WHEN k.lease_seconds < %(least_lease)s THEN %(least_lease)s ELSE"
            " k.lease_seconds END"
        )
        return (
            f"UPDATE {TABLE} AS k SET claim_token = %(claim_token)s, lease_seconds = {lease}, "  # nosec B608  # see the docstring
            f"locked_until = {self.dialect.later_by.format(lease, 'second')}, "
            f"last_run_at = {self.now}, {_NEXT_ATTEMPT}, completer_attempts = k.completer_attempts"
            " + 1, "
            f"next_run_at = {self.dialect.later.format('%(delay)s')}, {CLEAR_STUCK}, history ="
            f" {self.history_of_unlocked} "
            "WHERE k.id = %(id)s AND k.finished_at IS NULL AND k.refused_at IS NULL AND"
            f" {self.unlocked} AND {_NOT_GIVEN_UP} "
            f"AND (%(early)s OR {self.abandoned} AND (k.next_run_at IS NULL OR k.next_run_at <="
            f" {self.now})) "
            f"RETURNING {self._claimed(READ)}"
        )

    @cached_property
    def retire(self) -> str:
        """Rename the scope of an expired key, so that its client can use the key again. Rows may
        refer to this one."""
        return (
            f"UPDATE {TABLE} AS k SET scope = '{RETIRED_SCOPE}' || CAST(k.id AS text) "  # nosec B608  # see the docstring
            f"WHERE k.id = %(id)s AND k.scope = %(scope)s AND {self.expired}"
        )

    @cached_property
    def set_free(self) -> str:
        """Rename the scope of a claimed key whose response is not stored although its writes are.
        The row stays, because these writes may refer to it."""
        return (
            f"UPDATE {TABLE} AS k SET scope = '{RETIRED_SCOPE}' || CAST(k.id AS text),"
            " response_code = %(code)s, "  # nosec B608  # see the docstring
            f"history = {self.history} WHERE {_FENCE} AND {_REACHED}"
        )

    @cached_property
    def advance(self) -> str:
        return (
            f"UPDATE {TABLE} AS k SET recovery_point = %(recovery_point)s, locked_until ="
            f" {self.lease_end}, "  # nosec B608  # see the docstring
            f"{_BEGUN}, {CLEAR_STUCK}, history = {self.history} WHERE {_FENCE} AND {_REACHED}"
        )

    @cached_property
    def renew(self) -> str:
        """Renew the lock, and mark that something is begun. A late run must begin nothing once its
        key is stuck."""
        return (
            f"UPDATE {TABLE} AS k SET locked_until = {self.lease_end}, {_BEGUN} "  # nosec B608  # see the docstring
            f"WHERE {_FENCE} AND {_REACHED} AND k.stuck_at IS NULL"
        )

    @cached_property
    def begin_call(self) -> str:
        """Renew the lock before a call to a downstream service. The key of ``on_abandon`` is stuck
        with its own code."""
        return (
            f"UPDATE {TABLE} AS k SET locked_until = {self.lease_end}, {_BEGUN}, call_begun_at ="
            f" {self.now}, "  # nosec B608  # see the docstring
            f"history = {self.history} WHERE {_FENCE} AND {_REACHED} AND k.stuck_code ="
            " %(stuck_code)s"
        )

    @cached_property
    def finish(self) -> str:
        return self._finish(f"finished_at = {self.now}, expires_at = {self.expiry}, ")

    @cached_property
    def finish_plain(self) -> str:
        """Finish the key of a plain view, which its claim inserted with ``finished_at`` and
        ``expires_at``."""
        return self._finish("")

    def _finish(self, times: str) -> str:
        return (
            f"UPDATE {TABLE} AS k SET recovery_point = '{FINISHED}', {times}"  # nosec B608  # see the docstring
            f"locked_until = NULL, {CLEAR_STUCK}, response_code = %(code)s, response_headers ="
            " %(headers)s, "
            f"response_body = %(body)s, history = {self.history} WHERE {_FENCE} AND {_REACHED}"
        )

    @cached_property
    def finish_untouched(self) -> str:
        return f"{self.finish} AND {_UNTOUCHED}"

    @cached_property
    def release(self) -> str:
        return (
            f"UPDATE {TABLE} AS k SET locked_until = NULL, last_error = %(error)s, history ="
            f" {self.history} "  # nosec B608  # see the docstring
            f"WHERE {_FENCE} AND k.finished_at IS NULL"
        )

    @cached_property
    def refuse(self) -> str:
        """Unlock a key if nothing was begun. From now on only a retry of its client runs it."""
        return (
            f"UPDATE {TABLE} AS k SET locked_until = NULL, refused_at = {self.now}, expires_at ="
            f" {self.expiry}, "  # nosec B608  # see the docstring
            f"{CLEAR_STUCK}, last_error = %(error)s, history = {self.history} WHERE {_FENCE} AND"
            f" {_REACHED} AND {_UNTOUCHED}"
        )

    def _mark_stuck(self, condition: str, history: str) -> str:
        return (
            f"UPDATE {TABLE} AS k SET locked_until = NULL, stuck_at = {self.now}, stuck_code ="
            " %(code)s, "  # nosec B608  # see the docstring
            f"completer_attempts = k.completer_attempts * %(counting)s, "
            f"stuck_reason = %(reason)s, history = {history} WHERE {condition} AND k.finished_at IS"
            " NULL"
        )

    @cached_property
    def mark_stuck(self) -> str:
        return self._mark_stuck(_FENCE, self.history)

    @cached_property
    def give_up(self) -> str:
        condition = (
            f"k.id = %(id)s AND k.stuck_at IS NULL AND k.refused_at IS NULL AND {self.unlocked}"
        )
        return self._mark_stuck(condition, self.history_of_unlocked)
