"""System checks of databases, and of foreign keys that refer to models of this app. Only E013 and
W017 query a database.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage, Tags, register
from django.db import OperationalError, connections, router
from django.db.models import DO_NOTHING, PROTECT, RESTRICT, ForeignObjectRel

from idempotency import conf
from idempotency._engine import database_product
from idempotency._engine.aliases import fields_elsewhere
from idempotency._engine.errors import effective_isolation
from idempotency._text import first_line
from idempotency.checks import error, warning
from idempotency.models import DownstreamCall, IdempotencyKey, ProcessedMessage, StagedJob


@register
def check_database(app_configs: Any, **kwargs: Any) -> Iterator[CheckMessage]:
    """E002, E006, E009: an unsupported database, autocommit that is off, or models in different
    databases. W014: a setting without effect on SQLite."""
    alias = router.db_for_write(IdempotencyKey)
    vendor = connections[alias].vendor
    if vendor not in ("postgresql", "sqlite"):
        yield error(
            "idempotency.E002",
            f"The database {alias!r}, which stores the idempotency keys, is {vendor}.",
            "Route the models of the app 'idempotency' to PostgreSQL, or to SQLite for"
            " development.",
        )
    if not connections[alias].settings_dict.get("AUTOCOMMIT", True):
        yield error(
            "idempotency.E006",
            f"The database {alias!r}, which stores the idempotency keys, has AUTOCOMMIT off:"
            " nothing would commit them.",
            "Turn AUTOCOMMIT on: @idempotent and atomic_phase open their own transactions.",
        )
    if vendor == "sqlite" and conf.are_valid() and conf.get().CONFIRM_REPLICATED:
        yield warning(
            "idempotency.W014",
            "The setting CONFIRM_REPLICATED of IDEMPOTENCY has no effect: the database"
            f" {alias!r} is SQLite.",
            "Remove the setting from settings files that use SQLite, which has no standby"
            " to confirm a commit.",
        )
    places = {
        model.__name__: router.db_for_write(model)
        for model in (IdempotencyKey, DownstreamCall, StagedJob, ProcessedMessage)
    }
    if len(set(places.values())) > 1:
        yield error(
            "idempotency.E009",
            "The router sends models that must share a transaction to different databases:"
            f" {places}.",
            "Route all models of the app 'idempotency' to one database; using= chooses"
            " another one for a request.",
        )


@register(deploy=True)
def check_deployed_database(app_configs: Any, **kwargs: Any) -> Iterator[CheckMessage]:
    """W007: SQLite in production. W015: statements that are not prepared."""
    alias = router.db_for_write(IdempotencyKey)
    vendor, options = connections[alias].vendor, connections[alias].settings_dict["OPTIONS"]
    if vendor == "sqlite":
        yield warning(
            "idempotency.W007",
            f"The database {alias!r}, which stores the idempotency keys, is SQLite: one request"
            " writes at a time.",
            "SQLite is for development. The guarantees hold on PostgreSQL.",
        )
    elif vendor == "postgresql" and "prepare_threshold" not in options:
        yield warning(
            "idempotency.W015",
            f"The option prepare_threshold is not set in DATABASES[{alias!r}]['OPTIONS']:"
            " PostgreSQL plans each statement of this app again, so that a protected request"
            " takes 1.5 to 2.7 times as long.",
            "Set it to 5. Set it to None behind a pooler in transaction mode without"
            " prepared statements (PgBouncer before 1.21).",
        )


@register(Tags.database)
def check_engine(
    app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any
) -> Iterator[CheckMessage]:
    """E013: a database that cannot be reached, or that uses PostgreSQL's protocol but is another
    product, or Citus with distributed or replicated tables. W017: two isolation levels in one
    database.

    ``manage.py check --database`` and ``migrate`` run it.
    """
    for alias in databases or ():
        connection = connections[alias]
        if connection.vendor == "postgresql" and router.allow_migrate_model(alias, IdempotencyKey):
            try:
                connection.ensure_connection()
            except OperationalError as cause:
                text = f"The database {alias!r} cannot be reached: {first_line(cause)}"
                yield error("idempotency.E013", text, "Start it, or correct DATABASES.")
                continue
            problem, _ = database_product.examine(connection)
            if problem:
                hint = "Route the models of the app 'idempotency' to PostgreSQL."
                yield error(database_product.CHECK_ID, problem, hint)
            else:
                yield from _mixed_levels(alias)


def _mixed_levels(alias: str) -> Iterator[CheckMessage]:
    if not conf.are_valid():
        return
    others = effective_isolation(None, alias)
    for setting in ("PHASE_ISOLATION", "PLAIN_ISOLATION"):
        if (level := getattr(conf.get(), setting)) not in (None, others):
            yield warning(
                "idempotency.W017",
                f"{setting} is {level!r}, but other transactions in the database {alias!r} run at"
                f" {others!r}.",
                "Above 'read committed', a transaction that waits for a lock reads data from before"
                " the lock. Remove the setting, or set OPTIONS['isolation_level'] of the database"
                " to the same level.",
            )


@register
def check_references(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E010: a foreign key that prevents the deletion of a staged job. The enqueuer would hand over
    such a job in each pass."""
    return [
        error(
            "idempotency.E010",
            f"The foreign key {relation.field} prevents the deletion of staged jobs, which are"
            " deleted after their hand-over.",
            "Set on_delete=SET_NULL or CASCADE, or store the id of the job in a UUIDField.",
        )
        for relation in StagedJob._meta.get_fields(include_hidden=True)
        if isinstance(relation, ForeignObjectRel)
        and relation.on_delete in (PROTECT, RESTRICT, DO_NOTHING)
    ]


@register
def check_databases_of_references(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """W020: a foreign key to a key from rows in another database. The reaper cannot apply its
    action there."""
    alias = router.db_for_write(IdempotencyKey)
    return [
        warning(
            "idempotency.W020",
            f"The foreign key {field} refers to idempotency keys in the database {alias!r}, but the"
            " router keeps its rows in another database.",
            "No database can check or change such a reference. If the database of the keys"
            " lacks the table, the reaper deletes no key. Route the model to the database of"
            " the keys, or store the id of the key in a BigIntegerField.",
        )
        for field in fields_elsewhere(alias)
    ]
