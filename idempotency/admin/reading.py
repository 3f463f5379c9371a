"""What all pages share: rows that the machine writes and a person reads, on tables with millions of them."""

import json
from contextlib import suppress
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.contrib.admin.views.main import PAGE_VAR
from django.contrib.auth import get_permission_codename
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch, reverse
from django.utils.functional import cached_property
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from idempotency._request.redaction import REDACTED
from idempotency._text import summary
from idempotency.admin.refusals import refused

#: A page counts at most so many rows; the further ones are found by a filter or the search.
MAX_COUNT = 5000
#: The pages of a list end here: a page is found by passing over the rows of those before it.
MAX_DEPTH = 100_000
MAX_SHOWN_CHARACTERS = 20_000
_ENCODED_REDACTED = "%5Bredacted%5D"


class AtLeast(int):
    """A number of rows behind which there are more; pages write it as ``5000+``."""

    def __str__(self) -> str:
        return f"{int(self)}+"

    __html__ = __str__


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """A paginator that counts to MAX_COUNT rows: counting a million takes longer than showing fifty.

    Behind the last page that it counts there may be more. Each of the later pages counts MAX_COUNT rows further, up to
    MAX_DEPTH; filters and the search reach the rows behind that.
    """

    page_number = 1

    @cached_property
    def count(self) -> int:
        """Return how many rows there are, or AtLeast how many."""
        rows = self.object_list
        if not isinstance(rows, QuerySet):
            return len(rows)
        passed = (self.page_number - 1) * self.per_page
        limit = min((2 + passed // MAX_COUNT) * MAX_COUNT if passed else MAX_COUNT, MAX_DEPTH)
        counted = rows.order_by()[: limit + 1].count()
        return AtLeast(limit) if counted > limit else counted


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # generic in the stubs alone
    """Rows that nobody adds, changes or deletes by hand."""

    actions: Any = None
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # they count the whole table, once for each choice of a filter
    sortable_by: ClassVar[Any] = ()
    list_per_page = 50
    list_max_show_all = 100  # The ids of all fit into the address of a question.

    class Media:
        css = {"all": ["idempotency/admin.css"]}

    def has_add_permission(self, request: HttpRequest, *args: Any) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def get_paginator(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Return a paginator that counts beyond the page of ``request``."""
        paginator: Any = super().get_paginator(request, *args, **kwargs)
        with suppress(ValueError):
            paginator.page_number = max(1, int(request.GET.get(PAGE_VAR, 1)))
        return paginator

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Allow the filters of the page alone: any other lookup may read the whole table, or be refused by the database."""
        return lookup in {getattr(chosen, "parameter_name", None) for chosen in self.list_filter}

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, or who may see it."""
        if not self.has_view_permission(request):
            return refused(self, request)
        return super().changelist_view(request, extra_context)

    def change_view(self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show a row, or who may see it."""
        if not self.has_view_permission(request):
            return refused(self, request)
        return super().change_view(request, object_id, *args, **kwargs)

    def holds(self, request: HttpRequest, permission: str) -> bool:
        """Tell whether the person has one of this app's own permissions, and may see what it is about."""
        return self.has_view_permission(request) and request.user.has_perm(f"{self.opts.app_label}.{permission}")

    @admin.display(description=_("last error"))
    def last_error_line(self, row: Any) -> str:
        return first_line_of(row.last_error)


def first_line_of(text: str) -> str:
    """Return the beginning of ``text``, fit for a cell of a table."""
    return summary(text, 100) if text else ""


def pretty(value: Any) -> str:
    """Return a JSON value with its lines indented; text as it is."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False)
    except RecursionError:
        # From Python 3.12 on it reads deeper than it indents.
        return json.dumps(value, ensure_ascii=False)


def preformatted(text: str) -> SafeString:
    """Return ``text`` with its line breaks, what was redacted masked, and not endless."""
    shown = text
    if len(text) > MAX_SHOWN_CHARACTERS:
        length = ngettext("(%(count)s character)", "(%(count)s characters)", len(text)) % {"count": len(text)}
        shown = f"{text[:MAX_SHOWN_CHARACTERS]}\n… {length}"
    return format_html('<pre class="idem-text">{}</pre>', masked(shown))


def masked(text: str) -> SafeString:
    """Return ``text`` escaped, with a mark where a value was redacted."""
    # JSON may hold a lone surrogate, which no page can.
    escaped = str(escape(text.encode("utf-8", "replace").decode()))
    title, word = gettext("not kept: see redact="), gettext("redacted")
    mask = str(format_html('<mark class="idem-redacted" title="{}">{}</mark>', title, word))
    return mark_safe(escaped.replace(REDACTED, mask).replace(_ENCODED_REDACTED, mask))  # nosec B308, B703  # both are escaped above


def may_view(site: AdminSite, request: HttpRequest, model: type[Model]) -> bool:
    """Return whether the person may view the rows of a model, also if the admin does not show them to anybody."""
    if (row_admin := site._registry.get(model)) is not None:
        return bool(row_admin.has_view_permission(request))
    return request.user.has_perm(f"{model._meta.app_label}.{get_permission_codename('view', model._meta)}")


def admin_url(site: AdminSite, request: HttpRequest, model: type[Model], pk: Any) -> str:
    """Return where the admin shows a row; "" if it does not, or not to this person."""
    if model not in site._registry or not may_view(site, request, model):
        return ""
    try:
        return reverse(f"{site.name}:{model._meta.app_label}_{model._meta.model_name}_change", args=(pk,))
    except NoReverseMatch:
        return ""
