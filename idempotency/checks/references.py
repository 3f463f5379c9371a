"""System checks of foreign keys of the project that refer to models of this app. They query no
database."""

from typing import Any

from django.core.checks import CheckMessage, Error, Warning, register
from django.db import router
from django.db.models import DO_NOTHING, PROTECT, RESTRICT, ForeignObjectRel

from idempotency._engine.aliases import fields_elsewhere
from idempotency.models import IdempotencyKey, StagedJob


@register
def check_references(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E010: a foreign key that prevents the deletion of a staged job. The enqueuer would hand over
    such a job in each pass."""
    return [
        Error(
            f"The foreign key {relation.field} prevents the deletion of staged jobs, which are"
            " deleted after their hand-over.",
            hint="Set on_delete=SET_NULL or CASCADE, or store the id of the job in a UUIDField.",
            id="idempotency.E010",
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
        Warning(
            f"The foreign key {field} refers to idempotency keys in the database {alias!r}, but the"
            " router keeps its rows in another database.",
            hint=(
                "No database can check or change such a reference, and if the table is missing"
                " beside the keys, the reaper deletes no key. Route the model to the database of"
                " the keys, or store the id of the key in a BigIntegerField."
            ),
            id="idempotency.W020",
        )
        for field in fields_elsewhere(alias)
    ]
