"""Draw a timeline to scale as one inline SVG.

Horizontal places are percentages, so that the drawing fills the width of the page while its text
keeps its size. A long gap without a run is compressed, and a break sign shows its length. Kinds
differ in shape, not only in colour.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext

from idempotency._text import duration

#: The free space on each side for the marks at the ends, in percent of the width.
MARGIN = 1.5
#: The width of a compressed gap, and the maximum width of all compressed gaps together, in percent.
BREAK_WIDTH, ALL_BREAKS = 8.0, 40.0
#: The least distance, in percent, at which two events are distinguishable. Shorter distances are
#: widened to it.
LEAST_WIDTH = 1.4
#: The widths in pixels for which labels are placed: a phone, and a wide page. CSS hides
#: ``idem-roomy`` on narrower pages.
NARROW, ROOMY = 330, 900
_CHARACTER = 6.4
#: If there are more breaks, their lines are drawn only near the axis, not through all rows.
_TORN_THROUGH = 6
_LABEL, _BAR, _NOTE, _ROW = 11, 18, 46, 36
_HIGH_ROW, _TOP, _AXIS = 56, 16, 36

_SHAPES = {
    "point": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    "call": "M0 -6l6 6l-6 6l-6 -6z",
    "error": "M-5 -5l10 10M-5 5l10 -10",
    "stuck": "M-5 -5h10v10h-10z",
    "finished": "M-6 0l4 5l8 -10",
    "person": "M0 -6l6 11h-12z",
    "expiry": "M0 -8v16M-4 -8h8M-4 8h8",
    "next": "M-4 -6l9 6l-9 6z",
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """A span of time, in seconds since the begin. ``kind`` is ``run``, ``call``, ``unanswered`` (a
    call whose run is lost), ``silent`` (no sign of life) or ``ahead``."""

    begin: float
    end: float
    kind: str = "run"


@dataclass(frozen=True, slots=True)
class Mark:
    """An event, in seconds since the begin. ``kind`` is its shape. The label is omitted if it would
    overlap another label."""

    at: float
    kind: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """A line of the timeline with its caption."""

    label: str
    bars: tuple[Stretch, ...] = ()
    marks: tuple[Mark, ...] = ()

    @property
    def height(self) -> int:
        return _HIGH_ROW if any(mark.label for mark in self.marks) else _ROW


class Scale:
    """The places of times, in percent of the width. ``breaks`` has the place and the seconds of
    each compressed gap."""

    def __init__(self, times: Iterable[float], busy: Sequence[Stretch]) -> None:
        self._times = sorted(set(times))
        gaps = list(pairwise(self._times))
        lengths = [end - begin for begin, end in gaps]
        idle = [
            not any(bar.begin <= begin and end <= bar.end for bar in busy) for begin, end in gaps
        ]
        short = _compressed(lengths, idle)
        width = min(BREAK_WIDTH, ALL_BREAKS / max(1, sum(short)))
        long = [length for length, cut in zip(lengths, short, strict=True) if not cut]
        shares = iter(_shares(long, width * sum(short)))
        self._places = [MARGIN]
        self.breaks: list[tuple[float, float]] = []
        for length, cut in zip(lengths, short, strict=True):
            before = self._places[-1]
            self._places.append(before + (width if cut else next(shares)))
            if cut:
                self.breaks.append((before + width / 2, length))

    def place(self, at: float) -> float:
        """Return the place of a time; between two known times it is interpolated."""
        for (begin, end), (left, right) in zip(
            pairwise(self._times), pairwise(self._places), strict=True
        ):
            if begin <= at <= end:
                return left + (right - left) * (at - begin) / (end - begin)
        return self._places[-1] if at > self._times[-1] else MARGIN


def _compressed(lengths: list[float], idle: list[bool]) -> list[bool]:
    """Return for each gap whether it is compressed. The shortest idle gaps are kept as long as
    their sum is at most the time of all runs; longer idle gaps are compressed. Without a run, no
    gap is compressed."""
    room = sum(length for length, nothing in zip(lengths, idle, strict=True) if not nothing)
    cut = [False] * len(lengths)
    if not room:
        return cut
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if idle[index]:
            room -= lengths[index]
            cut[index] = room < 0
    return cut


def _shares(lengths: list[float], taken: float) -> list[float]:
    """Return the widths of the gaps that are not compressed, to scale. Widths below LEAST_WIDTH are
    increased, and the others are reduced. The compressed gaps take ``taken`` percent."""
    room = 100 - 2 * MARGIN - taken
    least = min(LEAST_WIDTH, room / max(1, len(lengths)) / 2)
    wide = list(range(len(lengths)))
    while wide:
        left = room - least * (len(lengths) - len(wide))
        total = sum(lengths[index] for index in wide)
        fitting = [index for index in wide if lengths[index] * left >= least * total]
        if len(fitting) == len(wide):
            return [
                lengths[index] * left / total if index in set(wide) else least
                for index in range(len(lengths))
            ]
        wide = fitting
    return [least] * len(lengths)


def draw(
    rows: Sequence[Lane],
    *,
    now: float | None,
    axis: tuple[str, str],
    summary: str,
    described_by: str,
) -> SafeString:
    """Return the SVG; empty if all times are equal. ``described_by`` is the id of an element with
    the same events as text."""
    bars = [bar for row in rows for bar in row.bars]
    times = [time for bar in bars for time in (bar.begin, bar.end)] + [
        mark.at for row in rows for mark in row.marks
    ]
    times += [now] if now is not None else []
    if not times or min(times) == max(times):
        return SafeString("")
    scale = Scale(times, [bar for bar in bars if bar.kind in ("run", "call")])
    height, drawn = _TOP, []
    for row in rows:
        drawn.append(_row(row, scale, height))
        height += row.height
    return format_html(
        '<svg class="idem-timeline" width="100%" height="{}" role="img"'
        ' aria-labelledby="idem-timeline-title" aria-describedby="{}" focusable="false"><title'
        ' id="idem-timeline-title">{}</title>{}{}{}{}</svg>',
        height + _AXIS,
        described_by,
        summary,
        _HATCH,
        _guides(scale, now, height),
        _joined(drawn),
        _axis(scale, axis, height),
    )


_HATCH = format_html(
    "<defs>{}</defs>",
    format_html_join(
        "",
        '<pattern id="{0}" patternUnits="userSpaceOnUse" width="6" height="6"'
        ' patternTransform="rotate(45)"><path class="{0}" d="M1.5 0v6"/></pattern>',
        [("idem-hatch",), ("idem-hatch-unanswered",)],
    ),
)


def _row(row: Lane, scale: Scale, top: int) -> SafeString:
    parts = [
        format_html('<text class="idem-caption" x="0" y="{}">{}</text>', top + _LABEL, row.label)
    ]
    for bar in row.bars:
        left = scale.place(bar.begin)
        width = max(0.3, scale.place(bar.end) - left)
        box = (bar.kind, f"{left:.2f}%", top + _BAR, f"{width:.2f}%")
        text = '<rect class="idem-span-{}" x="{}" y="{}" width="{}" height="12" rx="2"/>'
        parts.append(format_html(text, *box))
    parts += [_shape(mark, scale, top + _BAR + 6) for mark in row.marks]
    labels = [(scale.place(mark.at), mark.label) for mark in row.marks if mark.label]
    return _joined([*parts, *_labels(labels, top + _NOTE)])


def _shape(mark: Mark, scale: Scale, y: int) -> SafeString:
    return format_html(
        '<svg x="{}%" y="{}" overflow="visible"><path class="idem-mark idem-mark-{}"'
        ' d="{}"><title>{}</title></path></svg>',
        f"{scale.place(mark.at):.2f}",
        y,
        mark.kind,
        _SHAPES[mark.kind],
        mark.label,
    )


def _guides(scale: Scale, now: float | None, bottom: int) -> SafeString:
    """Return the lines behind all rows: a torn line for each break, and a line for the present."""
    top = _TOP if len(scale.breaks) <= _TORN_THROUGH else bottom - 20
    tear = "M-3 0" + "l6 5l-6 5" * ((bottom - top) // 10)
    parts = [
        format_html(
            '<svg x="{}%" y="{}" overflow="visible"><path class="idem-break" d="{}"/></svg>',
            f"{x:.2f}",
            top,
            tear,
        )
        for x, _ in scale.breaks
    ]
    if now is not None:
        x = f"{scale.place(now):.2f}%"
        parts.append(
            format_html(
                '<line class="idem-now" x1="{}" x2="{}" y1="{}" y2="{}"/>', x, x, _TOP - 4, bottom
            )
        )
        parts += _labels([(scale.place(now), gettext("now"))], _TOP - 6)
    return _joined(parts)


def _axis(scale: Scale, axis: tuple[str, str], top: int) -> SafeString:
    begin, end = axis
    line = format_html('<line class="idem-axis" x1="0" x2="100%" y1="{}" y2="{}"/>', top, top)
    lengths = _labels([(x, duration(seconds)) for x, seconds in scale.breaks], top + 13)
    return _joined([line, *lengths, *_labels([(0, begin), (100, end)], top + 29)])


def _labels(wanted: list[tuple[float, str]], y: int) -> Iterator[SafeString]:
    """Yield the labels that do not overlap an earlier one. A label for wide pages only has the
    class ``idem-roomy``."""
    taken: dict[int, list[tuple[float, float]]] = {NARROW: [], ROOMY: []}
    for place, label in wanted:
        spans = {width: _span(place, label, width) for width in taken}
        free = {
            width
            for width, (begin, end) in spans.items()
            if all(end < b or e < begin for b, e in taken[width])
        }
        if ROOMY not in free:
            continue
        for width in free:
            taken[width].append(spans[width])
        extra = "" if NARROW in free else " idem-roomy"
        yield format_html(
            '<text class="idem-label{}" x="{}%" y="{}" text-anchor="{}">{}</text>',
            extra,
            f"{place:.2f}",
            y,
            _anchor(place),
            label,
        )


def _anchor(place: float) -> str:
    return "start" if place < 15 else "end" if place > 85 else "middle"


def _span(place: float, label: str, width: int) -> tuple[float, float]:
    """Return the first and the last pixel of a label, with a margin, in a drawing of this width."""
    length, x = len(label) * _CHARACTER, place * width / 100
    left = {"start": x, "middle": x - length / 2, "end": x - length}[_anchor(place)]
    return left - 4, left + length + 4


def _joined(parts: Iterable[SafeString]) -> SafeString:
    return format_html_join("", "{}", ((part,) for part in parts))
