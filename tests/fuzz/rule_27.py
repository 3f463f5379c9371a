"""Rule 27, told without the code that it judges: what two requests say, and when they say the same.

A body begins as what it means, and is then written, by chance, in one of the ways in which a client
may write it. Whether two requests are equal is decided by what they mean; nothing is parsed here.
"""

import base64
import json
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Any

from hypothesis import strategies as st

#: How a body is written, from a number that hypothesis can draw again: to draw each blank would
#: take most of the time.
CHANCES = st.integers(0, 2**32 - 1).map(Random)

# ---- JSON: None, bool, str, Number, list (an array), tuple of pairs (an object)


@dataclass(frozen=True)
class Number:
    """A number, as its client writes it each time."""

    text: str


_DECIMALS = (
    st.builds(
        lambda digits, exponent: Decimal(digits).scaleb(exponent),
        st.integers(-(10**15) + 1, 10**15 - 1),
        st.integers(-40, 40),
    )
    | st.integers(-(10**40), 10**40).map(Decimal)
    | st.sampled_from(
        [
            Decimal(0),
            Decimal("-0"),
            Decimal(1),
            Decimal("0.1"),
            Decimal(2**53 + 1),
            Decimal("1e400"),
        ]
    )
)
TEXTS = st.text(max_size=8) | st.sampled_from(
    [
        "",
        "a",
        "A",
        "1",
        "1.0",
        "null",
        "é",
        "e\u0301",
        "\ud800",
        "\U0001f600",
        "\x00",
        "\x001.0",
        '"',
        "\\",
    ]
)
NUMBERS = st.builds(lambda value, chance: Number(_number(value, chance)), _DECIMALS, CHANCES)


def _objects(values: st.SearchStrategy[Any], *, doubles: bool) -> st.SearchStrategy[Any]:
    unique = None if doubles else (lambda pair: pair[0])
    return st.lists(st.tuples(TEXTS, values), max_size=4, unique_by=unique).map(tuple)


def _values(*, doubles: bool) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | NUMBERS | TEXTS,
        lambda values: st.lists(values, max_size=4) | _objects(values, doubles=doubles),
        max_leaves=8,
    )


VALUES = _values(doubles=False)
#: Values that JSON can write, and that have no single meaning: compared by their bytes.
ODD_VALUES = _values(doubles=True)


def meaning(value: Any) -> Any:
    """Return what a value means, so that two that mean the same are equal; None when it has no
    meaning that can be compared."""
    if isinstance(value, tuple):
        members = [(name, meaning(member)) for name, member in value]
        odd = len({name for name, _ in members}) < len(members) or any(
            member is None for _, member in members
        )
        return None if odd else ("object", frozenset(members))
    if isinstance(value, list):
        items = [meaning(item) for item in value]
        return None if None in items else ("array", tuple(items))
    if isinstance(value, Number):
        return ("number", "0" if value.text == "-0" else value.text)
    return (type(value).__name__, value)


def write(value: Any, chance: Random) -> str:
    """Write a value in one of the ways in which JSON can say it."""
    if isinstance(value, tuple):
        pairs = (
            chance.sample(value, len(value))
            if len({name for name, _ in value}) == len(value)
            else value
        )
        return _joined(
            "{}",
            [
                _text(name, chance) + _space(chance) + ":" + _space(chance) + write(item, chance)
                for name, item in pairs
            ],
            chance,
        )
    if isinstance(value, list):
        return _joined("[]", [write(item, chance) for item in value], chance)
    if isinstance(value, Number):
        return value.text
    return _text(value, chance) if isinstance(value, str) else json.dumps(value)


def _joined(brackets: str, parts: list[str], chance: Random) -> str:
    return (
        brackets[0]
        + _space(chance)
        + (_space(chance) + "," + _space(chance)).join(parts)
        + _space(chance)
        + brackets[1]
    )


def _space(chance: Random) -> str:
    return chance.choice(["", "", "", " ", "\n\t", "\r\n "])


def _text(text: str, chance: Random) -> str:
    bare = chance.random() < 0.5 and not any(
        0xD800 <= ord(character) < 0xE000 for character in text
    )
    return json.dumps(text, ensure_ascii=not bare)


def _number(value: Decimal, chance: Random) -> str:
    sign, digits, exponent = value.as_tuple()
    spelled, zeros = "".join(map(str, digits)), chance.randint(0, 2)
    minus = "-" if sign else ""
    match chance.randint(0, 2):
        case 0:
            plain = format(value, "f")
            return plain + ("" if not zeros else "0" * zeros if "." in plain else "." + "0" * zeros)
        case 1:
            return f"{minus}{spelled}{chance.choice('eE')}{exponent:+d}"
        case _:
            head, tail = spelled[0], spelled[1:] + "0" * zeros
            return f"{minus}{head}{'.' + tail if tail else ''}e{int(exponent) + len(digits) - 1}"


# ---- multipart: fields and files


@dataclass(frozen=True)
class Part:
    """A field, or a file when it has a file name."""

    name: str
    content: bytes
    file_name: str = ""
    content_type: str = ""


_NAMES = st.sampled_from(["a", "b", "A", "é", "a b", "x[]"])
_FIELDS = st.builds(
    Part, _NAMES, st.text(max_size=12).map(lambda text: text.encode(errors="replace"))
)
_FILES = st.builds(
    Part,
    _NAMES,
    st.binary(max_size=12),
    st.sampled_from(["f.txt", "g.txt", "é.png", "f.TXT"]),
    st.sampled_from(["text/plain", "image/png", "application/json"]),
)
FORMS = st.lists(_FIELDS | _FILES, min_size=1, max_size=5)


def form_meaning(parts: list[Part]) -> Any:
    """Return what a form means: the values of each name in their order, those of fields and of
    files apart."""
    said: dict[tuple[str, bool], list[Part]] = {}
    for part in parts:
        said.setdefault((part.name, bool(part.file_name)), []).append(part)
    return frozenset((slot, tuple(values)) for slot, values in said.items())


def write_form(parts: list[Part], chance: Random) -> tuple[bytes, str]:
    """Write a form under a new boundary, its names in any order, some parts in base64; return it
    with its content type."""
    slots = sorted({(part.name, bool(part.file_name)) for part in parts})
    chance.shuffle(slots)
    # No content is long enough to hold it.
    boundary = "".join(chance.choices("abcXYZ0189-_", k=30))
    lines: list[bytes] = []
    for slot in slots:
        for part in parts:
            if (part.name, bool(part.file_name)) == slot:
                lines += [b"--" + boundary.encode(), *_part(part, chance)]
    return (
        b"\r\n".join([*lines, b"--" + boundary.encode() + b"--", b""]),
        f"multipart/form-data; boundary={boundary}",
    )


def _part(part: Part, chance: Random) -> list[bytes]:
    disposition = f'Content-Disposition: form-data; name="{part.name}"'
    headers = [disposition + (f'; filename="{part.file_name}"' if part.file_name else "")]
    if part.content_type:
        headers.append(f"Content-Type: {part.content_type}")
    content = part.content
    if chance.random() < 0.2:
        headers.append("Content-Transfer-Encoding: base64")
        content = base64.b64encode(content)
    return [*(header.encode() for header in chance.sample(headers, len(headers))), b"", content]
