"""The base class of the lists and pages, for read-only rows in large tables, and functions that all
pages share."""

import json
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.contrib.admin.views.main import PAGE_VAR
from django.contrib.auth import get_permission_codename
from django.contrib.auth.models import Permission
from django.core.paginator import Paginator
from django.db.models import DateTimeField, Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, gettext_noop, ngettext
from django.utils.translation import gettext_lazy as _

from idempotency._text import Grouped, summary
from idempotency.templatetags.idempotency_admin import moment

#: The first page of a list and the confirmation of an action count at most this many rows.
MAX_COUNT = 5000
#: The pages of a list cover at most this many rows, because each page reads the rows of all pages
#: before it.
MAX_DEPTH = 20_000
MAX_SHOWN_CHARACTERS = 20_000
#: The maximum number of groups that the page about a missing permission names.
MAX_GROUPS = 20
#: Names of permissions that Django stores in English, and pages translate. The models have those of
#: the app's own permissions.
_STORED = (
    gettext_noop("Can view idempotency key"),
    gettext_noop("Can view staged job"),
    gettext_noop("Can view downstream call"),
    gettext_noop("Can view processed message"),
)


class AtLeast(Grouped):
    """A lower bound of the number of rows; pages show ``5,000+``."""

    def __str__(self) -> str:
        return f"{super().__str__()}+"

    __html__ = __str__


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """A paginator that counts a limited number of rows, because to count a million rows takes
    longer than to show fifty.

    The first page counts MAX_COUNT rows. A later page counts at least MAX_COUNT rows beyond the
    pages before it, up to MAX_DEPTH rows in all. Filters and the search reach the rows beyond
    MAX_DEPTH.
    """

    page_number = 1

    @cached_property
    def count(self) -> int:
        """Return the number of rows; an AtLeast if there are more than the limit."""
        rows = self.object_list
        if not isinstance(rows, QuerySet):
            return len(rows)
        passed = (self.page_number - 1) * self.per_page
        limit = min((2 + passed // MAX_COUNT) * MAX_COUNT if passed else MAX_COUNT, MAX_DEPTH)
        counted = rows.order_by()[: limit + 1].count()
        return AtLeast(limit) if counted > limit else Grouped(counted)


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # generic in the stubs alone
    """Rows that cannot be added, edited or deleted by hand."""

    actions: Any = None
    paginator = BoundedPaginator
    show_full_result_count = False
    # Facets count the whole table once for each choice of a filter.
    show_facets = admin.ShowFacets.NEVER
    sortable_by: ClassVar[Any] = ()
    list_per_page = 50
    list_max_show_all = 100  # The ids of all these rows fit into the URL of a confirmation.

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

    def get_list_display(self, request: HttpRequest) -> Any:
        """Return the columns. Times have seconds and a time zone."""
        return self._with_times(super().get_list_display(request))

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields of the page. Times have seconds and a time zone."""
        return self._with_times(super().get_fields(request, obj))

    def _with_times(self, names: Any) -> list[Any]:
        fields = {field.name: field for field in self.opts.fields}
        return [
            _time_column(fields[name]) if isinstance(fields.get(name), DateTimeField) else name
            for name in names
        ]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return the rows that ``found`` returns for the term; without a term, all rows."""
        return (self.found(request, queryset, search_term) if search_term else queryset), False

    def found(self, request: HttpRequest, rows: QuerySet[Any], term: str) -> QuerySet[Any]:
        """Return those of ``rows`` that the search finds."""
        raise NotImplementedError

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Return whether ``lookup`` is a filter of the list. Others could read the whole table, or
        fail in the database."""
        one = {getattr(chosen, "parameter_name", None) for chosen in self.list_filter}
        several = [getattr(chosen, "parameter_names", ()) for chosen in self.list_filter]
        return lookup in one.union(*several)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list; without the permission, show which permission is missing and which groups
        have it."""
        if not self.has_view_permission(request):
            return self.refused(request)
        return super().changelist_view(request, extra_context)

    def change_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show a row; without the permission, show which permission is missing and which groups
        have it."""
        if not self.has_view_permission(request):
            return self.refused(request)
        return super().change_view(request, *args, **kwargs)

    def holds(self, request: HttpRequest, permission: str) -> bool:
        """Return whether the person has this permission of the app, and may view the rows."""
        return self.has_view_permission(request) and request.user.has_perm(
            f"{self.opts.app_label}.{permission}"
        )

    def page_url(self, page: str, *args: Any) -> str:
        """Return the URL of a page about these rows, such as their ``changelist``."""
        name = f"{self.admin_site.name}:idempotency_{self.opts.model_name}_{page}"
        return reverse(name, args=args)

    def page(
        self, request: HttpRequest, template: str, context: dict[str, Any], status: int = 200
    ) -> HttpResponse:
        """Return a page of this app, in the frame of the admin."""
        shared = self.admin_site.each_context(request) | {"opts": self.opts, "media": self.media}
        template = f"admin/idempotency/{template}.html"
        return TemplateResponse(request, template, shared | context, status=status)

    def refused(self, request: HttpRequest, permission: str = "") -> HttpResponse:
        """Return a 403 that names the missing permission, and the groups that have it. The missing
        permission is that to view the rows if the person lacks it, or else ``permission``."""
        if not permission or not self.has_view_permission(request):
            permission = get_permission_codename("view", self.opts)
        label = self.opts.app_label
        every = Permission.objects.filter(content_type__app_label=label, codename=permission)
        found = every.first()
        names = found.group_set.order_by("name").values_list("name", flat=True) if found else ()
        context = {
            "title": gettext("Not allowed"),
            "permission": f"{label}.{permission}",
            "description": gettext(found.name) if found else "",
            "groups": list(names[:MAX_GROUPS]),
        }
        return self.page(request, "refused", context, status=403)

    def key_link(self, pk: int) -> str:
        """Return the id of a key, as a link to its page if this admin has one."""
        with suppress(NoReverseMatch):
            page = reverse(f"{self.admin_site.name}:idempotency_idempotencykey_change", args=(pk,))
            return format_html('<a href="{}">{}</a>', page, pk)
        return str(pk)

    @admin.display(description=_("last error"))
    def last_error_line(self, row: Any) -> str:
        return first_line_of(row.last_error)


def filter_link(text: str, **chosen: str) -> SafeString:
    """Return ``text`` as a link to the rows of the same list that these filters select."""
    return format_html('<a href="?{}">{}</a>', urlencode(chosen), text)


def _time_column(field: Any) -> Any:
    @admin.display(description=field.verbose_name, ordering=field.name)
    def shown(row: Any) -> str:
        return moment(getattr(row, field.name))

    shown.__name__ = field.name
    return shown


def first_line_of(text: str) -> str:
    """Return the first line of ``text``, at most 100 characters, for a cell of a table."""
    return summary(text, 100) if text else ""


def pretty(value: Any) -> str:
    """Return a JSON value as indented text; a text unchanged; "" for None."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False)
    except RecursionError:
        # Since Python 3.12, json.loads() accepts deeper nesting than json.dumps() with an indent.
        return json.dumps(value, ensure_ascii=False)


def preformatted(text: str) -> SafeString:
    """Return ``text`` with its line breaks, cut at MAX_SHOWN_CHARACTERS."""
    shown = text
    if len(text) > MAX_SHOWN_CHARACTERS:
        length = ngettext("(%(count)s character)", "(%(count)s characters)", len(text)) % {
            "count": len(text)
        }
        shown = f"{text[:MAX_SHOWN_CHARACTERS]}\n… {length}"
    return format_html('<pre class="idem-text">{}</pre>', encodable(shown))


def encodable(text: str) -> str:
    """Return ``text`` without lone surrogates, which JSON may contain and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def may_view(site: AdminSite, request: HttpRequest, model: type[Model]) -> bool:
    """Return whether the person may view the rows of a model, which need not be registered in the
    admin."""
    if (row_admin := site._registry.get(model)) is not None:
        return bool(row_admin.has_view_permission(request))
    return request.user.has_perm(
        f"{model._meta.app_label}.{get_permission_codename('view', model._meta)}"
    )


def viewable(site: AdminSite, request: HttpRequest, model: type[Model]) -> Any:
    """Return the rows of a model that the person may view, or None without the permission. If the
    model is registered in the admin, these are the rows that ``get_queryset`` of its admin
    returns."""
    if not may_view(site, request, model):
        return None
    row_admin = site._registry.get(model)
    return model._default_manager.all() if row_admin is None else row_admin.get_queryset(request)


def admin_url(site: AdminSite, request: HttpRequest, model: type[Model], pk: Any) -> str:
    """Return the URL of a row's page in the admin; "" if there is no such page, or if the person
    may not view the row."""
    if model not in site._registry or not may_view(site, request, model):
        return ""
    try:
        return reverse(
            f"{site.name}:{model._meta.app_label}_{model._meta.model_name}_change", args=(pk,)
        )
    except NoReverseMatch:
        return ""
