"""What ails the tables and the processes, each finding with its cure. Nothing is written.

Each question about keys is answered from the statistics of PostgreSQL or through a partial index, and counts stop at
COUNT_LIMIT: a look costs the same however large the table of keys is. Staged jobs are counted in full: they are what waits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db import connections, router
from django.db.models import F, Max, QuerySet
from django.db.models.functions import Coalesce, Greatest, Now

from idempotency import conf
from idempotency.enqueuer import backlog
from idempotency.heartbeats import SILENT_SECONDS
from idempotency.models import REFUSED_WHEN_REBUILT, IdempotencyKey, ProcessHeartbeat

#: Counts stop here: that there are more does not change what is to be done.
COUNT_LIMIT = 10_000
#: The share of updates that touch no index is told only after so many of them.
ENOUGH_UPDATES = 1_000
LOWEST_HOT_RATIO = 0.9
#: Autovacuum comes at a fifth of the table by default; at twice that it does not keep up.
DEAD_SHARE, FEW_DEAD = 0.4, 10_000
OLDEST_TRANSACTION_SECONDS = 600.0
#: A pass of the enqueuer comes every second, of the completer every 5: what waits for so long waits for nobody.
LATE_SECONDS = 120.0
#: ... and of the reaper every minute, which may have much to delete.
REAPER_LATE_SECONDS = 3600.0
LOOPS = {"enqueue_jobs": "staged jobs wait", "complete_keys": "abandoned requests wait", "reap_keys": "old keys stay"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to be mended: a short stable code, what was seen, and what to do."""

    code: str
    seen: str
    cure: str


@dataclass(slots=True)
class Diagnosis:
    """What was measured, what is wrong, and what cannot be told here."""

    database: str
    vendor: str
    measured: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    cannot_tell: list[str] = field(default_factory=list)


def diagnose(*, using: str | None = None) -> Diagnosis:
    """Look at the database of the keys. Raises OperationalError when it cannot be reached."""
    alias = using or router.db_for_write(IdempotencyKey)
    found = Diagnosis(alias, connections[alias].vendor)
    found.findings += [*_keys(found), *_jobs(found), *_processes(found)]
    if found.vendor == "postgresql":
        found.findings += [*_table(found), *_transactions(found), *_durability(found)]
    else:
        found.cannot_tell += [
            f"{found.vendor} has no statistics of updates and dead rows, none of open transactions, and one writer at a time."
        ]
    return found


def _keys(found: Diagnosis) -> Iterator[Finding]:
    keys = IdempotencyKey.objects.using(found.database)
    limits = conf.get()
    found.measured["keys_unfinished"] = _count(keys.unfinished())
    found.measured["keys_stuck"] = _count(keys.stuck())
    stuck = _count(keys.stuck().exclude(stuck_code=REFUSED_WHEN_REBUILT))  # Those wait for their clients.
    found.measured["keys_acknowledged"] = _count(keys.acknowledged())
    if stuck:
        yield Finding(
            "stuck_keys",
            f"{_at_most(stuck)} wait for a person.",
            "Open the admin's list of keys with the filter 'stuck': each says why, and offers what can be done.",
        )
    due = Greatest(
        Coalesce("next_run_at", "created_at"),
        F("created_at") + timedelta(seconds=limits.COMPLETER_MIN_AGE_SECONDS),
        F("last_run_at") + timedelta(seconds=limits.COMPLETER_IDLE_SECONDS),
    )
    abandoned = keys.abandoned().order_by("created_at").annotate(waiting=Now() - due)[:COUNT_LIMIT]
    found.measured["completer_lag_seconds"] = lag = _seconds(abandoned.aggregate(oldest=Max("waiting"))["oldest"])
    if lag > LATE_SECONDS:
        yield Finding(
            "completer_late",
            f"An abandoned request has waited {lag:.0f} s for the completer.",
            "Start manage.py complete_keys --loop; if it runs, give it --concurrency, and look for errors in its log.",
        )
    late = timedelta(hours=limits.RETENTION_HOURS, seconds=REAPER_LATE_SECONDS)
    found.measured["keys_to_reap"] = to_reap = _count(keys.expired(late))
    if to_reap:
        yield Finding(
            "reaper_late",
            f"{_at_most(to_reap)} should have been deleted more than {REAPER_LATE_SECONDS:.0f} s ago.",
            "Start manage.py reap_keys --loop. If it counts them as 'protected', rows of yours hold them: on_delete=PROTECT.",
        )


def _jobs(found: Diagnosis) -> Iterator[Finding]:
    jobs = backlog(using=found.database)
    found.measured |= {"jobs_due": jobs.depth, "jobs_failed": jobs.failed, "oldest_job_seconds": round(jobs.oldest_seconds, 1)}
    if jobs.oldest_seconds > LATE_SECONDS:
        yield Finding(
            "jobs_late",
            f"{jobs.depth} staged jobs are due, the oldest for {jobs.oldest_seconds:.0f} s.",
            "Start manage.py enqueue_jobs --loop; if it runs, its log says which broker it cannot reach.",
        )
    if jobs.failed:
        yield Finding(
            "jobs_failed",
            f"{jobs.failed} staged jobs were given up on.",
            "manage.py staged_jobs list --failed says why. Mend the cause, then staged_jobs retry, or purge.",
        )


def _processes(found: Diagnosis) -> Iterator[Finding]:
    rows = ProcessHeartbeat.objects.using(found.database).annotate(age=Now() - F("beat_at"))[:COUNT_LIMIT]
    beats = [(row.name, f"{row.host}/{row.pid}", _seconds(row.age)) for row in rows]
    found.measured["processes"] = [{"name": n, "process": p, "lag_seconds": seconds} for n, p, seconds in beats]
    for name, otherwise in LOOPS.items():
        youngest = min((seconds for of, _, seconds in beats if of == name), default=None)
        if youngest is None:
            found.cannot_tell.append(f"No loop of {name} gives signs of life: right if cron runs it, else {otherwise}.")
        elif youngest > SILENT_SECONDS:
            yield Finding(
                "process_silent",
                f"No loop of {name} has given a sign of life for {youngest:.0f} s: {otherwise}.",
                "Start it again; see docs/how-to/run-the-processes.md. If it runs, its log says what it fails at.",
            )


def _table(found: Diagnosis) -> Iterator[Finding]:
    table = IdempotencyKey._meta.db_table
    row = _fetch(
        found,
        "SELECT n_tup_upd, n_tup_hot_upd, n_live_tup, n_dead_tup, pg_total_relation_size(relid) FROM pg_stat_user_tables "
        "WHERE relid = to_regclass(%s)",
        [connections[found.database].ops.quote_name(table)],
    )
    updates, hot, live, dead, size = row or (0, 0, 0, 0, 0)
    ratio = hot / updates if updates else None
    found.measured |= {"hot_ratio": ratio and round(ratio, 3), "dead_rows": dead, "live_rows": live, "total_bytes": size}
    if ratio is None or updates < ENOUGH_UPDATES:
        found.cannot_tell.append(f"The share of HOT updates: there were {updates}, too few to say.")
    elif ratio < LOWEST_HOT_RATIO:
        yield Finding(
            "hot_ratio",
            f"{ratio:.0%} of the updates of {table} touched no index; it should be {LOWEST_HOT_RATIO:.0%} or more.",
            "Drop indexes of your own on columns that change (recovery_point, locked_at, last_run_at); if there are none, end "
            "long transactions, or lower the table's fillfactor.",
        )
    if dead > FEW_DEAD and dead > DEAD_SHARE * live:
        yield Finding(
            "dead_rows",
            f"{dead} rows of {table} are dead, beside {live} live ones: vacuum does not keep up.",
            f"End long transactions, then VACUUM {table}; let autovacuum come earlier: ALTER TABLE {table} SET "
            "(autovacuum_vacuum_scale_factor = 0.05).",
        )


def _transactions(found: Diagnosis) -> Iterator[Finding]:
    hidden, pid, oldest = _fetch(
        found,
        "SELECT count(*) FILTER (WHERE query = '<insufficient privilege>'), "
        "(array_agg(pid ORDER BY xact_start) FILTER (WHERE xact_start IS NOT NULL))[1], "
        "COALESCE(extract(epoch FROM clock_timestamp() - min(xact_start)), 0)::double precision "
        "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    found.measured["oldest_transaction_seconds"] = round(oldest, 1)
    if hidden:
        found.cannot_tell.append(f"The transactions of {hidden} sessions of other roles: GRANT pg_read_all_stats to see them.")
    if oldest > OLDEST_TRANSACTION_SECONDS:
        yield Finding(
            "old_transaction",
            f"A transaction has been open for {oldest:.0f} s (process {pid} of the database): nothing dead since is vacuumed.",
            f"See what it does in pg_stat_activity, then SELECT pg_terminate_backend({pid}). "
            "idle_in_transaction_session_timeout ends forgotten ones.",
        )


def _durability(found: Diagnosis) -> Iterator[Finding]:
    fsync, synchronous_commit = _fetch(found, "SELECT current_setting('fsync'), current_setting('synchronous_commit')")
    found.measured |= {"fsync": fsync, "synchronous_commit": synchronous_commit}
    if "off" in (fsync, synchronous_commit):
        yield Finding(
            "not_durable",
            f"fsync is {fsync}, synchronous_commit {synchronous_commit}: a crash of the database forgets what was committed.",
            "Turn both on: a key that is forgotten runs again, with its foreign calls.",
        )


def _count(keys: "QuerySet[IdempotencyKey]") -> int:
    return keys.order_by("created_at")[: COUNT_LIMIT + 1].count()


def _at_most(count: int) -> str:
    return f"More than {COUNT_LIMIT} keys" if count > COUNT_LIMIT else f"{count} keys"


def _seconds(age: timedelta | None) -> float:
    return max(0.0, round(age.total_seconds(), 1)) if age is not None else 0.0


def _fetch(found: Diagnosis, text: str, parameters: list[Any] | None = None) -> Any:
    with connections[found.database].cursor() as cursor:
        cursor.execute(text, parameters or [])
        return cursor.fetchone()
