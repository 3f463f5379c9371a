"""The bulk work that the dashboard shows."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import router
from django.db.models import Q
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import Promise

from idempotency.admin.bulk import report
from idempotency.admin.bulk_pages import BulkAdmin
from idempotency.models import BulkWork, IdempotencyKey

#: The maximum number of works that are shown, the newest first.
MAX_WORKS = 20


@dataclass(frozen=True, slots=True)
class WorkLine:
    """A bulk work, with the label of its action, its report and the URL of its page."""

    work: BulkWork
    label: str | Promise
    report: str
    url: str


def works_of(request: HttpRequest, *lists: Any) -> list[WorkLine]:
    """Return the bulk work that is not finished, or was finished in the last hour, the newest
    first, of the actions that the person may use."""
    recent = Q(finished_at=None) | Q(finished_at__gt=Now() - timedelta(hours=1))
    works = BulkWork.objects.using(router.db_for_write(IdempotencyKey)).filter(recent)
    offered = {
        action.name: (
            action,
            f"{rows.admin_site.name}:idempotency_{rows.opts.model_name}_bulk_work",
        )
        for rows in lists
        if isinstance(rows, BulkAdmin)
        for action in rows.bulk
        if rows.holds(request, action.permission)
    }
    lines = []
    for work in works.filter(action__in=offered).order_by("-created_at")[:MAX_WORKS]:
        action, name = offered[work.action]
        url = reverse(name, args=(work.action, work.pk))
        lines.append(WorkLine(work, action.label, report(work, action), url))
    return lines
