"""The rows that belong to a key, with their states: rows of other apps, staged jobs with their
messages, and calls."""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.contrib.admin import AdminSite
from django.contrib.admin.utils import label_for_field, lookup_field
from django.db import Error, router
from django.db.models import ForeignKey, ManyToOneRel
from django.http import HttpRequest
from django.utils.html import strip_tags
from django.utils.translation import gettext, ngettext

from idempotency._engine.aliases import fields_elsewhere
from idempotency._outcomes import was_handed_over
from idempotency._text import duration, error_text
from idempotency.admin.bodies import NOT_VISIBLE, may_view_bodies
from idempotency.admin.operations import call_result
from idempotency.admin.reading import admin_url, first_line_of, viewable
from idempotency.inbox import STAGED_JOBS
from idempotency.models import DownstreamCall, IdempotencyKey, ProcessedMessage, StagedJob
from idempotency.templatetags.idempotency_admin import ago, as_json, written

logger = logging.getLogger("idempotency")

#: The maximum number of rows of one kind, and of columns of a row, that are shown.
MAX_LINKED, MAX_COLUMNS = 10, 5


@dataclass(frozen=True, slots=True)
class Row:
    """A row: its name, the URL of its page, its state, and whether it requires manual
    intervention."""

    name: str
    url: str
    state: str = ""
    alarming: bool = False


@dataclass(frozen=True, slots=True)
class Linked:
    """The rows of one kind; ``more`` is true if there are more rows than these."""

    name: str
    rows: list[Row] = field(default_factory=list)
    more: bool = False


def belongings(key: Any, site: AdminSite, request: HttpRequest, *, using: str) -> list[Linked]:
    """Return the rows that belong to ``key``, at most MAX_LINKED of each kind. Rows of a model that
    the person may not view have no details. The key must have been read with ``read_at``."""
    kinds = [
        *_of_other_apps(key, site, request, using),
        _jobs(key, site, request, using),
        _calls(key, site, request, using),
    ]
    return [kind for kind in kinds if kind.rows]


def _of_other_apps(
    key: IdempotencyKey, site: AdminSite, request: HttpRequest, using: str
) -> Iterator[Linked]:
    """Yield the rows of other apps' models with a foreign key to ``key``. This takes one query for
    each model, and one more for the columns if the person may view the rows."""
    for model, foreign_key, rows_at in _indexed_models(using):
        visible = viewable(site, request, model) if model in site._registry else None
        every = model._base_manager.all() if visible is None else visible
        found = every.using(rows_at).filter(**{foreign_key.name: key.pk}).order_by()
        pks = list(found.values_list("pk", flat=True)[: MAX_LINKED + 1])
        shown = pks[:MAX_LINKED]
        urls = {pk: admin_url(site, request, model, pk) for pk in shown}
        states: dict[Any, str] = {}
        if any(urls.values()):
            states = _columns(site._registry[model], request, shown, foreign_key.name, rows_at)
        rows = [Row(str(pk), url, states.get(pk, "")) for pk, url in urls.items()]
        yield Linked(str(model._meta.verbose_name), rows, more=len(pks) > MAX_LINKED)


def lack_values(key: IdempotencyKey, other: IdempotencyKey, *, using: str) -> bool:
    """Return whether the rows of other apps that belong to ``key`` lack a value in a column in
    which those of ``other`` have one. The work of ``key`` is then not done as that of ``other``
    is."""
    for model, foreign_key, rows_at in _indexed_models(using):
        rows = model._base_manager.using(rows_at).order_by()
        own, others = (
            {
                name
                for row in rows.filter(**{foreign_key.name: pk}).values()[:MAX_LINKED]
                for name, value in row.items()
                if value not in (None, "")
            }
            for pk in (key.pk, other.pk)
        )
        if others - own:
            return True
    return False


def _indexed_models(using: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield those of ``linked_models`` whose foreign key has an index: without it, a query for the
    rows of a key would read the whole table."""
    for model, foreign_key, rows_at in linked_models(using):
        if not model._meta.auto_created and (foreign_key.db_index or foreign_key.unique):
            yield model, foreign_key, rows_at


def linked_models(using: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield each model of other apps with a foreign key to ``IdempotencyKey``, the field, and the
    database of the rows that belong to the keys in the database ``using``."""
    elsewhere = fields_elsewhere(using)
    for relation in IdempotencyKey._meta.get_fields(include_hidden=True):
        model: Any = relation.related_model
        if isinstance(relation, ManyToOneRel) and model not in (StagedJob, DownstreamCall):
            field = relation.field
            yield model, field, router.db_for_read(model) if field in elsewhere else using


def _columns(
    row_admin: Any, request: HttpRequest, pks: Collection[Any], link: str, using: str
) -> dict[Any, str]:
    """Return the columns of the model's list for these rows, as one text for each. Rows that
    ``get_queryset`` hides are left out."""
    # key_state: see contrib.admin
    known = {"__str__", "pk", row_admin.model._meta.pk.name, link, "key_state"}
    names = [name for name in row_admin.get_list_display(request) if name not in known]
    names = names[:MAX_COLUMNS]
    foreign = [each for each in row_admin.model._meta.fields if isinstance(each, ForeignKey)]
    related = [each.name for each in foreign if each.name in names]
    rows = row_admin.get_queryset(request).using(using).filter(pk__in=pks)
    rows = rows.select_related(*related) if related else rows
    return {
        row.pk: ", ".join(filter(None, (_column(name, row, row_admin) for name in names)))
        for row in rows
    }


def _column(name: Any, row: Any, row_admin: Any) -> str:
    """Return the value of a column with its label, or a dash for an empty value; "" if the value
    cannot be computed."""
    try:
        _, _, value = lookup_field(name, row, row_admin)
    except Error:
        raise
    except Exception as error:
        # A method of another app may need attributes that only its own list sets.
        text = "a column of %s cannot be shown with a key: %s"
        logger.info(text, type(row_admin).__name__, error_text(error))
        return ""
    text = written(value) if isinstance(value, datetime) else strip_tags(str(value))
    if value is None or value == "":
        text = row_admin.get_empty_value_display()
    return f"{label_for_field(name, row_admin.model, row_admin)} {first_line_of(text)}"


def _jobs(key: Any, site: AdminSite, request: HttpRequest, using: str) -> Linked:
    every, visible = _rows_of(StagedJob, site, request)
    jobs = list(
        every.using(using).filter(idempotency_key=key.pk).order_by("run_at")[: MAX_LINKED + 1]
    )
    messages = ProcessedMessage.objects.using(using).filter(
        source=STAGED_JOBS, message_id__in=[str(job.pk) for job in jobs]
    )
    processed = {message.message_id: message.processed_at for message in messages} if jobs else {}
    rows = []
    for job in jobs[:MAX_LINKED]:
        error = first_line_of(job.last_error) if visible else gettext(NOT_VISIBLE)
        state = _state_of_job(job, error, processed.get(str(job.pk)), key.read_at)
        url = admin_url(site, request, StagedJob, job.pk)
        rows.append(Row(job.label, url, state, job.failed_at is not None))
    return Linked(gettext("staged job"), rows, more=len(jobs) > MAX_LINKED)


def _rows_of(model: Any, site: AdminSite, request: HttpRequest) -> tuple[Any, bool]:
    """Return the rows of a model that the person may view, and true; without the permission, all
    rows, and false."""
    rows = viewable(site, request, model)
    return (model.objects.all(), False) if rows is None else (rows, True)


def _state_of_job(job: StagedJob, error: str, processed_at: datetime | None, now: datetime) -> str:
    if processed_at is not None:
        return gettext("took effect at %(time)s") % {"time": written(processed_at)}
    if job.failed_at is not None:
        told = {"ago": ago(now - job.failed_at), "error": error}
        return gettext("failed %(ago)s: %(error)s") % told
    if was_handed_over(job):
        return gettext("sent, but cannot be deleted")
    if not job.hand_overs and job.run_at > now:
        return gettext("due in %(duration)s") % {"duration": duration(job.run_at - now)}
    state = gettext("handed over, no effect yet")
    if not job.hand_overs:
        state = gettext("waiting, due %(ago)s") % {"ago": ago(now - job.run_at)}
    if not job.refusals:
        return state
    refused = ngettext(
        "refused %(count)s time: %(error)s", "refused %(count)s times: %(error)s", job.refusals
    )
    return f"{state}, {refused % {'count': job.refusals, 'error': error}}"


def _calls(key: Any, site: AdminSite, request: HttpRequest, using: str) -> Linked:
    every, visible = _rows_of(DownstreamCall, site, request)
    visible = visible and may_view_bodies(request)
    calls = list(every.using(using).filter(key=key.pk).order_by("pk")[: MAX_LINKED + 1])
    rows = []
    for call in calls[:MAX_LINKED]:
        result = gettext(NOT_VISIBLE)
        if visible:
            result = first_line_of(as_json(call_result(key, call.result)))
        unknown = call.recorded_at is None
        text = gettext("begun %(ago)s, result %(result)s")
        if unknown:
            text = gettext("begun %(ago)s, result unknown")
        state = text % {"ago": ago(key.read_at - call.started_at), "result": result}
        url = admin_url(site, request, DownstreamCall, call.pk)
        rows.append(Row(call.name, url, state, unknown))
    return Linked(gettext("downstream call"), rows, more=len(calls) > MAX_LINKED)
