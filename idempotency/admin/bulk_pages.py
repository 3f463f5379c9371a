"""The pages of an action on many rows: the confirmation, and the progress after each chunk.

The form of the page contains the signed work. Each POST of the form processes one chunk. A script
submits the form; without JavaScript the person presses its button.
"""

from collections import Counter
from functools import partial
from typing import Any, ClassVar, cast

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR
from django.core import signing
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.functional import Promise
from django.utils.translation import gettext

from idempotency._http.atomic_requests import EVERY_ALIAS
from idempotency.admin.actions import note_field, noted, username
from idempotency.admin.bodies import log_looks, may_view_bodies
from idempotency.admin.bulk import BulkAction, Group, Work, in_order, work_on
from idempotency.admin.filters import AS_OF
from idempotency.admin.reading import ReadOnlyAdmin
from idempotency.admin.refusals import refused

#: The query parameter with the ids of chosen rows. Without it, the action applies to all rows that
#: the filters select.
IDS = "ids"
#: The maximum number of single rows that a confirmation shows.
MAX_SAMPLE = 20


class BulkForm(forms.Form):
    """The form of the confirmation and of the progress page."""

    note = note_field()
    work = forms.CharField(widget=forms.HiddenInput)

    def __init__(self, action: BulkAction, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.action = action

    def clean_work(self) -> Work:
        """Return the work; raise ValidationError if this site has not signed it."""
        try:
            return Work.of(self.cleaned_data["work"], self.action)
        except signing.BadSignature:
            raise ValidationError(gettext("This page was out of date. Nothing was done.")) from None


class BulkAdmin(ReadOnlyAdmin):
    """A list with actions. Each action asks for a confirmation, and applies to all matching rows or
    to the chosen ones."""

    bulk: ClassVar[tuple[BulkAction, ...]] = ()
    actions = ()

    def get_urls(self) -> list[URLPattern]:
        """Add the pages of the actions."""
        name = f"idempotency_{self.opts.model_name}_bulk"
        return [
            path("bulk/<slug:name>/", self.admin_site.admin_view(self.bulk_view), name=name),
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

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
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
        view = f"{self.admin_site.name}:idempotency_{self.opts.model_name}_bulk"
        return f"{reverse(view, args=(action.name,))}?{IDS}={ids}"

    def bulk_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """Show the confirmation for all rows that match the query. Each confirmed POST processes
        one chunk of the rows."""
        action = next((action for action in self.bulk if action.name == name), None)
        if action is None:
            raise Http404
        if not self.holds(request, action.permission):
            return refused(self, request, action.permission)
        ids = request.GET.get(IDS)
        back = self._list_url(request)
        form = BulkForm(action, request.POST or None)
        confirmed = request.method == "POST" and form.is_valid()
        if confirmed:
            setattr(request, AS_OF, form.cleaned_data["work"].read_at)
        try:
            rows = self._matching(request, ids)
        except IncorrectLookupParameters:
            return HttpResponseRedirect(self._list_url())
        context: dict[str, Any] = {
            "title": action.label,
            "opts": self.opts,
            "action": action,
            "back": back,
        }
        if confirmed:
            work, note = form.cleaned_data["work"], form.cleaned_data["note"]
            if self._is_last_chunk(request, action, rows, work, note):
                level = messages.SUCCESS if work.done >= work.expected else messages.WARNING
                self.message_user(request, work.report(action), level)
                return HttpResponseRedirect(back)
            context |= {
                "work": work,
                "report": work.progress(action),
                "form": BulkForm(action, initial={"work": work.signed(action), "note": note}),
            }
            return self._page(request, "progress", context)
        question = _question(action, rows, ids)
        initial = {"work": question["work"].signed(action), "note": request.POST.get("note")}
        context |= question | {"form": BulkForm(action, initial=initial), "errors": form.errors}
        context["with_bodies"] = bool(action.sample_template) and may_view_bodies(request)
        if context["with_bodies"]:
            log_looks(request, question["sample"])
        return self._page(request, "question", context)

    # The change of each row commits separately, so that a later error does not undo it.
    bulk_view._non_atomic_requests = EVERY_ALIAS  # type: ignore[attr-defined]

    def _is_last_chunk(
        self, request: HttpRequest, action: BulkAction, rows: QuerySet[Any], work: Work, note: str
    ) -> bool:
        changed: list[Any] = []
        try:
            return work_on(action, rows, work, changed, by=username(request), note=note)
        finally:
            if changed:
                person = cast(int, request.user.pk)
                LogEntry.objects.log_actions(
                    person, changed, action.flag, noted(action.logged, note)
                )

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

    def _list_url(self, request: HttpRequest | None = None) -> str:
        """Return the URL of the list, with the filters of ``request``."""
        url = reverse(f"{self.admin_site.name}:idempotency_{self.opts.model_name}_changelist")
        query = request.GET.copy() if request else None
        if query:
            query.pop(IDS, None)
        return f"{url}?{query.urlencode()}" if query else url

    def _page(self, request: HttpRequest, name: str, context: dict[str, Any]) -> HttpResponse:
        shared = self.admin_site.each_context(request) | {"media": self.media}
        return TemplateResponse(request, f"admin/idempotency/bulk_{name}.html", shared | context)


def _ask(action: str, model_admin: BulkAdmin, request: HttpRequest, chosen: Any) -> HttpResponse:
    """Redirect from the list to the confirmation, with the filters of the list. The URL also
    contains the ids of the chosen rows, unless all matching rows were chosen."""
    query = request.GET.copy()
    query.pop(PAGE_VAR, None)  # Changed rows may leave the list, so its last pages may disappear.
    if request.POST.get("select_across") != "1":
        query[IDS] = ",".join(request.POST.getlist(ACTION_CHECKBOX_NAME)).replace("-", "")
    url = reverse(
        f"{model_admin.admin_site.name}:idempotency_{model_admin.opts.model_name}_bulk",
        args=(action,),
    )
    return HttpResponseRedirect(f"{url}?{query.urlencode()}")


def _question(action: BulkAction, rows: QuerySet[Any], ids: str | None) -> dict[str, Any]:
    """Return the data for the confirmation, and the work before its first chunk. All matching rows
    are counted."""
    ordered = in_order(action, rows)
    sample, last = list(ordered[:MAX_SAMPLE]), ordered.reverse()[:1]
    groups: Counter[Group] = Counter()
    eligible = expected = 0
    for row, number in action.kinds(rows):
        groups[action.group(row)] += number
        expected += number
        eligible += 0 if action.why_not(row) else number
    as_of = sample[0].read_at.isoformat() if sample else ""
    until = next(((row.place, str(row.pk)) for row in last), None)
    return {
        "groups": groups.most_common(),
        "eligible": eligible,
        "sample": [row for row in sample if not action.why_not(row)],
        "others": len(ids.split(",")) - expected if ids else 0,
        "work": Work(as_of, expected, until=until),
    }
