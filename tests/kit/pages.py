"""Find numbers in the documentation, whatever the sentence around them is."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
WORDS = {0.5: "half an?", 1: "an?|one|once a", 2: "two|twice", 3: "three", 5: "five", 10: "ten"}
#: The notations of each unit, and its length in seconds.
TIMES = {r"s\b|seconds?\b": 1, r"min\b|minutes?\b": 60, r"h\b|hours?\b": 3600, r"days?\b": 86400}


def prose(page: str) -> str:
    """Return the text of a page below ``docs`` as one line."""
    return " ".join((DOCS / page).read_text().split())


def says(text: str, value: float, unit: str = "") -> bool:
    """Return whether ``text`` has this number, in digits or in a word, before a ``unit``, which is
    a regular expression."""
    forms = [f"{value:,g}" if value < 1e6 else f"{value:,.0f}", f"{value:g}"]
    forms += [WORDS[value]] if unit and value in WORDS else []
    number = rf"(?<![\w.,])(?:{'|'.join(forms)})(?![\d]|[.,]\d)"
    before_unit = rf"[ `)-]+(?:{unit})" if unit else ""
    return bool(re.search(number + before_unit, text, re.I))


def says_time(text: str, seconds: float) -> bool:
    """Return whether ``text`` has this time, in any unit."""
    return any(says(text, seconds / length, unit) for unit, length in TIMES.items())
