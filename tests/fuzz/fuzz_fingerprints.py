"""Fingerprints are equal exactly when the requests are, under rule 27."""

from random import Random
from typing import Any

from django.test import RequestFactory
from hypothesis import given
from hypothesis import strategies as st

from idempotency._hidden import Hidden
from idempotency._http.fingerprint import fingerprint
from tests.fuzz import rule_27
from tests.fuzz.examples import examples

_factory = RequestFactory()
JSON_TYPES = st.sampled_from(
    ["application/json", "application/json; charset=utf-8", "application/vnd.shop+json"]
)
METHODS = st.sampled_from(["POST", "PATCH", "PUT", "DELETE"])
PATHS = st.sampled_from(["/", "/a", "/A", "/a/", "/a%2Fb", "/é"])
QUERIES = st.sampled_from(["", "a=1", "a=2", "A=1", "a=1&b=2", "b=2&a=1", "a=%31"])


def fingerprint_of(
    body: bytes, content_type: str, method: str = "POST", path: str = "/", query: str = ""
) -> str:
    request = _factory.generic(method, path, body, content_type=content_type, QUERY_STRING=query)
    return fingerprint(
        request,
        Hidden(None if content_type.startswith("multipart") and method == "POST" else request.body),
    )


@st.composite
def pairs(draw: Any, things: st.SearchStrategy[Any]) -> tuple[Any, Any]:
    """Two things: half of the time the same one twice."""
    first = draw(things)
    return first, first if draw(st.booleans()) else draw(things)


@st.composite
def near_pairs(draw: Any, values: st.SearchStrategy[Any]) -> tuple[Any, Any]:
    """Two objects that differ in one place at the most, where differences are small."""
    members = draw(
        st.lists(
            st.tuples(rule_27.TEXTS, values), min_size=1, max_size=3, unique_by=lambda pair: pair[0]
        )
    )
    others = list(members)
    place = draw(st.integers(0, len(members) - 1))
    name, value = members[place]
    match draw(st.integers(0, 5)):
        case 0:
            del others[place]
        case 1:
            others[place] = (name, None)
        case 2:
            others[place] = (name, [value])
        case 3:
            others[place] = (name, draw(values))
        case 4 if isinstance(value, list):
            others[place] = (name, value[::-1])
        case _:
            pass
    return tuple(members), tuple(others)


@given(
    values=pairs(rule_27.VALUES) | near_pairs(rule_27.VALUES),
    encodings=pairs(st.sampled_from(["utf-8", "utf-8-sig", "utf-16"])),
    content_types=pairs(JSON_TYPES),
    chance=rule_27.CHANCES,
)
@examples(8000)
def test_equal_json_has_equal_fingerprints_and_no_other_has(
    values: tuple[Any, Any],
    encodings: tuple[str, str],
    content_types: tuple[str, str],
    chance: Random,
) -> None:
    one, other = (
        fingerprint_of(rule_27.write(value, chance).encode(encoding), content_type)
        for value, encoding, content_type in zip(values, encodings, content_types, strict=True)
    )

    assert (one == other) == (rule_27.meaning(values[0]) == rule_27.meaning(values[1]))


@given(values=pairs(rule_27.ODD_VALUES), chance=rule_27.CHANCES)
@examples(2000)
def test_json_without_a_comparable_value_is_compared_by_its_bytes(
    values: tuple[Any, Any], chance: Random
) -> None:
    one, other = (rule_27.write(value, chance).encode() for value in values)
    meanings = [rule_27.meaning(value) for value in values]

    equal = one == other if None in meanings else meanings[0] == meanings[1]

    assert (
        fingerprint_of(one, "application/json") == fingerprint_of(other, "application/json")
    ) == equal


@given(forms=pairs(rule_27.FORMS), method=METHODS, chance=rule_27.CHANCES)
@examples(3000)
def test_equal_forms_have_equal_fingerprints_and_no_others_have(
    forms: tuple[list[rule_27.Part], list[rule_27.Part]], method: str, chance: Random
) -> None:
    one, other = (fingerprint_of(*rule_27.write_form(form, chance), method) for form in forms)

    assert (one == other) == (rule_27.form_meaning(forms[0]) == rule_27.form_meaning(forms[1]))


@given(
    bodies=pairs(st.binary(max_size=20)),
    content_type=st.sampled_from(
        ["", "text/plain", "application/x-www-form-urlencoded", "application/xml"]
    ),
    targets=pairs(st.tuples(METHODS, PATHS, QUERIES)),
)
@examples(2000)
def test_all_else_is_compared_by_method_path_query_and_bytes(
    bodies: tuple[bytes, bytes],
    content_type: str,
    targets: tuple[tuple[str, str, str], tuple[str, str, str]],
) -> None:
    one, other = (
        fingerprint_of(body, content_type, *target)
        for body, target in zip(bodies, targets, strict=True)
    )

    assert (one == other) == (bodies[0] == bodies[1] and targets[0] == targets[1])
