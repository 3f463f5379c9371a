"""The engine behind a connection: PostgreSQL, Citus, or another one that speaks PostgreSQL's
protocol.

Several engines call themselves PostgreSQL and accept the statements of this app, but lack what they
rely on. Without this module the first sign would be a request that ran twice.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import TransactionStatus

#: The system check that reports the same. A project that silences it also switches off the refusal
#: of requests.
CHECK_ID = "idempotency.E013"

#: The text of PostgreSQL, and of the services that run it.
_POSTGRESQL = re.compile(r"PostgreSQL \d[\w.]*( \([^)]*\))?( on [^,]+)?, compiled by ")
#: Engines whose ``version()`` begins like that of PostgreSQL.
_DISGUISED = ("Redshift", "Greenplum", "QuestDB")
_CONSEQUENCE = (
    "its advisory locks, row locks and constraints may not be those of PostgreSQL, so two requests"
    " with one key could both run"
)

#: Errors of the coordinator of Citus that do not say what failed on a worker: an internal error,
#: and a COPY that failed.
_INTERNAL_ERROR, _IO_ERROR = "XX000", "58030"

#: By alias: whether a supported engine is Citus. Each process asks a database once.
_is_citus: dict[str, bool] = {}


def is_citus(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the engine is Citus; False for an engine that was not examined yet."""
    return connection.alias in _is_citus and _is_citus[connection.alias]


def require_postgresql(connection: BaseDatabaseWrapper) -> None:
    """Examine the engine of an open connection to PostgreSQL, once in a process.

    Raises ImproperlyConfigured for an engine on which this app would break its promises.
    """
    if connection.alias in _is_citus:
        return
    own: psycopg.Connection[Any] = connection.connection
    if own.info.transaction_status == TransactionStatus.INERROR:
        return  # The statement to come fails. A later one examines the engine.
    problem, citus = examine(connection)
    if problem and CHECK_ID not in settings.SILENCED_SYSTEM_CHECKS:
        raise ImproperlyConfigured(f"{problem} ({CHECK_ID})")
    _is_citus[connection.alias] = citus


def examine(connection: BaseDatabaseWrapper) -> tuple[str, bool]:
    """Return why the engine of an open connection is not supported, empty if it is; and whether it
    is Citus."""
    own: psycopg.Connection[Any] = connection.connection
    citus = False
    with connection.wrap_database_errors:
        (version,) = own.execute("SELECT version()").fetchone() or ("",)
        if not (problem := problem_of_version(version)):
            try:
                citus = (
                    own.execute("SELECT 1 FROM pg_extension WHERE extname = 'citus'").fetchone()
                    is not None
                )
            except (psycopg.ProgrammingError, psycopg.NotSupportedError):
                problem = (
                    "is not PostgreSQL, because it has no table of extensions (Aurora DSQL has"
                    f" none): {_CONSEQUENCE}"
                )
        if citus:
            problem = _problem_of_citus(own)
    return (
        problem
        and f"The database {connection.alias!r}, which stores the idempotency keys, {problem}.",
        citus,
    )


def psycopg_connection(connection: BaseDatabaseWrapper) -> "psycopg.Connection[Any]":
    """Open a connection to PostgreSQL, or check that it is usable, as Django does before a cursor.
    Return the connection of psycopg that the next statement will use."""
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    require_postgresql(connection)
    own: psycopg.Connection[Any] = connection.connection
    return own


def lock_timeout(connection: BaseDatabaseWrapper, limit: str) -> list[str]:
    """Return the statements that limit each wait for a lock in the open transaction, in the order
    of their messages. A worker of Citus gets the whole text of the message with the last one, so
    that must be a message of its own."""
    statement = f"SET LOCAL lock_timeout = '{limit}'"
    return (
        ["SET LOCAL citus.propagate_set_commands = 'local'", statement]
        if is_citus(connection)
        else [statement]
    )


@contextmanager
def worker_errors(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Raise the error of a worker of Citus instead of the internal error (XX000) of the
    coordinator, or of the COPY (58030) with which it writes the rows of some statements.

    If a worker refuses a COMMIT, the coordinator reports the error as a warning. For a worker that
    it has lost it reports none, and the error is in words of several libraries. Any other such
    error is treated as the loss of a worker: whether the transaction was committed is unknown too.
    """
    own = connection.connection
    if own is None or not is_citus(connection):
        yield
        return
    noted: list[psycopg.Error] = []

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        sqlstate = diagnostic.sqlstate or ""
        # 01: a warning of the coordinator itself
        if not sqlstate.startswith("01") and sqlstate != _INTERNAL_ERROR:
            with suppress(KeyError):  # no error, or an unknown one
                noted.append(psycopg.errors.lookup(sqlstate)(diagnostic.message_primary or ""))

    own.add_notice_handler(note)
    try:
        yield
    except DatabaseError as error:
        if getattr(error.__cause__, "sqlstate", None) not in (_INTERNAL_ERROR, _IO_ERROR):
            raise
        with connection.wrap_database_errors:
            raise (
                noted[-1]
                if noted
                else psycopg.errors.ConnectionFailure(f"A worker of Citus was lost: {error}")
            ) from None
    finally:
        own.remove_notice_handler(note)


def problem_of_version(version: str) -> str:
    """Return why the engine with this ``version()`` is not supported; empty if it is."""
    if _POSTGRESQL.match(version) and not any(name in version for name in _DISGUISED):
        return ""
    return f"is not PostgreSQL, but {version!r}: {_CONSEQUENCE}"


def _problem_of_citus(own: psycopg.Connection[Any]) -> str:
    # A table without a distribution column has the method "n", and a reference table the
    # replication model "t" too.
    distributed = own.execute(
        "SELECT n.nspname || '.' || c.relname FROM pg_dist_partition AS p JOIN pg_class AS c ON"
        " c.oid = p.logicalrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relname ="
        " ANY(%s) AND (p.partmethod <> 'n' OR p.repmodel = 't') ORDER BY 1 LIMIT 5",
        [[model._meta.db_table for model in apps.get_app_config("idempotency").get_models()]],
    ).fetchall()
    if not distributed:
        return ""
    return (
        f"is Citus, and {', '.join(name for (name,) in distributed)} is distributed by rows or"
        " replicated: a claim would run on several nodes, and no unique constraint would prevent"
        " two rows for one key. Shard by schema, a schema for each tenant, or undistribute the"
        " table"
    )
