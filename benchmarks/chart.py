"""Bar charts as SVG, in colours that are readable on white and on black, for the light and the dark
theme of the docs."""

from collections.abc import Sequence
from html import escape

GREY, COLOURS = "#808080", ("#3f86d4", "#d07a2a", "#3c9d62", "#b05fb0")
WIDTH, LABELS, VALUES = 760, 250, 60
BAR, GAP, BETWEEN = 13, 3, 12
TOP = 58

Group = tuple[str, Sequence[float | None]]


def bars(
    title: str,
    series: Sequence[str],
    groups: Sequence[Group],
    *,
    line_at: float | None = None,
    digits: int = 2,
) -> str:
    """Return a chart with a group of bars for each label, one bar for each series that has a value
    there.

    ``line_at`` is the value at which a vertical line marks the reference of the comparison.
    """
    longest = max(value for _, values in groups for value in values if value is not None)
    scale = (WIDTH - LABELS - VALUES) / longest
    parts = [f'<text x="0" y="16" font-size="15" font-weight="bold">{escape(title)}</text>']
    for number, name in enumerate(series):
        x = LABELS + 150 * number
        parts.append(f'<rect x="{x}" y="28" width="11" height="11" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{x + 16}" y="38">{escape(name)}</text>')
    height = sum(
        sum(value is not None for value in values) * (BAR + GAP) + BETWEEN for _, values in groups
    )
    if line_at is not None:
        x = LABELS + line_at * scale
        parts.append(
            f'<path d="M{x:.1f} {TOP - 6}v{height}" stroke="{GREY}" stroke-dasharray="4 3"'
            ' opacity="0.6"/>'
        )
    y = TOP
    for label, values in groups:
        shown = [
            (COLOURS[number], value) for number, value in enumerate(values) if value is not None
        ]
        middle = y + len(shown) * (BAR + GAP) / 2 + 3
        parts.append(
            f'<text x="{LABELS - 10}" y="{middle:g}" text-anchor="end">{escape(label)}</text>'
        )
        for colour, value in shown:
            width = max(1.0, value * scale)
            parts.append(
                f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
            )
            parts.append(
                f'<text x="{LABELS + width + 5:.1f}" y="{y + BAR - 2}">{value:,.{digits}f}</text>'
            )
            y += BAR + GAP
        y += BETWEEN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}"'
        f' height="{y}" role="img" aria-label="{escape(title)}" font-family="sans-serif"'
        f' font-size="12" fill="{GREY}">'
    )
    return "\n".join([head, *parts, "</svg>", ""])
