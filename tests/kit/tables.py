"""Empty the tables between tests that commit, with a DELETE from each table that has rows.

Django truncates all tables and creates all permissions again, which takes 150 ms for each test.
"""

# ruff: noqa: S608 - the names of tables are Django's

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model
from django.test import TransactionTestCase

#: Tables that the migrations fill; their rows are kept.
WRITTEN_ONCE = ("auth_permission", "django_content_type", "django_migrations")
#: A test fails if it does not undo a change of these tables, because every later test would see the
#: change.
GUARDED = WRITTEN_ONCE[:2]

_tables: dict[str, list[str]] = {}
_sums: dict[str, list[int]] = {}


def install() -> None:
    """Let every test that commits empty its tables with ``empty``."""
    TransactionTestCase._fixture_teardown = _teardown  # type: ignore[method-assign]


def _teardown(case: TransactionTestCase) -> None:
    # needs Django's settings, which the mutation tool lacks
    from idempotency._engine import late_releases

    # Otherwise the thread would query deleted rows, possibly during a test that must not use a
    # database.
    late_releases._waiting.clear()
    changed = [
        alias
        for alias in case._databases_names(include_mirrors=False)
        if not empty(connections[alias])
    ]
    assert not changed, (
        f"The test changed one of {', '.join(GUARDED)} on {changed}:"
        " undo it at the end of the test."
    )


def empty(connection: BaseDatabaseWrapper) -> bool:
    """Delete all rows that tests have written, committed on return. Return False if a table of
    GUARDED was changed."""
    database = connection.settings_dict["NAME"]
    quote = connection.ops.quote_name
    if database not in _tables:
        names = connection.introspection.django_table_names(only_existing=True, include_views=False)
        _tables[database] = sorted({*names} - {*WRITTEN_ONCE})
    with connection.cursor() as cursor:
        # Each row has a unique id, so the sum also changes if a row is deleted and inserted again.
        cursor.execute(
            "SELECT "
            + ", ".join(f"(SELECT COALESCE(SUM(id), 0) FROM {quote(name)})" for name in GUARDED)
        )
        sums = [int(number) for number in cursor.fetchone()]
        holding = (
            f"SELECT '{name}' WHERE EXISTS (SELECT 1 FROM {quote(name)})"
            for name in _tables[database]
        )
        cursor.execute(" UNION ALL ".join(holding))
        filled = [name for (name,) in cursor.fetchall()]
    if filled:
        _delete(connection, filled)
    # The next test is compared with the sums after this test, so that only the test with the change
    # fails.
    before, _sums[database] = _sums.get(database, sums), sums
    return before == sums


def truncate(connection: BaseDatabaseWrapper, *models: type[Model]) -> None:
    """Give tables new, empty files for tests that count HOT updates or WAL; free space in old pages
    changes both counts."""
    names = ", ".join(connection.ops.quote_name(model._meta.db_table) for model in models)
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {names} CASCADE")


def _delete(connection: BaseDatabaseWrapper, names: list[str]) -> None:
    quote = connection.ops.quote_name
    if connection.vendor == "postgresql":
        # The role ``replica`` disables triggers, and so the checks of foreign keys.
        statements = [
            "SET LOCAL session_replication_role = replica",
            *(f"DELETE FROM {quote(name)}" for name in names),
        ]
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute("; ".join(statements))
        return
    with (
        connection.constraint_checks_disabled(),
        transaction.atomic(using=connection.alias),
        connection.cursor() as cursor,
    ):
        for name in names:
            cursor.execute(f"DELETE FROM {quote(name)}")
