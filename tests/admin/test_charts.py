"""Line charts: gaps, scale, and the text for who does not see them."""

import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree as ET

import pytest

from idempotency.admin.charts import HEIGHT, WIDTH, Line, chart, number

BEGINS = [datetime(2026, 11, 1, tzinfo=UTC) + timedelta(minutes=minute) for minute in range(5)]


def drawn(*lines: Line) -> ET.Element:
    return ET.fromstring(chart("Requests", lines, BEGINS, unit="a minute", time_format="H:i"))


def paths(svg: ET.Element) -> list[str]:
    return [path.attrib["d"] for path in svg.iter("path")]


def test_a_gap_is_not_bridged() -> None:
    (path,) = paths(drawn(Line("p50", [1, 2, None, 3, 4])))
    assert (path.count("M"), path.count("L")) == (2, 2)


def test_lines_differ_without_colour() -> None:
    dashes = [
        path.attrib["stroke-dasharray"]
        for path in drawn(Line("a", [1] * 5), Line("b", [2] * 5)).iter("path")
    ]
    assert len(set(dashes)) == 2


@pytest.mark.parametrize("highest", [0, 0.0004, 0.7, 1, 3, 99, 1001, 123_456])
def test_nothing_is_drawn_outside(highest: float) -> None:
    svg = drawn(Line("a", [0, highest, 0, highest / 2, highest]))
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", paths(svg)[0])]
    assert len(points) == 5
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert max(y for _, y in points) - min(y for _, y in points) >= (HEIGHT / 4 if highest else 0)


def test_the_text_says_what_the_lines_show() -> None:
    label = drawn(Line("replays", [1, 7, 2, 3, 4]), Line("conflicts", [None] * 5)).attrib[
        "aria-label"
    ]
    assert label == "Requests: replays: now 4, at most 7 a minute; conflicts: no value"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (12, "12"), (123.4, "123"), (34_000, "34k"), (1_250_000, "1.25M")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
