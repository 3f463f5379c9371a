"""The filters of the lists: by state, age, and values that a link has chosen."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from idempotency._states import KeyState, ago
from idempotency.admin.stuck_codes import STUCK_CODES


class Age(NamedTuple):
    """A span of ages, in seconds."""

    name: str
    label: str
    begin: int
    end: int


AGES = (
    Age("minutes", "under 5 minutes", 0, 300),
    Age("hour", "5 minutes to an hour", 300, 3600),
    Age("day", "an hour to a day", 3600, 86400),
    Age("older", "over a day", 86400, 100 * 365 * 86400),
)


class StateFilter(admin.SimpleListFilter):
    """The states of a key, and all that are unfinished."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name.replace(" ", "_"), name) for name in (*KeyState, "unfinished")]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() == "unfinished":
            return queryset.unfinished()
        chosen = [state for state in KeyState if state.replace(" ", "_") == self.value()]
        return queryset.in_state(*chosen) if chosen else queryset


class AgeFilter(admin.SimpleListFilter):
    """Spans of age, by a column with an index."""

    title = "age"
    parameter_name = "age"
    column = "created_at"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(age.name, age.label) for age in AGES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        for age in AGES:
            if age.name == self.value():
                return queryset.filter(**{f"{self.column}__lte": ago(age.begin), f"{self.column}__gt": ago(age.end)})
        return queryset


class ChosenFilter(admin.SimpleListFilter):
    """A value that a link has chosen: the distinct values of a large table are never looked up."""

    known: Iterable[str] = ()

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        names = dict.fromkeys(self.known)
        if chosen := request.GET.get(self.parameter_name or ""):
            names[chosen] = None
        return [(name, name) for name in names]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        if value and "\0" in value:
            return queryset.none()  # PostgreSQL takes no NUL.
        return queryset.filter(**{self.parameter_name or "": value}) if value else queryset


class StuckCodeFilter(ChosenFilter):
    """Why a key is stuck."""

    title = "stuck because"
    parameter_name = "stuck_code"
    known = STUCK_CODES


class RecoveryPointFilter(ChosenFilter):
    """Where a key stands."""

    title = "recovery point"
    parameter_name = "recovery_point"
