"""The SQL fragments that differ between PostgreSQL and SQLite. Durations are seconds; times are those of the database."""

from dataclasses import dataclass

from idempotency._store.history import HistoryEvent

#: The maximum length of a history. Without a limit, a claim took 12 ms after 4,000 retries of its key.
HISTORY_LIMIT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    now: str
    ago: str  # {} is a number of seconds
    later: str  # {} is a parameter, a number of seconds
    seconds_since: str  # {} is a column
    append_event: str
    append_after_lock: str  # as append_event, after "run lost" if a lock expired; {} is the lock timeout in seconds
    first_event: str
    known_point: str
    place: str


_LOST = f"'event', '{HistoryEvent.RUN_LOST}', 'detail', 'lock expired', 'claimed_at', "
_POSTGRESQL_EVENT = "jsonb_build_object('at', clock_timestamp(), 'event', %(event)s::text, 'detail', %(detail)s::text)"
_POSTGRESQL_APPEND = (
    f"(CASE WHEN jsonb_array_length(k.history) >= {HISTORY_LIMIT} THEN k.history - 0 ELSE k.history END) || "
    f"jsonb_build_array({_POSTGRESQL_EVENT})"
)
POSTGRESQL = Dialect(
    now="clock_timestamp()",
    ago="(clock_timestamp() - interval '{} seconds')",
    later="(clock_timestamp() + {}::double precision * interval '1 second')",
    seconds_since="extract(epoch FROM clock_timestamp() - {})::double precision",
    append_event=_POSTGRESQL_APPEND,
    append_after_lock=(
        f"CASE WHEN k.locked_at IS NULL THEN {_POSTGRESQL_APPEND} ELSE "
        f"(CASE WHEN jsonb_array_length(k.history) >= {HISTORY_LIMIT - 1} THEN k.history - 0 - 0 ELSE k.history END) || "
        f"jsonb_build_array(jsonb_build_object('at', k.locked_at + interval '{{}} seconds', {_LOST} k.last_run_at), "
        f"{_POSTGRESQL_EVENT}) END"
    ),
    first_event=f"jsonb_build_array({_POSTGRESQL_EVENT})",
    known_point="k.recovery_point = ANY(%(points)s)",
    place="ctid",
)
_SQLITE_TIME = "strftime('%%Y-%%m-%%dT%%H:%%M:%%fZ', "
_SQLITE_EVENT = f"json_object('at', {_SQLITE_TIME}'now'), 'event', %(event)s, 'detail', %(detail)s)"
_SQLITE_APPEND = (
    f"json_insert(CASE WHEN json_array_length(k.history) >= {HISTORY_LIMIT} THEN json_remove(k.history, '$[0]') "
    f"ELSE k.history END, '$[#]', {_SQLITE_EVENT})"
)
SQLITE = Dialect(
    now="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')",
    ago="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '-{} seconds')",
    later="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '+' || {} || ' seconds')",
    seconds_since="((julianday('now') - julianday({})) * 86400.0)",
    append_event=_SQLITE_APPEND,
    append_after_lock=(
        f"CASE WHEN k.locked_at IS NULL THEN {_SQLITE_APPEND} ELSE json_insert("
        f"CASE WHEN json_array_length(k.history) >= {HISTORY_LIMIT - 1} THEN json_remove(k.history, '$[0]', '$[0]') "
        f"ELSE k.history END, '$[#]', json_object('at', {_SQLITE_TIME}k.locked_at, '+{{}} seconds'), "
        f"{_LOST} {_SQLITE_TIME}k.last_run_at)), '$[#]', {_SQLITE_EVENT}) END"
    ),
    first_event=f"json_array({_SQLITE_EVENT})",
    known_point="k.recovery_point IN (SELECT value FROM json_each(%(points)s))",
    place="NULL",
)
