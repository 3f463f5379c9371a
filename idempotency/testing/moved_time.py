"""Make keys older in the database, so that no test has to sleep."""

from datetime import timedelta

from django.db.models import DateTimeField, QuerySet

from idempotency.models import IdempotencyKey

#: The names of all time fields of a key.
MOMENTS = tuple(
    field.name for field in IdempotencyKey._meta.concrete_fields if isinstance(field, DateTimeField)
)


def age(keys: IdempotencyKey | QuerySet[IdempotencyKey], seconds: float) -> None:
    """Make a key, or each key of a queryset, older by ``seconds``, as if that time had passed for
    it.

    On return all times of the key are ``seconds`` earlier in the database, and an instance is read
    again. Locks, the retention and ``derive(valid_seconds=...)`` expire accordingly, and the
    completer runs keys that are now abandoned. The clock, your own rows and other keys do not
    change.
    """
    chosen = (
        IdempotencyKey.objects.using(keys._state.db).filter(pk=keys.pk)
        if isinstance(keys, IdempotencyKey)
        else keys
    )
    past = timedelta(seconds=seconds)
    # Citus accepts no column in the expression of a new time.
    for pk, *times in chosen.values_list("pk", *MOMENTS):
        older = {name: at and at - past for name, at in zip(MOMENTS, times, strict=True)}
        chosen.filter(pk=pk).update(**older)
    if isinstance(keys, IdempotencyKey):
        keys.refresh_from_db()
