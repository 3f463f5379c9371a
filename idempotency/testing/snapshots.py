"""All rows of all tables: saved before the first run, restored before each run, compared after each
run.

While the kit works, each table gets ids from a separate range. So the kit recognizes an id
everywhere: in a foreign key, in the arguments of a job, in an answer.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.db import connections, models, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Cursor

#: The first id of the first table, and the distance between the first ids of two tables. All ids
#: fit an AutoField.
_FIRST_ID = 1_000_000_000
_IDS_PER_TABLE = 1_000_000
_MOST_RANGES = 1_000

Values = dict[str, Any]
#: The values of each row, by primary key.
Rows = dict[Any, Values]


@dataclass(frozen=True, slots=True)
class Table:
    """The table of a model, with the columns that can be written."""

    model: type[models.Model]
    alias: str

    @property
    def label(self) -> str:
        """The name of the model in messages and in ``ignore=``: app and model."""
        return self.model._meta.label

    @property
    def fields(self) -> "list[models.Field[Any, Any]]":
        """The fields with a column in this table, except generated columns."""
        return [
            field
            for field in self.model._meta.local_concrete_fields
            if not getattr(field, "generated", False)
        ]

    @property
    def numbered(self) -> bool:
        """Whether the database generates the ids, and their type is wide enough for the ranges."""
        return isinstance(self.model._meta.pk, models.AutoField | models.BigAutoField)

    @property
    def columns(self) -> str:
        """The columns, quoted, for a statement."""
        return ", ".join(
            connections[self.alias].ops.quote_name(str(field.column)) for field in self.fields
        )

    def raw(self) -> list[tuple[Any, ...]]:
        """Return the rows as the database stores them, for ``replace()``."""
        connection = connections[self.alias]
        names = self.model._meta.db_table, str(self.model._meta.pk.column)
        table, pk = map(connection.ops.quote_name, names)
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {self.columns} FROM {table} ORDER BY {pk}")  # noqa: S608  # quoted names of the models' own
            return [
                tuple(bytes(v) if isinstance(v, memoryview) else v for v in row)
                for row in cursor.fetchall()
            ]

    def replace(self, rows: list[tuple[Any, ...]]) -> None:
        """Replace all rows of the table by these rows."""
        connection = connections[self.alias]
        quote = connection.ops.quote_name
        table = quote(self.model._meta.db_table)
        places = ", ".join(["%s"] * len(self.fields))
        with connection.cursor() as cursor:
            cursor.execute(f"DELETE FROM {table}")  # noqa: S608  # quoted names of the models' own
            if rows:
                cursor.executemany(f"INSERT INTO {table} ({self.columns}) VALUES ({places})", rows)  # noqa: S608  # quoted names of the models' own

    def read(self) -> Rows:
        """Return the rows as Python values."""
        manager = self.model._base_manager.using(self.alias)
        return {row[self.model._meta.pk.attname]: row for row in manager.order_by("pk").values()}


def _models() -> Iterator[type[models.Model]]:
    """Yield the managed models of all installed apps that have their own table."""
    for model in apps.get_models(include_auto_created=True):
        if model._meta.managed and not model._meta.proxy and not model._meta.swapped:
            yield model


def tables() -> list[Table]:
    """Return the table of each model, in the database to which the router sends its writes."""
    found = [Table(model, router.db_for_write(model)) for model in _models()]
    existing = {
        alias: set(connections[alias].introspection.table_names())
        for alias in {table.alias for table in found}
    }
    return [table for table in found if table.model._meta.db_table in existing[table.alias]]


class Snapshot:
    """All rows at the time of its creation."""

    def __init__(self) -> None:
        self.tables = tables()
        self.read = {table.label: table.read() for table in self.tables}
        self._raw = {table.label: table.raw() for table in self.tables}
        self._aliases = sorted({table.alias for table in self.tables})
        self._marks = self._marked()

    def changed(self) -> list[Table]:
        """Return the tables whose rows have changed."""
        marks = self._marked()
        return [table for table in self.tables if marks[table.label] != self._marks[table.label]]

    def unseen(self, written: set[tuple[str, str, str]], ignored: Container[str]) -> list[str]:
        """Return the model, or else the table, and the database of each written table that is not
        in the snapshot. The argument ``written`` has the database, the schema or "", and the table
        of each write."""
        default = {alias: _schemas(connections[alias]) for alias, schema, _ in written if schema}
        tables = {
            (alias, f"{schema}.{table}" if schema and schema not in default[alias] else table)
            for alias, schema, table in written
        }
        unseen = tables - {(table.alias, table.model._meta.db_table) for table in self.tables}
        # The statements are not parsed exactly: the word after UPDATE may not be a table.
        existing = {alias: connections[alias].introspection.table_names() for alias, _ in unseen}
        models = (
            model for model in apps.get_models(include_auto_created=True) if not model._meta.proxy
        )
        labels = {model._meta.db_table.replace('"', ""): model._meta.label for model in models}
        found = [
            (labels.get(table, table), alias)
            for alias, table in unseen
            if "." in table or table in existing[alias]
        ]
        return sorted(
            f"{label} in the database {alias!r}" for label, alias in found if label not in ignored
        )

    def restore(self) -> None:
        """Restore all rows, and let the ids of each table start at the beginning of its range."""
        changed = self.changed()
        for alias in self._aliases:
            with transaction.atomic(using=alias):
                for table in changed:
                    if table.alias == alias:
                        table.replace(self._raw[table.label])
                firsts = {
                    table.model: _FIRST_ID + number * _IDS_PER_TABLE
                    for number, table in enumerate(self.tables[:_MOST_RANGES])
                    if table.alias == alias and table.numbered
                }
                _number_from(connections[alias], firsts)

    def close(self) -> None:
        """Restore all rows, and let the ids of each table continue after the highest one."""
        self.restore()
        for alias in self._aliases:
            numbered = [table for table in self.tables if table.alias == alias and table.numbered]
            highest = {
                table.model: max(self.read[table.label], default=0) + 1 for table in numbered
            }
            _number_from(connections[alias], highest)

    def _marked(self) -> dict[str, Any]:
        """Return a mark for each table, which changes with the rows of the table. PostgreSQL
        computes all marks in one statement."""
        marks: dict[str, Any] = {}
        for alias in self._aliases:
            here = [table for table in self.tables if table.alias == alias]
            quote = connections[alias].ops.quote_name
            if connections[alias].vendor != "postgresql":
                marks |= {table.label: table.raw() for table in here}
                continue
            mark = (
                "SELECT {}, count(*) || ' ' || coalesce(sum(hashtextextended(t::text, 0)), 0) FROM"
                " {} AS t"
            )
            each = (
                mark.format(number, quote(table.model._meta.db_table))
                for number, table in enumerate(here)
            )
            marks |= {
                here[number].label: value
                for number, value in _prepared(connections[alias], " UNION ALL ".join(each))
            }
        return marks


def _schemas(connection: BaseDatabaseWrapper) -> set[str]:
    """Return the schemas whose tables need no schema in their name."""
    if connection.vendor != "postgresql":
        return {"main"}
    with connection.cursor() as cursor:
        cursor.execute("SELECT unnest(current_schemas(true))")
        return {schema for (schema,) in cursor.fetchall()}


def _prepared(connection: BaseDatabaseWrapper, text: str) -> list[tuple[Any, ...]]:
    """Return the rows of a statement. If ``prepare_threshold`` permits it, PostgreSQL plans the
    statement once for each connection.

    Planning a statement on all tables takes longer than running it. A cursor of Django has no
    argument that prepares a statement.
    """
    connection.ensure_connection()
    with Cursor(connection.connection) as cursor:
        return cursor.execute(text.encode(), prepare=True).fetchall()


def _number_from(connection: BaseDatabaseWrapper, firsts: dict[type[models.Model], int]) -> None:
    """Let the ids of each table begin at a number."""
    names = {model._meta.db_table: first for model, first in firsts.items()}
    if connection.vendor == "postgresql" and firsts:
        begin = [
            f"setval(pg_get_serial_sequence({_literal(connection.ops.quote_name(model._meta.db_table))},"
            f" {_literal(str(model._meta.pk.column))}), {first}, false)"
            for model, first in firsts.items()
        ]
        _prepared(connection, "SELECT " + ", ".join(begin))
    elif connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.executemany(
                "DELETE FROM sqlite_sequence WHERE name = %s", [(name,) for name in names]
            )
            cursor.executemany(
                "INSERT INTO sqlite_sequence (name, seq) VALUES (%s, %s)",
                [(n, f - 1) for n, f in names.items()],
            )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
