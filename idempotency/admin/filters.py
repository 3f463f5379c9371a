"""The filters of the lists: by state, by age, and by values that a link or a form sets."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple, cast

from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.db.models import F, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.functional import Promise, lazy
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from idempotency._states import KeyState
from idempotency.admin.bodies import VIEWED
from idempotency.admin.error_groups import in_error_group, in_key_groups
from idempotency.admin.stuck_codes import STUCK_CODES
from idempotency.models import FINISHED, IdempotencyKey
from idempotency.monitoring.measures import NOT_FOR_REVIEW, SPANS

#: A filter or search without an index reads at most this many rows, the newest ones.
NEWEST = 20_000
#: A filter of messages or calls reads at most this many rows, the oldest ones.
MAX_GROUPED = 5000
#: The filter *Mine* reads at most this many entries of the admin log. For many more keys,
#: PostgreSQL would search the whole table in the order of the list.
MAX_MINE = 1000
_BIGGEST_ID = 2**63 - 1
#: Choices of the filter by state that are not a state: all unfinished keys, the stuck keys that
#: need manual review, and the keys that the completer would run now.
UNFINISHED, FOR_REVIEW, DUE = "unfinished", "for_review", "due"
#: The name of the attribute of a bulk request with the time of its confirmation. AgeFilter computes
#: ages at this time.
AS_OF = "idempotency_as_of"


def of_the_newest(text: Any, **values: Any) -> Any:
    """Return a lazy text with NEWEST for ``{count}``, in the number format of the person's
    language, and with ``values``."""
    return format_lazy(text, count=lazy(number_format, str)(NEWEST, force_grouping=True), **values)


class Age(NamedTuple):
    """A span of ages, in seconds."""

    name: str
    label: str | Promise
    begin: int
    end: int


#: The spans of ``measures.SPANS``.
AGES = tuple(
    Age(name, label, begin, end)
    for (name, label), begin, end in zip(
        (
            ("minutes", _("under 5 minutes")),
            ("hour", _("5 minutes to an hour")),
            ("day", _("an hour to a day")),
            ("older", _("over a day")),
        ),
        SPANS,
        (*SPANS[1:], 100 * 365 * 86400),
        strict=True,
    )
)


def newest(rows: QuerySet[Any], count: int, by: str = "created_at") -> QuerySet[Any]:
    """Return those of ``rows`` that are among the ``count`` newest rows of their table, by an
    indexed column."""
    table = rows.model._base_manager.using(rows.db).order_by(f"-{by}")
    border = table.values_list(by, flat=True)[count : count + 1].first()
    return rows if border is None else rows.filter(**{f"{by}__gt": border})


def row_id(term: str) -> int | None:
    """Return ``term`` as the id of a row; None if it is not a possible id."""
    is_short = term.isdecimal() and len(term) <= len(str(_BIGGEST_ID))
    return int(term) if is_short and int(term) <= _BIGGEST_ID else None


class StateFilter(admin.SimpleListFilter):
    """The states of a key, and the keys that the findings of the dashboard count."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [
            *((state.replace(" ", "_"), state.label) for state in KeyState),
            (UNFINISHED, _("unfinished")),
            (FOR_REVIEW, _("needs manual review")),
            (DUE, _("due for the completer")),
        ]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() == UNFINISHED:
            return queryset.unfinished()
        if self.value() == FOR_REVIEW:
            return queryset.stuck().exclude(stuck_code__in=NOT_FOR_REVIEW)
        if self.value() == DUE:
            return queryset.abandoned()
        chosen = [state for state in KeyState if state.replace(" ", "_") == self.value()]
        return queryset.in_state(*chosen) if chosen else queryset


class AgeFilter(admin.SimpleListFilter):
    """Spans of age, by a column with an index."""

    title = _("age")
    parameter_name = "age"
    column = "created_at"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(age.name, age.label) for age in AGES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        now = getattr(request, AS_OF, None) or Now()
        for age in AGES:
            if age.name == self.value():
                youngest, oldest = (
                    now - timedelta(seconds=seconds) for seconds in (age.begin, age.end)
                )
                return queryset.filter(
                    **{f"{self.column}__lte": youngest, f"{self.column}__gt": oldest}
                )
        return queryset


class ChosenFilter(admin.SimpleListFilter):
    """A value from a link. The choices are ``known`` and this value: the distinct values of a large
    table are not read."""

    known: Iterable[str] = ()

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        names = dict.fromkeys(self.known)
        if chosen := request.GET.get(self.parameter_name or ""):
            names[chosen] = None
        return [(name, name) for name in names]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        if value and "\0" in value:
            return queryset.none()  # PostgreSQL rejects NUL.
        return self.chosen(queryset, value) if value else queryset

    def chosen(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Return those of ``rows`` that have the value."""
        return rows.filter(**{self.parameter_name or "": value})


class StuckCodeFilter(ChosenFilter):
    title = _("stuck because")
    parameter_name = "stuck_code"
    known = STUCK_CODES

    def chosen(self, rows: Any, value: str) -> QuerySet[Any]:
        # A finished key has no code, so the index of unfinished keys can be used.
        stuck: QuerySet[Any] = rows.unfinished().filter(stuck_code=value)
        return stuck


class RecoveryPointFilter(ChosenFilter):
    """The recovery point of a key. Only unfinished keys are searched, because they have an index.
    All keys are searched for the point ``finished``, and if the filter by state selects refused
    keys."""

    title = _("recovery point")
    parameter_name = "recovery_point"

    def queryset(self, request: HttpRequest, queryset: Any) -> QuerySet[Any]:
        among_all = (
            self.value() in (None, "", FINISHED) or request.GET.get("state") == KeyState.REFUSED
        )
        return super().queryset(request, queryset if among_all else queryset.unfinished())


class StatusFilter(ChosenFilter):
    """The status of the stored response, of the newest keys."""

    title = of_the_newest(_("status, of the {count} newest"))
    parameter_name = "status"
    known = ("2xx", "3xx", "4xx", "5xx")

    def chosen(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        if value in self.known:
            begin = int(value[0]) * 100
            return newest(rows.filter(response_code__range=(begin, begin + 99)), NEWEST)
        if not (value.isascii() and value.isdecimal() and len(value) == 3):
            return rows.none()
        return newest(rows.filter(response_code=int(value)), NEWEST)


class RequestGroupFilter(ChosenFilter):
    """The group of the request (``error_groups.request_group``). ErrorGroupFilter applies it,
    because one query finds both groups."""

    title = _("request")
    parameter_name = "request_group"

    def chosen(self, rows: Any, value: str) -> Any:
        return rows


class ErrorGroupFilter(ChosenFilter):
    """The groups of the error (``error_groups.group_of``) and of the request of unfinished keys."""

    title = _("error")
    parameter_name = "error_group"

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        error, place = self.value() or "", request.GET.get(RequestGroupFilter.parameter_name, "")
        if "\0" in error + place:
            return queryset.none()
        return in_key_groups(queryset.unfinished(), error, place) if error or place else queryset


class JobErrorGroupFilter(ChosenFilter):
    """The group of the error of failed jobs."""

    title = _("error")
    parameter_name = "error_group"

    def chosen(self, rows: Any, value: str) -> Any:
        return in_error_group(rows.filter(failed_at__isnull=False), F("last_error"), value)


class MineFilter(admin.SimpleListFilter):
    """The keys that the person completed, answered, acknowledged, handed back or released,
    according to the person's newest MAX_MINE entries in the admin log."""

    title = _("acted on by")
    parameter_name = "mine"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("1", _("me"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.value() != "1":
            return queryset
        entries: Any = LogEntry.objects.filter(
            user_id=cast(int, request.user.pk),
            content_type=get_content_type_for_model(IdempotencyKey),
        ).exclude(change_message__startswith=VIEWED)
        ids = entries.order_by("-pk").values_list("object_id", flat=True)[:MAX_MINE]
        return queryset.filter(pk__in={int(pk) for pk in ids})


def selects_unfinished(request: HttpRequest) -> bool:
    """Return whether the filter by state selects only unfinished keys, which have an index."""
    chosen = (request.GET.get("state") or "").replace("_", " ")
    others = {KeyState.FINISHED, KeyState.REFUSED}
    return chosen in {UNFINISHED, FOR_REVIEW, DUE, *KeyState} - others
