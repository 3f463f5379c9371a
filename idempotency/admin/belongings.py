"""What belongs to a key: the rows of other apps, its staged jobs, its foreign calls."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.contrib.admin import AdminSite
from django.http import HttpRequest

from idempotency.admin.reading import admin_url, first_line_of
from idempotency.models import ForeignCall, IdempotencyKey, StagedJob

#: How many rows of one kind are shown.
MAX_LINKED = 10


@dataclass(frozen=True, slots=True)
class Linked:
    """Rows of one model that point at the key: their pk and where to see them."""

    name: str
    rows: list[tuple[Any, str]] = field(default_factory=list)
    more: bool = False


def linked(key: IdempotencyKey, site: AdminSite, request: HttpRequest, *, using: str) -> Iterator[Linked]:
    """Yield the rows of other apps' models with a foreign key to ``key``, a few of each; one query for each model."""
    for relation in IdempotencyKey._meta.get_fields(include_hidden=True):
        model: Any = relation.related_model
        if not (relation.one_to_many or relation.one_to_one) or relation.concrete or model in (StagedJob, ForeignCall):
            continue
        foreign_key: Any = relation.field  # type: ignore[union-attr]
        if model._meta.auto_created or not (foreign_key.db_index or foreign_key.unique):
            continue  # Without an index it would be a search through the whole table.
        rows = model._base_manager.using(using).filter(**{foreign_key.name: key.pk}).order_by()
        pks = list(rows.values_list("pk", flat=True)[: MAX_LINKED + 1])
        if pks:
            shown = [(pk, admin_url(site, request, model, pk)) for pk in pks[:MAX_LINKED]]
            yield Linked(str(model._meta.verbose_name), shown, more=len(pks) > MAX_LINKED)


def belongings(key: IdempotencyKey, site: AdminSite, request: HttpRequest, *, using: str) -> dict[str, Any]:
    """Return what belongs to ``key``, a bounded number of rows of each kind, for the template."""
    jobs = StagedJob.objects.using(using).filter(idempotency_key=key.pk).order_by("run_at")[:MAX_LINKED]
    calls = ForeignCall.objects.using(using).filter(key=key.pk).order_by("pk")[:MAX_LINKED]
    return {
        "linked": list(linked(key, site, request, using=using)),
        "jobs": [(job, admin_url(site, request, StagedJob, job.pk), first_line_of(job.last_error)) for job in jobs],
        "calls": [(call, admin_url(site, request, ForeignCall, call.pk)) for call in calls],
    }
