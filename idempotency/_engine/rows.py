"""Run statements, and make keys of the rows that they return."""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import psycopg
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.models.base import ModelState

from idempotency._engine import database_product, round_trips, statements, updates
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._engine.cursors import (
    changed_rows,
    classified_errors,
    is_instrumented,
    numbered,
    own_cursor,
    positional,
)
from idempotency._engine.round_trips import Result
from idempotency._hidden import Hidden, Parameters
from idempotency.exceptions import LockLost
from idempotency.models import IdempotencyKey


@cache
def vendor(using: str) -> str:
    return connections[using].vendor


_statements = cache(statements.Statements)


def statements_for(using: str) -> statements.Statements:
    return _statements(vendor(using))


def execute(text: str, parameters: Parameters, using: str) -> int:
    """Run a statement that returns no row; return the number of rows that it has changed."""
    return _run(text, parameters, using, lambda cursor: Result(None, changed_rows(cursor))).rows


def fetch(text: str, parameters: Parameters, using: str) -> tuple[Any, ...] | None:
    """Return the first row of a statement, or None."""
    return _run(
        text, parameters, using, lambda cursor: Result(cursor.fetchone(), cursor.rowcount)
    ).row


def _run(
    text: str, parameters: Parameters, using: str, read: Callable[[CursorWrapper], Result]
) -> Result:
    connection = connections[using]
    postgresql = connection.vendor == "postgresql"
    if postgresql:
        database_product.psycopg_connection(connection)
        if round_trips.can_be_merged(connection):
            # It costs less processor time than a cursor.
            with classified_errors(connection):
                return round_trips.run(connection, text, parameters)
    bound: Hidden[Any] = parameters
    factory: type[psycopg.Cursor[Any]] = psycopg.Cursor
    # With DEBUG, Django binds each parameter on SQLite again, also one that is not in the text.
    if is_instrumented(connection) or not postgresql:
        text, names = positional(text)
        bound = Hidden(tuple(parameters.value[name] for name in names))
    elif not connection.settings_dict["OPTIONS"].get("server_side_binding"):
        # psycopg parses a text of over 4,096 characters with named parameters at each use. Django's
        # log of a cursor with server-side binding needs them.
        factory = psycopg.RawCursor
        text, names = numbered(text)
        bound = Hidden([parameters.value[name] for name in names])
    with own_cursor(using, factory) as cursor:
        cursor.execute(text, bound.value)
        return read(cursor)


def read(pk: int, *, using: str) -> ClaimedKey | None:
    return fetch_key(statements_for(using).read_by_id, Hidden({"id": pk}), using)


def fetch_key(text: str, parameters: Parameters, using: str) -> ClaimedKey | None:
    """Return the key of a row with ``statements.READ`` and its age. Its fence is the token of the
    current claim."""
    sent = time.monotonic()
    row = Hidden(fetch(text, parameters, using))
    if row.value is None:
        return None
    key = key_of_row(statements.READ, Hidden(row.value[:-2]), connections[using])
    return note_row(key, row.value[-2:], sent)


def note_row(key: ClaimedKey, age_and_ctid: tuple[Any, ...], sent: float) -> ClaimedKey:
    """Record the age, the ctid and the token of a key that was read after ``sent``, on this
    process's monotonic clock."""
    age_seconds, key.ctid = age_and_ctid
    # The age ends at the start of the statement, which may have waited for a lock since. The key
    # counts as too old rather than too young: a downstream service may have forgotten an old key.
    key.created_monotonic = sent - age_seconds
    key.fence = key.claim_token
    return key


def read_own(key: ClaimedKey, *, using: str) -> ClaimedKey:
    """Return a fresh copy of a key that this run holds. Raises LockLost if another claim has taken
    it over."""
    fresh = read(key.pk, using=using)
    if fresh is None or fresh.fence != key.fence:
        raise LockLost
    return fresh


def key_of_row(
    names: tuple[str, ...],
    values: Hidden[Sequence[Any]],
    connection: BaseDatabaseWrapper,
    **known: Any,
) -> ClaimedKey:
    """Return a key with the columns ``names`` and the attributes ``known``; other fields are
    deferred. The signals of models are not sent, as at the copy of an instance."""
    key = ClaimedKey.__new__(ClaimedKey)
    key._state = ModelState()
    key._state.adding, key._state.db = False, connection.alias
    row = Hidden(vars(key))
    row.value.update(known | dict(zip(names, values.value, strict=True)))
    del known  # The converters of the project's user model run here.
    for name, converters, expression in _converters(names, connection.alias):
        for converter in converters:
            row.value[name] = converter(row.value[name], expression, connection)
    return key


def token_parameter(token: uuid.UUID | None, using: str) -> Any:
    return token if token is None or vendor(using) == "postgresql" else token.hex


@cache
def array_parameter(names: tuple[str, ...], using: str) -> str:
    """Return the names as the literal of an array: psycopg would look up the types of a list at
    each use."""
    if vendor(using) != "postgresql":
        return json.dumps(names)
    quoted = (name.replace("\\", r"\\").replace('"', r"\"") for name in names)
    return "{" + ",".join(f'"{name}"' for name in quoted) + "}"


@cache
def _converters(names: tuple[str, ...], using: str) -> list[tuple[str, list[Any], Any]]:
    compiler = IdempotencyKey.objects.using(using).all().query.get_compiler(using)
    fields = {field.attname: field for field in IdempotencyKey._meta.concrete_fields}
    converters = compiler.get_converters([fields[name].get_col(updates.TABLE) for name in names])
    return [(names[position], *of_column) for position, of_column in converters.items()]
