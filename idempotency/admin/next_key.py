"""The next key of a list, so that a person decides about one key after the other."""

from typing import Any
from urllib.parse import urlencode

from django.contrib.admin import AdminSite
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse

#: The query parameter with the filters of the list from which a person came, as in Django's admin.
CHANGELIST_FILTERS = "_changelist_filters"
#: The query parameter with the key before the next one.
AFTER = "after"


def list_filters(request: HttpRequest) -> dict[str, str]:
    """Return the query parameter with the filters of the list from which the person came, if there
    is one."""
    query = request.GET
    return {CHANGELIST_FILTERS: query[CHANGELIST_FILTERS]} if CHANGELIST_FILTERS in query else {}


def next_url(site: AdminSite, request: HttpRequest, pk: int) -> str:
    """Return the URL that leads to the key behind the key ``pk`` in the list from which the person
    came; "" if the person came from elsewhere."""
    if CHANGELIST_FILTERS not in request.GET:
        return ""
    query = f"{request.GET[CHANGELIST_FILTERS]}&{urlencode({AFTER: pk})}"
    return f"{reverse(f'{site.name}:idempotency_next')}?{query}"


def key_behind(keys: QuerySet[Any], after: int) -> int | None:
    """Return the pk of the key behind ``after`` in the order of a list, by age. The key ``after``
    may have left the list. Return the first key of the list if the key ``after`` does not exist."""
    newest_first = str(keys.query.order_by[0]).startswith("-")
    sign, side = ("-", "l") if newest_first else ("", "g")
    keys = keys.order_by(f"{sign}created_at", f"{sign}pk")
    place = keys.model._base_manager.using(keys.db).filter(pk=after).values_list("created_at")
    if (row := place.first()) is not None:
        before = Q(created_at=row[0]) & ~Q(**{f"pk__{side}t": after})
        keys = keys.filter(**{f"created_at__{side}te": row[0]}).exclude(before)
    found: int | None = keys.values_list("pk", flat=True).first()
    return found
