"""Make keys older in the database, so that no test has to sleep."""

from datetime import timedelta

from django.db.models import DateTimeField, F, QuerySet

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
    chosen.update(**{moment: F(moment) - timedelta(seconds=seconds) for moment in MOMENTS})
    if isinstance(keys, IdempotencyKey):
        keys.refresh_from_db()
