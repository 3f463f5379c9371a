"""Empty the tables between tests that commit, by DELETE from those that hold rows.

Django's own way truncates all tables and writes all permissions anew, which costs 150 ms a test.
"""
# ruff: noqa: S608 - the names of tables are Django's

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import TransactionTestCase

#: Written by the migrations. A test that changes one of these fails, since every later test would see the change.
WRITTEN_ONCE = ("auth_permission", "django_content_type", "django_migrations")

_tables: dict[str, list[str]] = {}
_counts: dict[str, list[int]] = {}


def install() -> None:
    """Let every test that commits empty its tables with ``empty``."""
    TransactionTestCase._fixture_teardown = _teardown  # type: ignore[method-assign]


def _teardown(case: TransactionTestCase) -> None:
    changed = [alias for alias in case._databases_names(include_mirrors=False) if not empty(connections[alias])]
    assert not changed, f"The test changed one of {', '.join(WRITTEN_ONCE)} on {changed}: undo it at the end of the test."


def empty(connection: BaseDatabaseWrapper) -> bool:
    """Delete all rows that tests have written, committed on return. Return False if a table of WRITTEN_ONCE was changed."""
    alias = connection.settings_dict["NAME"]
    quote = connection.ops.quote_name
    if alias not in _tables:
        names = connection.introspection.django_table_names(only_existing=True, include_views=False)
        _tables[alias] = sorted({*names} - {*WRITTEN_ONCE})
    with connection.cursor() as cursor:
        holding = [f"SELECT '{name}' WHERE EXISTS (SELECT 1 FROM {quote(name)})" for name in _tables[alias]]
        # Each number of a primary key is given once, so that a row that is deleted and written anew changes the sum.
        sums = ", ".join(f"(SELECT COALESCE(SUM(id), 0) FROM {quote(name)})" for name in WRITTEN_ONCE)
        cursor.execute(f"SELECT {sums}")
        counts = [int(number) for number in cursor.fetchone()]
        cursor.execute(" UNION ALL ".join(holding))
        if filled := [name for (name,) in cursor.fetchall()]:
            _delete(connection, filled)
    return _counts.setdefault(alias, counts) == counts


def _delete(connection: BaseDatabaseWrapper, names: list[str]) -> None:
    quote = connection.ops.quote_name
    if connection.vendor == "postgresql":
        # Foreign keys are triggers, which a replica does not run.
        statements = ["SET LOCAL session_replication_role = replica", *(f"DELETE FROM {quote(name)}" for name in names)]
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute("; ".join(statements))
        return
    with connection.constraint_checks_disabled(), transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        for name in names:
            cursor.execute(f"DELETE FROM {quote(name)}")
