"""The filters of the lists that a person fills in: a text, and a range of times."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django.conf import settings
from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.formats import date_format
from django.utils.translation import gettext_lazy as _

from idempotency.admin import filters
from idempotency.admin.filters import ChosenFilter, newest, of_the_newest, selects_unfinished

#: The query parameters of a range of creation times: from the first one, before the second one.
FROM, TO = "created_from", "created_to"
#: The days for which the list has links, as many as a key is usually kept and some more.
DAYS = 7
_DAY, _HOUR, _STEP = timedelta(days=1), timedelta(hours=1), timedelta(minutes=5)


class TextFilter(ChosenFilter):
    """A text that a person writes into a field."""

    template = "admin/idempotency/text_filter.html"
    example = ""
    help: ClassVar[Any] = ""

    def has_output(self) -> bool:
        return True

    def choices(self, changelist: Any) -> Any:
        """Yield the data for the form of the filter: its value, the other parameters of the list,
        and the help text."""
        name = self.parameter_name
        form = {"name": name, "value": self.value() or "", "help": self.help}
        yield form | {"example": self.example, "others": others(changelist, name)}


def others(changelist: Any, *names: Any) -> list[tuple[str, str]]:
    """Return the parameters of the list that the form of a filter with these names must send
    too."""
    return [(name, value) for name, value in changelist.params.items() if name not in names]


class PathFilter(TextFilter):
    """The beginning of a request's path, among the newest keys. With a filter by an unfinished
    state, which has an index, all keys in that state are searched."""

    title = _("path")
    parameter_name = "path"
    example = "/rides"
    help = of_the_newest(
        _(
            "Searches the {count} newest keys, or all unfinished keys if you filter by an"
            " unfinished state."
        )
    )

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = super().queryset(request, queryset)
        return (
            chosen
            if not self.value() or selects_unfinished(request)
            else newest(chosen, filters.NEWEST)
        )

    def chosen(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        return rows.filter(request_path__startswith=value)


class CreatedFilter(admin.ListFilter):
    """A range of creation times, as a form, and as links to a day, its hours, and the steps of an
    hour. The links need no query."""

    title = _("creation time")
    parameter_names = (FROM, TO)
    template = "admin/idempotency/range_filter.html"

    def __init__(self, request: HttpRequest, params: Any, model: Any, model_admin: Any) -> None:
        super().__init__(request, params, model, model_admin)
        sent = [params.pop(name, None) and request.GET[name] for name in self.parameter_names]
        self.begin, self.end = (_time(text) for text in sent)

    def has_output(self) -> bool:
        return True

    def expected_parameters(self) -> list[str | None]:
        return list(self.parameter_names)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        for lookup, at in (("gte", self.begin), ("lt", self.end)):
            if at is not None:
                zone = timezone.get_default_timezone()
                value = at if settings.USE_TZ else timezone.make_naive(at, zone)
                queryset = queryset.filter(**{f"created_at__{lookup}": value})
        return queryset

    def choices(self, changelist: Any) -> Any:
        """Yield the data for the form and the links of the filter."""
        times = {FROM: self.begin, TO: self.end}
        yield {
            "others": others(changelist, *self.parameter_names),
            "fields": [
                (name, label, at and f"{timezone.localtime(at):%Y-%m-%dT%H:%M}")
                for (name, at), label in zip(times.items(), (_("from"), _("before")), strict=True)
            ],
            "zone": timezone.localtime(datetime.now(UTC)).tzname(),
            "all": changelist.get_query_string(remove=self.parameter_names),
            "links": [
                {
                    "label": label,
                    "url": changelist.get_query_string(range_query(begin, end)),
                    "chosen": times == {FROM: begin, TO: end},
                }
                for label, begin, end in self._links()
            ],
        }

    def _links(self) -> Iterator[tuple[str, datetime, datetime]]:
        """Yield the label, begin and end of each link: the days, and below a chosen day its hours,
        and below an hour its steps."""
        now = timezone.localtime(datetime.now(UTC))
        for ago in range(DAYS):
            day = _midnight(now, -ago)
            yield date_format(day, "D, j N"), day, _midnight(day, 1)
        if self.begin is None or self.end is None:
            return
        begin, span = timezone.localtime(self.begin), self.end - self.begin
        if span <= _HOUR:
            yield from _parts(begin.replace(minute=0, second=0), _HOUR, _STEP)
        elif span <= _DAY + _HOUR:  # A day with a change of the clock has 25 hours.
            yield from _parts(begin, span, _HOUR)


def _midnight(day: datetime, later: int) -> datetime:
    """Return the midnight ``later`` days after that of ``day``, also over a change of the clock."""
    begin = datetime(day.year, day.month, day.day)  # made aware below
    return timezone.make_aware(begin + later * _DAY)


def _parts(
    begin: datetime, span: timedelta, step: timedelta
) -> Iterator[tuple[str, datetime, datetime]]:
    for number in range(-(-span // step)):
        at = begin.astimezone(UTC) + number * step
        yield f"{timezone.localtime(at):%H:%M}", at, at + step


def range_query(begin: datetime, end: datetime) -> dict[str, str]:
    """Return the query of the list of keys that were created in this range."""
    return {name: at.astimezone(UTC).isoformat() for name, at in ((FROM, begin), (TO, end))}


def _time(text: str | None) -> datetime | None:
    """Return a time of a query; None for an empty text."""
    if not text:
        return None
    try:
        if (at := parse_datetime(text)) is None:
            raise ValueError(text)
        at = timezone.make_aware(at) if timezone.is_naive(at) else at
        return at.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise IncorrectLookupParameters from error
