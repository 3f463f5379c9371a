"""The search of the list of keys. Each kind of term is searched in a bounded number of rows, or in
an index.

No index begins with the value of the key, and another index would cost each request a write.
Therefore a prefix of a value is searched only among the unfinished keys and the newest keys. A
whole value is searched in the whole index of scopes and values: PostgreSQL before version 18, which
skips from scope to scope, reads all of that index. A scope and a value together need no more than
the entries of the index that they name.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

from django.contrib.admin import AdminSite
from django.contrib.auth import get_user_model
from django.core.exceptions import FieldError
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from idempotency._operations.definition import METHOD, find, registered
from idempotency.admin.belongings import linked_models
from idempotency.admin.bodies import may_view_bodies
from idempotency.admin.filters import NEWEST, newest, of_the_newest, row_id
from idempotency.admin.reading import viewable
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.scopes import PROJECT_PREFIX

MIN_PREFIX = 4
HELP = of_the_newest(
    _(
        "Search by: the idempotency key, or its scope and the key (user:7 KEY); its first {least}"
        " or more characters, if you may view bodies (unfinished keys and the {count} newest); the"
        " id of the row; the name of an operation; a scope such as user:7; a user name; the e-mail"
        " address of a user, if you may view users; the id of a staged job, if you may view jobs;"
        " the search fields of linked models (their {count} newest rows)."
    ),
    least=MIN_PREFIX,
)
#: The maximum number of keys that one query returns for a whole value, for a prefix, or for the
#: rows of a linked model.
MAX_FOUND = 200


def search(keys: QuerySet[Any], term: str, site: AdminSite, request: HttpRequest) -> QuerySet[Any]:
    """Return those of ``keys`` that ``term`` finds. The values of keys are case-sensitive, as they
    are for requests."""
    if "\0" in term:
        return keys.none()  # PostgreSQL rejects NUL.
    every: Any = IdempotencyKey.objects.using(keys.db)
    scope, _, value = term.partition(" ")
    named = every.filter(scope__in=_scopes([scope]), idempotency_key=value)
    if value and (found_by_both := list(named.values_list("pk", flat=True))):
        return keys.filter(pk__in=found_by_both)
    found: set[int | None] = {
        *every.filter(idempotency_key=term).values_list("pk", flat=True)[:MAX_FOUND]
    }
    if not found and len(term) >= MIN_PREFIX and may_view_bodies(request):
        found.update(_by_prefix(every, term))
    found.add(row_id(term))
    if (jobs := viewable(site, request, StagedJob)) is not None:
        with suppress(ValueError):
            of_this_id = jobs.using(keys.db).filter(pk=UUID(term))
            found.update(of_this_id.values_list("idempotency_key_id", flat=True))
    found.update(_by_linked_rows(term, site, request, keys.db))
    if find(term) is not None:
        of_operation = every.filter(request_method=METHOD, request_path=term)
        rows = newest(of_operation.order_by("-created_at"), NEWEST)
        found.update(rows.values_list("pk", flat=True)[:MAX_FOUND])
    scopes = _scopes([term, *(f"user:{pk}" for pk in _users(term, site, request))])
    return keys.filter(Q(pk__in=found - {None}) | Q(scope__in=scopes))


def _scopes(names: list[str]) -> list[str]:
    """Return these scopes, those that a function of the project returns under these names, and
    those of operations in all of them."""
    scopes = [*names, *(PROJECT_PREFIX + name for name in names)]
    return scopes + [f"{operation.name}:{scope}" for operation in registered() for scope in scopes]


def _by_prefix(keys: Any, term: str) -> Iterator[int]:
    beginning = (
        keys.filter(idempotency_key__startswith=term)
        .order_by("-created_at")
        .values_list("pk", "idempotency_key")
    )
    for pk, key in (*beginning.unfinished()[:MAX_FOUND], *newest(beginning, NEWEST)[:MAX_FOUND]):
        if key.startswith(term):  # The LIKE of SQLite ignores case.
            yield pk


def _users(term: str, site: AdminSite, request: HttpRequest) -> list[Any]:
    """Return the ids of at most ten users with this name, which the list shows, and of ten users
    with this e-mail address, if the person may view these users. The keys are searched by the
    scopes of the users."""
    users: Any = get_user_model()
    named = [users._default_manager.filter(**{users.USERNAME_FIELD: term})]
    if "@" in term and (visible := viewable(site, request, users)) is not None:
        with suppress(AttributeError, FieldError):
            named.append(visible.filter(**{f"{users.get_email_field_name()}__iexact": term}))
    return [pk for found in named for pk in found.order_by().values_list("pk", flat=True)[:10]]


def _by_linked_rows(term: str, site: AdminSite, request: HttpRequest, using: str) -> Iterator[int]:
    """Yield the ids of the keys of linked rows. The linked model's admin searches those rows that
    the person may view."""
    for model, foreign_key, rows_at in linked_models(using):
        name = foreign_key.name
        row_admin = site._registry.get(model)
        if (
            row_admin is None
            or not row_admin.has_view_permission(request)
            or not row_admin.get_search_fields(request)
        ):
            continue
        with suppress(FieldError, ValueError):
            rows = newest(
                row_admin.get_queryset(request).using(rows_at).exclude(**{name: None}),
                NEWEST,
                by="pk",
            )
            rows, _ = row_admin.get_search_results(request, rows, term)
            yield from rows.order_by().values_list(name, flat=True)[:MAX_FOUND]
