"""Line charts as SVG, drawn on the server, and the charts of the dashboard. The lines differ in
their dashes, so a chart is readable without colour."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any
from urllib.parse import urlencode

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.functional import Promise
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from idempotency._text import with_decimal_sign
from idempotency.admin import traffic
from idempotency.admin.form_filters import range_query

WIDTH, HEIGHT = 480, 120
_LEFT, _TOP, _BOTTOM = 44, 10, 18
_INNER_WIDTH, _INNER_HEIGHT = WIDTH - _LEFT, HEIGHT - _TOP - _BOTTOM
#: The dashes of the first, second and third line.
_DASHES = ("none", "6 4", "2 3")
_NUMBERS = attrgetter("requests", "replays", "conflicts", "errors", "p50", "p95")


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time that the charts show: the number of ``intervals``, and the length of each in
    ``minutes``."""

    name: str
    label: str | Promise
    title: str | Promise
    intervals: int
    minutes: int
    time_format: str


SPANS = (
    Span("1h", _("1 hour"), _("Traffic, last hour"), 60, 1, "H:i"),
    Span("24h", _("24 hours"), _("Traffic, last 24 hours"), 96, 15, "H:i"),
    Span("7d", _("7 days"), _("Traffic, last 7 days"), 84, 120, "MONTH_DAY_FORMAT"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. None is a gap."""

    name: str
    values: Sequence[float | None]

    @property
    def last(self) -> float | None:
        """The newest value, None if there is none yet."""
        return self.values[-1] if self.values else None


def of_traffic(alias: str, chosen: str, keys_url: str) -> dict[str, Any]:
    """Return the charts of the chosen span, in one query. Each interval is a link to the list of
    the keys that were created in it, if the person may view keys."""
    span = next((span for span in SPANS if span.name == chosen), SPANS[0])
    found = traffic.read_intervals(alias, intervals=span.intervals, minutes=span.minutes)
    begins = [timezone.localtime(interval.begin) for interval in found]
    length = timedelta(minutes=span.minutes)
    urls = [
        f"{keys_url}?{urlencode(range_query(begin, begin + length))}" if keys_url else ""
        for begin in begins
    ]

    def of(title: str, unit: str, **labels: str) -> dict[str, Any]:
        lines = [Line(text, [getattr(each, n) for each in found]) for n, text in labels.items()]
        drawn = chart(title, lines, begins, unit=unit, time_format=span.time_format)
        linked = links(lines, begins, urls, span.time_format) if keys_url else ""
        return {"title": title, "unit": unit, "lines": lines, "svg": drawn, "links": linked}

    minutely = gettext("a minute")
    replays, conflicts = gettext("replays"), gettext("conflicts")
    requests, errors = gettext("requests"), gettext("errors")
    drawn = [
        of(gettext("Requests and operations"), minutely, requests=requests),
        of(gettext("Retries"), minutely, replays=replays, conflicts=conflicts),
        of(gettext("Errors"), minutely, errors=errors),
        of(
            gettext("Run time, at most %(share)s %% too high") % {"share": traffic.MAX_TOO_HIGH},
            "s",
            p50="p50",
            p95="p95",
        ),
    ]
    labels = [f"{counted} {minutely}" for counted in (requests, replays, conflicts, errors)]
    labels += [gettext("p50 in s"), gettext("p95 in s")]
    values = [["" if v is None else number(v) for v in _NUMBERS(each)] for each in found]
    cells = [[*zip(labels, row, strict=True)] for row in values]
    rows = [*zip(begins, urls, cells, strict=True)][::-1]
    return {"spans": SPANS, "span": span, "charts": drawn, "labels": labels, "intervals": rows}


def chart(
    title: str, lines: Sequence[Line], begins: Sequence[datetime], *, unit: str, time_format: str
) -> SafeString:
    """Return a chart as an SVG image with a text alternative. All lines have a value, or None, for
    each of ``begins``."""
    top = _rounded_up(
        max((value for line in lines for value in line.values if value is not None), default=0.0)
    )
    ticks = [(0, "start"), (len(begins) // 2, "middle"), (len(begins) - 1, "end")]
    return format_html(
        '<svg class="idem-chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}{}</svg>',
        WIDTH,
        HEIGHT,
        f"{title}: {'; '.join(_in_words(line, unit) for line in lines)}",
        format_html_join(
            "",
            '<line x1="{}" x2="{}" y1="{}" y2="{}" class="idem-grid"/><text x="{}" y="{}"'
            ' text-anchor="end">{}</text>',
            [
                (_LEFT, WIDTH, y, y, _LEFT - 6, y + 4, number(value))
                for value in (0.0, top / 2, top)
                for y in [_y(value, top)]
            ],
        ),
        format_html_join(
            "",
            '<text x="{}" y="{}" text-anchor="{}">{}</text>',
            [
                (
                    _x(place, len(begins)),
                    HEIGHT - 3,
                    anchor,
                    date_format(begins[place], time_format),
                )
                for place, anchor in ticks
            ],
        ),
        format_html_join(
            "",
            '<path class="idem-curve idem-curve-{}" stroke-dasharray="{}" d="{}"/>',
            [(place, _DASHES[place], _path(line.values, top)) for place, line in enumerate(lines)],
        ),
    )


def links(
    lines: Sequence[Line], begins: Sequence[datetime], urls: Sequence[str], time_format: str
) -> SafeString:
    """Return the layer of links above a chart: one link for each of ``begins``, with the values of
    all lines. It is for the mouse: the page has the same links in a table."""
    width = round(_INNER_WIDTH / max(len(begins) - 1, 1), 1)
    drawn = [
        (
            url,
            round(_x(place, len(begins)) - width / 2, 1),
            width,
            _told(lines, place, begin, time_format),
        )
        for place, (begin, url) in enumerate(zip(begins, urls, strict=True))
    ]
    return format_html(
        '<svg class="idem-links" viewBox="0 0 {} {}" aria-hidden="true" focusable="false">{}</svg>',
        WIDTH,
        HEIGHT,
        format_html_join(
            "",
            '<a href="{}" tabindex="-1"><rect x="{}" width="{}" y="0" height="100%"/>'
            "<title>{}</title></a>",
            drawn,
        ),
    )


def _told(lines: Sequence[Line], place: int, begin: datetime, time_format: str) -> str:
    values = [(line.name, line.values[place]) for line in lines]
    told = ", ".join(f"{name} {number(value)}" for name, value in values if value is not None)
    return f"{date_format(begin, time_format)}: {told or gettext('none')}"


def number(value: float) -> str:
    """Return a number in few characters: ``0``, ``0.25``, ``12``, ``3.4k``."""
    if value >= 1_000_000:
        return with_decimal_sign(f"{value / 1_000_000:.3g}M")
    if value >= 10_000:
        return with_decimal_sign(f"{value / 1000:.3g}k")
    return with_decimal_sign(f"{value:.3g}" if value < 100 else f"{value:.0f}")


def _in_words(line: Line, unit: str) -> str:
    known = [value for value in line.values if value is not None]
    if not known:
        return gettext("%(name)s: no value") % {"name": line.name}
    now = gettext("none") if line.last is None else number(line.last)
    numbers = {"name": line.name, "now": now, "most": number(max(known)), "unit": unit}
    return gettext("%(name)s: now %(now)s, at most %(most)s %(unit)s") % numbers


def _path(values: Sequence[float | None], top: float) -> str:
    """Return the path of a line. A value between two gaps is a short stroke."""
    steps, drawing = [], False
    for place, value in enumerate(values):
        if value is None:
            drawing = False
            continue
        x, y = _x(place, len(values)), _y(value, top)
        steps.append(f"{'L' if drawing else 'M'}{x} {y}" if drawing else f"M{x} {y}h1")
        drawing = True
    return "".join(steps)


def _x(place: int, count: int) -> float:
    return round(_LEFT + _INNER_WIDTH * place / max(count - 1, 1), 1)


def _y(value: float, top: float) -> float:
    return round(_TOP + _INNER_HEIGHT * (1 - value / top), 1)


def _rounded_up(value: float) -> float:
    """Return ``value``, rounded up to 1, 2 or 5 times a power of ten, and at least 0.001; 1 for
    0."""
    size = 0.001
    while size < value:
        for factor in (2, 5, 10):
            if size * factor >= value:
                return float(f"{size * factor:.3g}")
        size *= 10
    return size if value > 0 else 1.0
