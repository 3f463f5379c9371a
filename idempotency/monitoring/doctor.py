"""Find problems of the tables and the processes, each with its cure. Nothing is written.

Each check reads the statistics of PostgreSQL, or counts the rows of a partial index. The cost does
not depend on the number of finished keys, except those that are late to be deleted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.db import InterfaceError, OperationalError, connections, router

from idempotency import conf
from idempotency._engine import aliases, replication
from idempotency._records import HOOKS_FAILED
from idempotency._states import KeyState
from idempotency._text import Grouped, duration, first_line
from idempotency.models import IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.monitoring import findings, measures
from idempotency.monitoring.findings import Finding
from idempotency.monitoring.heartbeats import LOOPS

#: Columns that runs change. An update of an indexed column writes to each index of the table, and
#: is not HOT.
_CHANGING = [
    "recovery_point", "locked_until", "last_run_at", "next_run_at", "claim_token", "attempts",
    "begun", "call_begun_at",
]  # fmt: skip
#: By default autovacuum starts when a fifth of the rows are dead. If twice that share is dead,
#: autovacuum does not keep up.
DEAD_SHARE, FEW_DEAD = 0.4, 10_000
OLDEST_TRANSACTION_SECONDS = 600.0
#: The reaper makes a pass each minute, and may have many keys to delete.
REAPER_LATE_SECONDS = 3600


#: Values of synchronous_commit that are weaker than ``on``, and the wait of a commit with each
#: value.
_WEAK_WAITS = {
    "local": "does not wait for the standby",
    "remote_write": "waits until the standby has it in memory, not on its disk",
}


@dataclass(slots=True)
class Diagnosis:
    """The measurements, the findings, and what could not be checked."""

    database: str
    vendor: str
    measured: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    cannot_tell: list[str] = field(default_factory=list)


def diagnose(*, using: str | None = None) -> Diagnosis:
    """Return the diagnosis of the database of the keys. Raises OperationalError if the database
    cannot be reached."""
    alias = using or router.db_for_write(IdempotencyKey)
    found = Diagnosis(alias, connections[alias].vendor)
    found.findings += [*_alias(found), *_keys(found), *_jobs(found), *_processes(found)]
    if found.vendor == "postgresql":
        found.findings += [*_table(found), *_transactions(found), *_durability(found)]
    else:
        found.cannot_tell += [
            f"{found.vendor} has no statistics of updates, dead rows and open transactions. It has"
            " one writer at a time."
        ]
    return found


def _alias(found: Diagnosis) -> Iterator[Finding]:
    try:
        routed = aliases.routed_twin(found.database)
    except (OperationalError, InterfaceError) as error:
        text = "Whether the router writes to this database under another alias"
        found.cannot_tell.append(f"{text}: {first_line(error)}")
        return
    if routed is not None:
        yield Finding(
            "second_alias",
            f"The database {found.database!r} is also {routed!r}, to which the router writes. Loops"
            f" and views that use {found.database!r} are not in one transaction with the queries of"
            " the project.",
            f"Use {routed!r} for --database, using= and process_once(). Use {found.database!r} to"
            " migrate only.",
        )


def _keys(found: Diagnosis) -> Iterator[Finding]:
    keys = measures.unfinished_keys(IdempotencyKey.objects.using(found.database))
    found.measured |= {
        "keys_unfinished": keys.count,
        "keys_stuck": keys.by_state[KeyState.STUCK],
        "keys_stuck_by_code": dict(keys.stuck_by_code),
        "keys_acknowledged": keys.by_state[KeyState.ACKNOWLEDGED],
        "completer_lag_seconds": round(keys.completer_lag, 1),
    }
    yield from findings.of_keys(keys)
    to_reap = measures.keys_to_reap(found.database, REAPER_LATE_SECONDS)
    found.measured["keys_to_reap"] = to_reap
    if to_reap:
        late = duration(REAPER_LATE_SECONDS)
        yield Finding(
            "reaper_late",
            f"Keys that should have been deleted {late} ago: {Grouped(to_reap)}.",
            "Start manage.py reap_keys --loop. If it counts them as 'protected', something prevents"
            " the deletion: a row that refers to the key, for example with on_delete=PROTECT, a"
            " trigger, a signal receiver, or a missing privilege. Its log names the error.",
        )


def _jobs(found: Diagnosis) -> Iterator[Finding]:
    jobs = measures.staged_jobs(StagedJob.objects.using(found.database))
    messages = ProcessedMessage.objects.using(found.database).filter(HOOKS_FAILED)
    hooks = messages.count()
    found.measured |= {
        "due_jobs": jobs.due,
        "failed_jobs": jobs.failed_by_name.total(),
        "jobs_with_failed_hooks": hooks,
        "oldest_job_seconds": round(jobs.oldest, 1),
    }
    yield from findings.of_jobs(jobs)
    if hooks:
        yield Finding(
            "hooks_failed",
            f"Jobs that took effect, but whose on_commit hooks raised: {hooks}. The"
            " hooks are not called again.",
            "manage.py staged_jobs list shows the errors. Do by hand what the hooks should have"
            " done, then run manage.py staged_jobs purge. Replace the hook: let the job stage"
            " another job.",
        )


def _processes(found: Diagnosis) -> Iterator[Finding]:
    processes = measures.processes(found.database)
    found.measured["processes"] = [
        {"name": each.name, "process": f"{each.host}/{each.pid}", "lag_seconds": round(each.age, 1)}
        for each in processes
    ]
    found.cannot_tell += [
        f"No loop of {name} has a heartbeat. If cron does not run it, {LOOPS[name]}."
        for name in LOOPS.keys() - measures.lags(processes)
    ]
    yield from findings.of_processes(processes)
    if not processes:
        yield Finding(
            "no_process",
            f"No loop has ever written a heartbeat: {', '.join(LOOPS)}.",
            "Start manage.py idempotency_worker. If cron runs the passes, run idempotency_doctor"
            " with --cron.",
        )


def _table(found: Diagnosis) -> Iterator[Finding]:
    table = IdempotencyKey._meta.db_table
    quoted = connections[found.database].ops.quote_name(table)
    row = _fetch(
        found,
        "SELECT n_tup_upd, n_tup_hot_upd, n_live_tup, n_dead_tup, pg_total_relation_size(relid)"
        " FROM pg_stat_user_tables WHERE relid = to_regclass(%s)",
        quoted,
    )
    updates, hot, live, dead, size = row or (0, 0, 0, 0, 0)
    # Also without extra indexes it depends on the number of phases.
    ratio = hot / updates if updates else None
    found.measured |= {
        "hot_ratio": ratio and round(ratio, 3),
        "dead_rows": dead,
        "live_rows": live,
        "total_bytes": size,
    }
    (extra,) = _fetch(
        found,
        "SELECT string_agg(DISTINCT i.indexrelid::regclass::text, ', ') FROM pg_index AS i JOIN"
        " pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey) WHERE"
        " i.indrelid = to_regclass(%s) AND a.attname = ANY(%s)",
        quoted,
        _CHANGING,
    )
    if extra:
        yield Finding(
            "extra_index",
            f"Indexes of {table} on columns that runs change: {extra}. Each phase then writes to"
            " every index of the table.",
            "Drop them. The admin and the loops do not use them.",
        )
    if dead > FEW_DEAD and dead > DEAD_SHARE * live:
        yield Finding(
            "dead_rows",
            f"{dead} rows of {table} are dead, beside {live} live ones: vacuum does not keep up.",
            f"End long transactions, then VACUUM {table}; start autovacuum earlier: ALTER TABLE"
            f" {table} SET (autovacuum_vacuum_scale_factor = 0.05).",
        )


def _transactions(found: Diagnosis) -> Iterator[Finding]:
    hidden, pid, oldest = _fetch(
        found,
        "SELECT count(*) FILTER (WHERE query = '<insufficient privilege>'), "
        "(array_agg(pid ORDER BY xact_start) FILTER (WHERE xact_start IS NOT NULL))[1], "
        "COALESCE(extract(epoch FROM clock_timestamp() - min(xact_start)), 0)::double precision "
        "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND usesysid IS NOT NULL",  # An autovacuum worker has no role.
    )
    found.measured["oldest_transaction_seconds"] = round(oldest, 1)
    if hidden:
        text = f"The transactions of {hidden} sessions of other roles"
        found.cannot_tell.append(f"{text}: GRANT pg_read_all_stats to see them.")
    if oldest > OLDEST_TRANSACTION_SECONDS:
        yield Finding(
            "old_transaction",
            f"A transaction has been open for {oldest:.0f} s (process {pid} of the database)."
            " VACUUM cannot remove rows that were deleted or updated since.",
            f"See what it does in pg_stat_activity, then SELECT pg_terminate_backend({pid}). "
            "idle_in_transaction_session_timeout ends forgotten ones.",
        )


def _durability(found: Diagnosis) -> Iterator[Finding]:
    fsync, *settings = _fetch(found, f"SELECT current_setting('fsync'), {replication.SETTINGS}")
    names, synchronous_commit, _messages = settings
    found.measured |= {
        "fsync": fsync,
        "synchronous_commit": synchronous_commit,
        "synchronous_standby_names": names,
    }
    if "off" in (fsync, synchronous_commit):
        yield Finding(
            "not_durable",
            f"fsync is {fsync}, synchronous_commit {synchronous_commit}: a crash of the database"
            " loses committed transactions.",
            "Turn both on. Otherwise the request of a lost key runs again, with its downstream"
            " calls.",
        )
    if conf.get().CONFIRM_REPLICATED and (why := replication.obstacle(*settings)):
        yield Finding(
            "replays_refused",
            f"CONFIRM_REPLICATED is set, but {why}: each replay is refused with 503.",
            "Set up a synchronous standby, with synchronous_commit on. If the storage of the server"
            " is replicated, set CONFIRM_REPLICATED to 'storage'. Otherwise remove the setting.",
        )
    elif names.strip() and synchronous_commit in _WEAK_WAITS:
        yield Finding(
            "not_replicated",
            f"synchronous_commit is {synchronous_commit}: a commit"
            f" {_WEAK_WAITS[synchronous_commit]}, so a failover may lose it.",
            "Set synchronous_commit to on. Otherwise the request of a lost key runs again, with its"
            " downstream calls.",
        )


def _fetch(found: Diagnosis, text: str, *parameters: Any) -> Any:
    with connections[found.database].cursor() as cursor:
        cursor.execute(text, parameters)
        return cursor.fetchone()
