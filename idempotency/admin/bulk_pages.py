"""The pages of an action on many rows: the confirmation, and the progress of the work.

The form of the confirmation begins the work, which the completers do. The page of the work does a
part of it with each POST, so that it ends without a completer too. A script submits the form of
that page; without JavaScript the person presses its button.
"""

import uuid
from collections import Counter
from functools import partial
from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR
from django.core import signing
from django.core.exceptions import ValidationError
from django.db import router
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path
from django.utils.functional import Promise
from django.utils.translation import gettext

from idempotency import _bulk_work
from idempotency._engine.outer_transactions import in_outer_transaction
from idempotency._http.atomic_requests import EVERY_ALIAS
from idempotency._text import Grouped
from idempotency.admin.actions import noted, username
from idempotency.admin.answering import ConfirmationForm
from idempotency.admin.bodies import log_looks, may_view_bodies
from idempotency.admin.bulk import BulkAction, Confirmation, Group, report
from idempotency.admin.filters import AS_OF
from idempotency.admin.reading import ReadOnlyAdmin
from idempotency.models import BulkWork

#: The query parameter with the ids of chosen rows. Without it, the action applies to all rows that
#: the filters select.
IDS = "ids"
#: The maximum number of single rows that a confirmation shows.
MAX_SAMPLE = 20


class BulkForm(ConfirmationForm):
    """The form of the confirmation."""

    work = forms.CharField(widget=forms.HiddenInput)

    def __init__(self, action: BulkAction, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.action = action

    def clean_work(self) -> Confirmation:
        """Return what was confirmed; raise ValidationError if this site has not signed it."""
        try:
            return Confirmation.of(self.cleaned_data["work"], self.action)
        except signing.BadSignature:
            raise ValidationError(gettext("This page was out of date. Nothing was done.")) from None


class BulkAdmin(ReadOnlyAdmin):
    """A list with actions. Each action asks for a confirmation, and applies to all matching rows or
    to the chosen ones."""

    bulk: ClassVar[tuple[BulkAction, ...]] = ()
    actions = ()

    def get_urls(self) -> list[URLPattern]:
        """Add the pages of the actions."""
        name, view = f"idempotency_{self.opts.model_name}_bulk", self.admin_site.admin_view
        work = "bulk/<slug:name>/<uuid:pk>/"
        return [
            path("bulk/<slug:name>/", view(self.bulk_view), name=name),
            path(work, view(self.work_view), name=f"{name}_work"),
            *super().get_urls(),
        ]

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> Any:
        """Return the list's actions that the person may use. Since Django 6.1, the page of a row
        may have actions."""
        if action_location is not None and action_location.name != "CHANGE_LIST":
            return {}
        allowed = [action for action in self.bulk if self.holds(request, action.permission)]
        return {
            action.name: (partial(_ask, action.name), action.name, f"{action.label} …")
            for action in allowed
        }

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list, and name the actions that the person may not use, with the permissions
        that they require."""
        return super().changelist_view(
            request, {"not_offered": self.not_offered(request)} | (extra_context or {})
        )

    def not_offered(self, request: HttpRequest) -> list[tuple[str | Promise, str]]:
        """Return the labels of the actions that the person may not use, with the permissions that
        they require."""
        label = self.opts.app_label
        return [
            (action.label, f"{label}.{action.permission}")
            for action in self.bulk
            if not self.holds(request, action.permission)
        ]

    def question_url(self, action: BulkAction, *rows: Any) -> str:
        """Return the URL of the confirmation of an action on these rows."""
        ids = ",".join(str(row.pk).replace("-", "") for row in rows)
        return f"{self.page_url('bulk', action.name)}?{IDS}={ids}"

    def bulk_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """Show the confirmation for all rows that match the query. The confirmed form begins the
        work, and leads to its page."""
        action = self._action(name)
        if not self.holds(request, action.permission):
            return self.refused(request, action.permission)
        ids, sent = request.GET.get(IDS), BulkForm(action, request.POST or None)
        if sent.is_valid():
            setattr(request, AS_OF, sent.cleaned_data["work"].read_at)
        try:
            rows = self._matching(request, ids)
        except IncorrectLookupParameters:
            return HttpResponseRedirect(self.page_url("changelist"))
        form_class: type[BulkForm] = action.form_for(rows) or BulkForm
        form = form_class(action, request.POST or None)
        problem = action.problem(rows)
        if form.is_valid() and not problem and not form.asks_again():
            work = self._begin(request, action, rows, form)
            page = self.page_url("bulk_work", work.action, work.pk)
            return HttpResponseRedirect(_with_filters(page, request))
        question = _question(action, rows, ids)
        context = self._context(request, action) | question
        context |= {"problem": problem, "with_bodies": may_view_bodies(request)}
        if form_class is BulkForm or not sent.is_valid():
            initial = {"work": question["work"].signed(action), "note": request.POST.get("note")}
            context |= {"form": form_class(action, initial=initial), "errors": sent.errors}
        else:
            context |= {"form": form, "errors": {}}
            context["answers"] = self._preview(request, action, rows, form)
        if context["with_bodies"] and question["sample"]:
            log_looks(request, question["sample"])
        return self.page(request, "bulk_question", context)

    def _preview(self, request: HttpRequest, action: Any, rows: Any, form: Any) -> list[Any]:
        """Return the answers of the first keys; an empty list if the person wants to edit."""
        if not form.is_previewed():
            return []
        keys = list(action.chosen(rows, form.cleaned_data["work"].read_at)[:MAX_SAMPLE])
        if may_view_bodies(request):
            log_looks(request, keys)
        return list(action.samples(keys, form.answer()))

    def work_view(self, request: HttpRequest, name: str, pk: uuid.UUID) -> HttpResponse:
        """Show the progress of a work. A POST stops it, resumes it, or does a part of it."""
        action, alias = self._action(name), router.db_for_write(self.model)
        if not self.holds(request, action.permission):
            return self.refused(request, action.permission)
        works = BulkWork.objects.using(alias).filter(pk=pk, action=name)
        step, advanced = request.POST.get("step", ""), True
        if step in ("stop", "resume"):
            stopped_at = Now() if step == "stop" else None
            works.filter(finished_at=None).update(stopped_at=stopped_at, error="")
        elif step == "continue" and not in_outer_transaction(alias):
            advanced = _bulk_work.work_off(alias, pk)
        work = get_object_or_404(works)
        context = self._context(request, action) | {"work": work, "report": report(work, action)}
        if step == "continue" and work.finished_at:
            level = messages.SUCCESS if work.done >= work.expected else messages.WARNING
            self.message_user(request, context["report"], level)
            return HttpResponseRedirect(context["back"])
        return self.page(request, "bulk_progress", context | {"advanced": advanced})

    # Each chunk of the work is a transaction of its own.
    bulk_view._non_atomic_requests = EVERY_ALIAS  # type: ignore[attr-defined]
    work_view._non_atomic_requests = EVERY_ALIAS  # type: ignore[attr-defined]

    def _begin(
        self, request: HttpRequest, action: BulkAction, rows: QuerySet[Any], form: BulkForm
    ) -> BulkWork:
        sent = form.cleaned_data
        confirmation: Confirmation = sent["work"]
        work = BulkWork(
            pk=uuid.UUID(confirmation.id),
            action=action.name,
            by=username(request),
            user_id=str(request.user.pk),
            note=sent["note"],
            answer=form.answer(),
            log_message=noted(action.logged.format(told=sent.get("told")), sent["note"]),
            log_flag=action.flag,
            expected=confirmation.expected,
            unchanged=confirmation.unchanged,
        )
        chosen = action.chosen(rows, confirmation.read_at)
        _bulk_work.begin(work, chosen.using(router.db_for_write(self.model)))
        return work

    def _action(self, name: str) -> BulkAction:
        action = next((action for action in self.bulk if action.name == name), None)
        if action is None:
            raise Http404
        return action

    def _context(self, request: HttpRequest, action: BulkAction) -> dict[str, Any]:
        back = _with_filters(self.page_url("changelist"), request)
        return {"title": action.label, "action": action, "back": back}

    def _matching(self, request: HttpRequest, ids: str | None) -> QuerySet[Any]:
        """Return the rows with these ids; without ids, the rows that the filters and the search of
        the query select."""
        if ids:
            pk: Any = self.opts.pk
            try:
                return self.get_queryset(request).filter(
                    pk__in=[pk.clean(one, None) for one in ids.split(",")]
                )
            except ValidationError as error:
                raise Http404 from error
        found: QuerySet[Any] = admin.ModelAdmin.get_changelist_instance(self, request).queryset
        return found


def _with_filters(url: str, request: HttpRequest) -> str:
    """Return a URL with the filters of the list, without the ids of chosen rows."""
    query = request.GET.copy()
    query.pop(IDS, None)
    return f"{url}?{query.urlencode()}" if query else url


def _ask(action: str, model_admin: BulkAdmin, request: HttpRequest, chosen: Any) -> HttpResponse:
    """Redirect from the list to the confirmation, with the filters of the list. The URL also
    contains the ids of the chosen rows, unless all matching rows were chosen."""
    query = request.GET.copy()
    query.pop(PAGE_VAR, None)  # Changed rows may leave the list, so its last pages may disappear.
    if request.POST.get("select_across") != "1":
        query[IDS] = ",".join(request.POST.getlist(ACTION_CHECKBOX_NAME)).replace("-", "")
    return HttpResponseRedirect(f"{model_admin.page_url('bulk', action)}?{query.urlencode()}")


def _question(action: BulkAction, rows: QuerySet[Any], ids: str | None) -> dict[str, Any]:
    """Return the data for the confirmation. All matching rows are counted."""
    first = action.concerned(rows).order_by(action.column, "pk").first()  # has the time
    groups: Counter[Group] = Counter()
    unchanged: Counter[str] = Counter()
    for row, number in action.kinds(rows):
        groups[action.group(row)] += number
        unchanged[action.why_not(row)] += number
    expected, eligible = unchanged.total(), unchanged.pop("", 0)
    as_of = first.read_at.isoformat() if first is not None else ""
    sample = action.eligible(rows).order_by(action.column, "pk")[:MAX_SAMPLE]
    return {
        "groups": groups.most_common(),
        "eligible": Grouped(eligible),
        "sample": list(sample) if action.sample_template else [],
        "others": len(ids.split(",")) - expected if ids else 0,
        "work": Confirmation(as_of, expected, dict(unchanged)),
    }
