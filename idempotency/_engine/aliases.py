"""Two aliases of one database: an alias is not an identity, so the servers are asked.

A project may name its database twice, for example to migrate without a pooler. If a loop or
``using=`` names the second alias, phases and the inbox run on one connection, and the queries of
the project on another one. Then they share no transaction.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.db import connections, router, transaction
from django.db.models import ForeignObjectRel

from idempotency.models import IdempotencyKey


def routed_twin(alias: str) -> str | None:
    """Return the alias to which the router writes keys, if it is another alias of the same tables;
    otherwise None.

    Raises OperationalError if one of the two databases cannot be reached.
    """
    routed = router.db_for_write(IdempotencyKey)
    return routed if routed != alias and share_tables(alias, routed) else None


def share_tables(one: str, other: str) -> bool:
    """Return whether the keys of two aliases are in one table. Connections that this call opens are
    closed.

    Raises OperationalError if one of the two databases cannot be reached.
    """
    vendors = {connections[alias].vendor for alias in (one, other)}
    if vendors == {"sqlite"}:
        return len({_file(alias) for alias in (one, other)}) == 1
    if vendors != {"postgresql"}:
        return False
    # The identifier of the system would not do: a standby and a restored copy have that of their
    # origin, and some roles may not read it. A lock of a transaction is visible in its own database
    # only, behind a pooler too.
    number = random.getrandbits(63)  # nosec B311  # the number of a lock; no secret
    with _transaction(one):
        _, table = _lock(one, number)
        with _transaction(other):
            is_free, other_table = _lock(other, number)
    return table is not None and table == other_table and not is_free


@contextmanager
def _transaction(alias: str) -> Iterator[None]:
    connection = connections[alias]
    was_open = connection.connection is not None
    try:
        with transaction.atomic(using=alias):
            yield
    finally:
        if not was_open:
            connection.close()


def _lock(alias: str, number: int) -> Any:
    """Try to lock a number. Return whether it was free, and the id of the table of the keys, which
    may be in any schema."""
    table = connections[alias].ops.quote_name(IdempotencyKey._meta.db_table)
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT pg_try_advisory_xact_lock(%s), to_regclass(%s)::oid", [number, table]
        )
        return cursor.fetchone()


def fields_elsewhere(alias: str) -> list[Any]:
    """Return the foreign keys of the project to keys in ``alias`` whose rows the router keeps in
    another database."""
    routed = router.db_for_write(IdempotencyKey) == alias
    return [
        relation.field
        for relation in IdempotencyKey._meta.get_fields(include_hidden=True)
        if isinstance(relation, ForeignObjectRel)
        and relation.related_model._meta.app_label != IdempotencyKey._meta.app_label
        and (
            not router.allow_migrate_model(alias, relation.related_model)
            # Without a request, the router of a shard may name another shard for both models.
            or (routed and router.db_for_write(relation.related_model) != alias)
        )
    ]


def _file(alias: str) -> str:
    name = str(connections[alias].settings_dict["NAME"])
    return name if ":" in name else str(Path(name).resolve())
