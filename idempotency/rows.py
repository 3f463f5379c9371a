"""Running the statements of ``idempotency.sql``, and making a key of the row that one returns."""

import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from django.db import connections
from django.db.models import DEFERRED

from idempotency import sql
from idempotency.models import IdempotencyKey
from idempotency.transactions import own_cursor

_ATTRIBUTES = [field.attname for field in IdempotencyKey._meta.concrete_fields]


@lru_cache(maxsize=64)
def vendor(using: str) -> str:
    """Return what the database is, "postgresql" or "sqlite"."""
    return connections[using].vendor


def statements(using: str) -> sql.Statements:
    """Return the statements for this database."""
    return sql.statements(vendor(using))


def execute(text: str, parameters: dict[str, Any], using: str) -> int:
    """Run a statement and return how many rows it changed."""
    with own_cursor(using) as cursor:
        cursor.execute(text, parameters)
        return int(cursor.rowcount)


def fetch(text: str, parameters: dict[str, Any], using: str) -> tuple[Any, ...] | None:
    """Run a statement and return its row, None if there is none."""
    with own_cursor(using) as cursor:
        cursor.execute(text, parameters)
        row: tuple[Any, ...] | None = cursor.fetchone()
        return row


def key_of_row(names: tuple[str, ...], values: Sequence[Any], using: str, **known: Any) -> IdempotencyKey:
    """Return a key of the columns ``names`` and of what is ``known`` besides; the others are loaded when they are asked for."""
    columns = list(values)
    for position, converters, expression in _converters(names, using):
        for converter in converters:
            columns[position] = converter(columns[position], expression, connections[using])
    known.update(zip(names, columns, strict=True))
    key = IdempotencyKey(*[known.get(name, DEFERRED) for name in _ATTRIBUTES])
    key._state.adding, key._state.db = False, using
    return key


def token_parameter(token: uuid.UUID | None, using: str) -> Any:
    """Return a token as the database takes it."""
    return token if token is None or vendor(using) == "postgresql" else token.hex


@lru_cache(maxsize=64)
def _converters(names: tuple[str, ...], using: str) -> list[tuple[int, list[Any], Any]]:
    compiler = IdempotencyKey.objects.using(using).all().query.get_compiler(using)
    fields = {field.attname: field for field in IdempotencyKey._meta.concrete_fields}
    converters = compiler.get_converters([fields[name].get_col(sql.TABLE) for name in names])
    return [(position, *of_column) for position, of_column in converters.items()]
