"""The state of a key in the words of the glossary, what comes next, and the filters by state, age and reason."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils import timezone
from django.utils.timesince import timeuntil

from idempotency import conf
from idempotency.abandonment import on_abandon_of
from idempotency.admin.codes import STUCK_CODES
from idempotency.models import REFUSED_WHEN_REBUILT, UNKNOWN_RECOVERY_POINT, IdempotencyKey, IdempotencyKeyQuerySet

STATES = ("stuck", "acknowledged", "abandoned", "waiting for a retry", "in flight", "refused", "finished")


@dataclass(frozen=True, slots=True)
class Age:
    """A span of ages, in seconds."""

    name: str
    label: str
    from_seconds: int
    to_seconds: int

    def of(self, seconds: float) -> bool:
        """Tell whether an age is in the span."""
        return self.from_seconds <= seconds < self.to_seconds


_ENDLESS = 100 * 365 * 86400
AGES = (
    Age("minutes", "under 5 minutes", 0, 300),
    Age("hour", "5 minutes to an hour", 300, 3600),
    Age("day", "an hour to a day", 3600, 86400),
    Age("older", "over a day", 86400, _ENDLESS),
)


def state_of(key: IdempotencyKey, now: datetime) -> str:
    """Return the state of ``key``; ``now`` is the time of the database."""
    if key.finished_at is not None:
        return "finished"
    if key.locked_at is not None and now <= _lock_ends(key):
        return "in flight"
    if key.refused:
        return "refused"
    if key.stuck_at is not None:
        seen = key.acknowledged_at is not None and key.acknowledged_at >= key.stuck_at
        return "acknowledged" if seen else "stuck"
    return "abandoned" if _completer_due(key) <= now else "waiting for a retry"


def next_step(key: IdempotencyKey, now: datetime, *, has_view: bool) -> str:
    """Return what the machine will do next with ``key``, and when, in a sentence or two."""
    limits = conf.get()
    number, limit = key.completer_attempts + 1, limits.COMPLETER_MAX_ATTEMPTS
    run = f"run {number} of {limit}"
    if number > limit:
        to_a_person = f"its {limit} runs are over: it hands the key to a person"
        run = f"run {number}, until on_abandon settles it" if on_abandon_of(key) else to_a_person
    lost = "" if has_view else " No protected view answers its path now: a run would mark it as stuck."
    match state_of(key, now):
        case "finished":
            expires = (key.finished_at or now) + timedelta(hours=limits.RETENTION_HOURS)
            if expires <= now:
                return "Its retention is over: the reaper deletes it, and a further request with this key runs anew."
            return f"Nothing: each retry of its client gets the stored response, until {_moment(expires, now)}."
        case "in flight":
            return (
                f"A run holds it. Should that run fall silent, its lock expires at {_moment(_lock_ends(key), now)}; then a "
                f"retry of its client goes on from its recovery point, or later the completer."
            )
        case "refused":
            expires = (key.refused_at or now) + timedelta(hours=limits.RETENTION_HOURS)
            return f"Nothing was begun. Only a retry of its client runs it; the reaper deletes it at {_moment(expires, now)}."
        case "stuck" if key.stuck_code == REFUSED_WHEN_REBUILT:
            return "The completer does not run it again. A retry of its client does."
        case "stuck" if key.stuck_code == UNKNOWN_RECOVERY_POINT:
            due = max(_completer_due(key), now)
            return f"Code that knows its recovery point goes on: with a retry, or the completer at {_moment(due, now)}."
        case "stuck":
            return "Nothing: it waits for a person. A retry of its client is answered 409 key_stuck, and changes nothing."
        case "acknowledged":
            return "Nothing: a person has taken it off the list, and it has no response. A retry is answered 409 key_stuck."
        case "abandoned":
            return f"The completer takes it in its next pass ({run}), if a retry of its client does not come first.{lost}"
    due = _completer_due(key)
    return f"A retry of its client goes on at once. Without one the completer takes it at {_moment(due, now)} ({run}).{lost}"


def _lock_ends(key: IdempotencyKey) -> datetime:
    return (key.locked_at or key.created_at) + timedelta(seconds=conf.get().LOCK_TIMEOUT_SECONDS)


def _completer_due(key: IdempotencyKey) -> datetime:
    """Return from when on the completer takes an unlocked key; the same rule as ``QuerySet.abandoned()``."""
    limits = conf.get()
    times = [
        key.created_at + timedelta(seconds=limits.COMPLETER_MIN_AGE_SECONDS),
        key.last_run_at + timedelta(seconds=limits.COMPLETER_IDLE_SECONDS),
    ]
    return max([*times, key.next_run_at] if key.next_run_at else times)


def _moment(at: datetime, now: datetime) -> str:
    local = timezone.localtime(at) if timezone.is_aware(at) else at
    distance = f"in {timeuntil(at, now, depth=1)}" if at > now else "now"
    return f"{local:%Y-%m-%d %H:%M:%S} ({distance})"


class StateFilter(admin.SimpleListFilter):
    """The states of a key, by the QuerySet method of the same name."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name.replace(" ", "_"), name) for name in (*STATES, "unfinished")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        keys = IdempotencyKeyQuerySet(IdempotencyKey, query=queryset.query, using=queryset.db)
        match self.value():
            case "stuck" | "acknowledged" | "abandoned" | "in_flight" | "refused" | "finished" | "unfinished" as name:
                chosen: QuerySet[Any] = getattr(keys, name)()
                return chosen
            case "waiting_for_a_retry":
                everybody = IdempotencyKeyQuerySet(IdempotencyKey, using=queryset.db)
                return keys.unlocked().filter(stuck_at__isnull=True).exclude(pk__in=everybody.abandoned().values("pk"))
        return queryset


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
                older, younger = (Now() - timedelta(seconds=age.from_seconds)), Now() - timedelta(seconds=age.to_seconds)
                return queryset.filter(**{f"{self.column}__lte": older, f"{self.column}__gt": younger})
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
