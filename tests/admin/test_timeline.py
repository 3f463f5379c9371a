"""The drawing of a timeline: to scale, with visible breaks, and readable without colour."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from idempotency.admin import timeline
from idempotency.admin.timeline import Lane, Mark, Scale, Stretch, draw

AXIS = ("begin", "end")


def drawn(*rows: Lane, now: float | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(
        draw(rows, now=now, axis=AXIS, summary="Timeline", described_by="history")
    )


def texts(svg: ElementTree.Element) -> dict[str, str]:
    """Return the labels of a drawing with their classes."""
    return {text.text or "": text.get("class", "") for text in svg.iter("text")}


def widths(svg: ElementTree.Element) -> list[float]:
    return [float(rect.get("width", "").rstrip("%")) for rect in svg.iter("rect")]


def test_what_runs_is_drawn_to_scale() -> None:
    first, second = widths(drawn(Lane("a", (Stretch(0, 2),)), Lane("b", (Stretch(3, 7),))))
    assert second / first == pytest.approx(2, rel=0.01)


def test_a_long_gap_is_compressed_and_says_how_long_it_is() -> None:
    svg = drawn(Lane("a", (Stretch(0, 1),)), Lane("b", (Stretch(301, 302),)))
    first, second = widths(svg)
    assert first == pytest.approx(second)
    assert first + second > 80
    assert "5 min" in texts(svg)
    assert len([path for path in svg.iter("path") if path.get("class") == "idem-break"]) == 1
    assert not [
        path
        for path in drawn(Lane("a", (Stretch(0, 1), Stretch(1.5, 2)))).iter("path")
        if path.get("class") == "idem-break"
    ]


def test_what_runs_long_is_never_compressed() -> None:
    assert Scale([0, 0.01, 55], [Stretch(0, 55)]).breaks == []


@pytest.mark.parametrize("runs", [1, 2, 25, 50])
def test_all_places_are_in_order_and_on_the_page(runs: int) -> None:
    bars = [
        Stretch(begin, begin + 0.01 * number)
        for number, begin in enumerate((2**count for count in range(runs)), 1)
    ]
    scale = Scale([time for bar in bars for time in (bar.begin, bar.end)], bars)
    places = [scale.place(time) for bar in bars for time in (bar.begin, bar.end)]
    assert all(before < after for before, after in pairwise(places))
    assert places[0] == timeline.MARGIN
    assert places[-1] == pytest.approx(100 - timeline.MARGIN)
    assert scale.place(-1) == places[0]
    assert scale.place(2**60) == places[-1]


def test_events_that_nearly_coincide_are_drawn_apart() -> None:
    scale = Scale([0, 0.001, 60], [Stretch(0, 60)])
    assert scale.place(0.001) - scale.place(0) == pytest.approx(timeline.LEAST_WIDTH)


def test_labels_do_not_touch_and_those_for_a_wide_page_are_marked() -> None:
    near, further = Mark(0.1, "call", "charge"), Mark(1.5, "call", "refund")
    labels = texts(
        drawn(
            Lane(
                "a",
                (Stretch(0, 10),),
                (Mark(0, "point", "ride_created"), near, further, Mark(10, "error", "error")),
            )
        )
    )
    assert (labels["ride_created"], labels["error"]) == ("idem-label", "idem-label")
    assert labels["refund"] == "idem-label idem-roomy"
    assert "charge" not in labels


def test_kinds_differ_in_shape() -> None:
    shapes = list(timeline._SHAPES.values())
    assert len(set(shapes)) == len(shapes)


def test_what_others_wrote_is_text() -> None:
    svg = draw(
        [Lane("<b>", (Stretch(0, 1),), (Mark(1, "error", "<script>"),))],
        now=None,
        axis=AXIS,
        summary="<i>",
        described_by="x",
    )
    assert not re.search("<(b|script|i)>", svg)


def test_nothing_is_drawn_of_a_single_moment() -> None:
    assert (
        draw([Lane("a", (Stretch(0, 0),))], now=None, axis=AXIS, summary="", described_by="") == ""
    )
    assert draw([], now=None, axis=AXIS, summary="", described_by="") == ""
    assert draw([], now=3, axis=AXIS, summary="", described_by="") == ""


def test_the_present_is_a_line_with_a_name() -> None:
    svg = drawn(Lane("a", (Stretch(0, 1),)), now=400)
    assert "now" in texts(svg)
    assert "now" not in texts(drawn(Lane("a", (Stretch(0, 1),))))
