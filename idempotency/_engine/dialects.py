"""The SQL fragments that differ between PostgreSQL and SQLite. Durations are seconds; times are
those of the database.

The dialect of PostgreSQL is also that of Citus, which accepts a write only under these conditions:

- It calls no volatile function.
- It calls stable functions without columns. The coordinator evaluates them once.
- CASE, COALESCE, ON CONFLICT and RETURNING call immutable functions only.

Therefore "now" is the start of the statement. If the statement waits for a row lock, "now" is
earlier than the write. Leases and expiries are then judged by the earlier time: no lock or key
counts as expired too soon, and a lease ends too soon rather than too late.
"""

from dataclasses import dataclass

from idempotency._engine.history import HistoryEvent

#: The maximum length of a history. Without a limit, a claim took 12 ms after 4,000 retries of its
#: key.
HISTORY_LIMIT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    now: str
    later: str  # {} is a parameter, a number of seconds
    later_by: str  # {0} is a column or a parameter, a whole number; {1} is its unit
    seconds_between: str  # {0} is the earlier time, {1} the later one
    event: str
    event_of_insert: str  # the event that an INSERT could not insert, because the row exists
    append: str  # {event}
    append_after_lock: str  # as append, after "run lost" if a lock expired
    first_event: str  # {event}
    known_point: str
    ctid: str


_LOST = f"'event', '{HistoryEvent.RUN_LOST}', 'detail', 'lock expired', 'claimed_at', "


def _shortened(length: str, without_first: str, limit: int) -> str:
    return f"CASE WHEN {length}(k.history) >= {limit} THEN {without_first} ELSE k.history END"


def _iso(utc: str) -> str:
    """Return the text of a time in UTC. PostgreSQL has only stable functions for it, because
    DateStyle changes their result. Those for numbers and for the time of day are immutable."""
    day = (
        f"(extract(year FROM {utc}) * 10000 + extract(month FROM {utc}) * 100 + extract(day FROM"
        f" {utc}))::text"
    )
    return (
        rf"regexp_replace({day}, '(....)(..)(..)', '\1-\2-\3') || 'T' || ({utc})::time::text ||"
        r" '+00:00'"
    )


_POSTGRESQL_SHORTENED = _shortened("jsonb_array_length", "k.history - 0", HISTORY_LIMIT)
_POSTGRESQL_SHORTENED_BY_TWO = _shortened(
    "jsonb_array_length", "k.history - 0 - 0", HISTORY_LIMIT - 1
)
_EXPIRED_AT = _iso("timezone('UTC', k.locked_until)")
_CLAIMED_AT = _iso("timezone('UTC', k.last_run_at)")
POSTGRESQL = Dialect(
    now="statement_timestamp()",
    later="(statement_timestamp() + {}::double precision * interval '1 second')",
    # Sums of times with a time zone are stable functions.
    later_by=(
        "timezone('UTC', timezone('UTC', statement_timestamp()) + CAST({0} AS integer) * interval"
        " '1 {1}')"
    ),
    seconds_between="extract(epoch FROM {1} - {0})::double precision",
    event=(
        "jsonb_build_object('at', statement_timestamp(), 'event', %(event)s::text, 'detail',"
        " %(detail)s::text)"
    ),
    event_of_insert="(excluded.history -> 0)",
    append=f"({_POSTGRESQL_SHORTENED}) || {{event}}",
    append_after_lock=(
        f"(CASE WHEN k.locked_until IS NULL THEN {_POSTGRESQL_SHORTENED} ELSE"
        f" ({_POSTGRESQL_SHORTENED_BY_TWO}) || jsonb_object(ARRAY['at', {_EXPIRED_AT},"
        f" {_LOST}{_CLAIMED_AT}]) END) || {{event}}"
    ),
    first_event="jsonb_build_array({event})",
    known_point="k.recovery_point = ANY(%(points)s)",
    ctid="ctid",
)
_SQLITE_TIME = "strftime('%%Y-%%m-%%dT%%H:%%M:%%fZ', "
_SQLITE_SHORTENED = _shortened("json_array_length", "json_remove(k.history, '$[0]')", HISTORY_LIMIT)
_SQLITE_SHORTENED_BY_TWO = _shortened(
    "json_array_length", "json_remove(k.history, '$[0]', '$[0]')", HISTORY_LIMIT - 1
)
SQLITE = Dialect(
    now="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')",
    later="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '+' || {} || ' seconds')",
    later_by="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '+' || {0} || ' {1}s')",
    seconds_between="((julianday({1}) - julianday({0})) * 86400.0)",
    event=f"json_object('at', {_SQLITE_TIME}'now'), 'event', %(event)s, 'detail', %(detail)s)",
    event_of_insert="json_extract(excluded.history, '$[0]')",
    append=f"json_insert({_SQLITE_SHORTENED}, '$[#]', {{event}})",
    append_after_lock=(
        f"CASE WHEN k.locked_until IS NULL THEN json_insert({_SQLITE_SHORTENED}, '$[#]', {{event}})"
        f" ELSE json_insert({_SQLITE_SHORTENED_BY_TWO}, '$[#]', json_object('at',"
        f" {_SQLITE_TIME}k.locked_until), {_LOST}{_SQLITE_TIME}k.last_run_at)), '$[#]',"
        " {event}) END"
    ),
    first_event="json_array({event})",
    known_point="k.recovery_point IN (SELECT value FROM json_each(%(points)s))",
    ctid="NULL",
)
