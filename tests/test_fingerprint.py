"""Which requests are the same, and which are not."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.test.client import encode_multipart

from idempotency.fingerprint import fingerprint
from tests.kit.serving import Sender, View
from tests.kit.views import Counted, both_kinds, create

factory = RequestFactory()


def of(body: bytes | str = b"", content_type: str = "application/json", *, method: str = "POST", path: str = "/rides") -> str:
    """Return the fingerprint of a request."""
    request = factory.generic(method, path, body, content_type=content_type)
    parsed = request.content_type == "multipart/form-data" and method == "POST"
    return fingerprint(request, None if parsed else request.body)


def test_fingerprint_is_versioned_and_fits_its_column() -> None:
    assert of().startswith("v1:")
    assert len(of()) <= 80


SAME = [
    ('{"a": 1, "b": 2}', '{"b":2,"a":1}'),
    ('{"a": {"b": {"c": 1, "d": 2}}}', '{"a": {"b": {"d": 2, "c": 1}}}'),
    ("1.0", "1"),
    ("1e2", "100"),
    ("1E+2", "100.0"),
    ("0.10", "0.1"),
    ("1.5e1", "15"),
    ("1e-1", "0.1"),
    ("1e300", "1" + "0" * 300),
    ("-0", "0"),
    ("-0.0", "0"),
    ("9007199254740993", "9007199254740993.0"),
    ("123456789012345678901234567890", "123456789012345678901234567890.0"),
    (r'"\u00e9"', '"é"'),
    (r'"\/"', '"/"'),
    (r'"\ud83d\ude00"', '"😀"'),
    (" [ 1 , 2 ]\n", "[1,2]"),
    ("9" * 5000, "9" * 5000),
]
DIFFERENT = [
    ("[1, 2]", "[2, 1]"),
    ('{"a": null}', "{}"),
    ('{"a": 1}', '{"a": "1"}'),
    ('{"a": true}', '{"a": 1}'),
    ('{"a": false}', '{"a": 0}'),
    ('{"a": []}', '{"a": {}}'),
    ('{"a": ""}', '{"a": null}'),
    ('{"1": 1}', '{"1": 1.5}'),
    ("9007199254740993", "9007199254740992"),
    ("9007199254740993.0", "9007199254740992.0"),
    ("0.1", "0.10000000000000000555"),
    ("0.1", "0.1000000000000000055511151231257827"),
    ("1e400", "1e401"),
    ("1e400", "2e400"),
    ("1e-400", "0"),
    ("1e-400", "2e-400"),
    ("1e999999999", "1e999999998"),
    ("1e-999999999", "0"),
    ("100.00000000000000000001", "100"),
    ("9" * 5000, "9" * 4999 + "8"),
    ("NaN", "Infinity"),
    ("Infinity", "-Infinity"),
    ('{"a": 1, "a": 2}', '{"a": 2}'),
    ('{"a": 1, "a": 2}', '{"a": 1}'),
    ('{"a": 1, "a": 2}', '{"a": 2, "a": 1}'),
    ('{"x": {"a": 1, "a": 2}}', '{"x": {"a": 2}}'),
    ('"é"', '"e\u0301"'),
    (r'"\ud800"', r'"\ud801"'),
    (r'"\ud800"', '"?"'),
    ("[" * 10_000, "[" * 9_999),
    ("[" * 10_000 + "]" * 10_000, "[" * 10_001 + "]" * 10_001),
    ("{not json", "{not  json"),
    ("", "null"),
    ("", "{}"),
    ('"a"', "'a'"),
    ("1", "[1]"),
]


def _short(text: str) -> str:
    return text[:30]


@pytest.mark.parametrize(("first", "second"), SAME, ids=_short)
def test_same_value_is_the_same_request(first: str, second: str) -> None:
    assert of(first) == of(second)


@pytest.mark.parametrize(("first", "second"), DIFFERENT, ids=_short)
def test_another_value_is_another_request(first: str, second: str) -> None:
    assert of(first) != of(second)


@pytest.mark.parametrize("body", [b"\xff\xfe", b'{"a": "\xff"}', b"\x00", b'"\x00"', b"\xef\xbb\xbf{}", "{}".encode("utf-16")])
def test_body_that_is_not_utf8_has_a_fingerprint(body: bytes) -> None:
    assert of(body) == of(body)
    assert of(body) != of(body + b"\x01")


def test_method_path_and_query_count() -> None:
    paths = [
        "/rides",
        "/rides/",
        "/rides?a=1",
        "/rides?a=2",
        "/rides?a=1&b=2",
        "/rides?b=2&a=1",
        "/rides?a=1&a=2",
        "/a%2Fb",
        "/a/b2",
    ]
    found = {of(path=path) for path in paths} | {of(method="PATCH"), of(method="DELETE")}
    assert len(found) == len(paths) + 2


def test_parts_do_not_run_into_each_other() -> None:
    assert of(b"ab", "text/plain", path="/a") != of(b"b", "text/plain", path="/aa")


def test_what_is_no_json_is_compared_by_its_bytes() -> None:
    assert of('{"a": 1}', "text/plain") != of('{"a":1}', "text/plain")
    assert of("a=1&b=2", "application/x-www-form-urlencoded") != of("b=2&a=1", "application/x-www-form-urlencoded")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/problem+json", "APPLICATION/JSON"])
def test_every_kind_of_json_is_compared_by_value(content_type: str) -> None:
    assert of('{"a": 1}', content_type) == of('{"a":1}', content_type)


def multipart(fields: dict[str, Any], boundary: str = "boundary", *, method: str = "POST") -> str:
    """Return the fingerprint of a multipart request."""
    body = encode_multipart(boundary, fields)
    return of(body, f"multipart/form-data; boundary={boundary}", method=method)


def upload(name: str = "a.txt", content: bytes = b"a", content_type: str = "text/plain") -> SimpleUploadedFile:
    """Return a file to send."""
    return SimpleUploadedFile(name, content, content_type)


def test_multipart_boundary_does_not_count() -> None:
    first, second = ({"a": "1", "b": ["2", "3"], "f": upload()} for _ in range(2))
    assert multipart(first, "first") == multipart(second, "second-and-longer")


def test_multipart_order_of_the_fields_does_not_count() -> None:
    assert multipart({"a": "1", "b": "2"}) == multipart({"b": "2", "a": "1"})


OTHER_PARTS: list[Callable[[], dict[str, Any]]] = [
    lambda: {"a": "1"},
    lambda: {"a": "2"},
    lambda: {"b": "1"},
    lambda: {"a": ["1", "2"]},
    lambda: {"a": ["2", "1"]},
    lambda: {"a": "1", "f": upload()},
    lambda: {"a": "1", "g": upload()},
    lambda: {"a": "1", "f": upload("b.txt")},
    lambda: {"a": "1", "f": upload(content=b"b")},
    lambda: {"a": "1", "f": upload(content_type="text/html")},
    lambda: {"a": "1", "f": [upload(), upload()]},
    lambda: {"a": "1", "f": [upload(), upload("b.txt", b"b")]},
    lambda: {},
]


def test_other_fields_and_files_are_another_request() -> None:
    assert len({multipart(parts()) for parts in OTHER_PARTS}) == len(OTHER_PARTS)


def test_order_of_the_files_of_a_field_counts() -> None:
    first = {"f": [upload("a.txt", b"a"), upload("b.txt", b"b")]}
    second = {"f": [upload("b.txt", b"b"), upload("a.txt", b"a")]}
    assert multipart(first) != multipart(second)


@pytest.mark.parametrize("method", ["PATCH", "PUT"])
def test_multipart_counts_for_every_method(method: str) -> None:
    assert multipart({"a": "1"}, method=method) != multipart({"a": "2"}, method=method)


@pytest.mark.parametrize("method", ["PATCH", "PUT"])
@both_kinds
def test_multipart_of_every_method_is_compared_and_left_to_the_view(
    kind: Callable[..., View], method: str, serve: Callable[..., None], sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        return HttpResponse(request.read() + request.body)

    def send(boundary: str, field: str, content: bytes = b"a") -> HttpResponse:
        body = encode_multipart(boundary, {"a": field, "f": upload(content=content)})
        return sender.send(method=method, body=body, content_type=f"multipart/form-data; boundary={boundary}")

    serve(view=kind(counted := Counted(work)))
    first = send("first", "1")
    assert first.content == 2 * encode_multipart("first", {"a": "1", "f": upload()})
    assert send("second", "1").content == first.content
    assert [send("third", "2").status_code, send("third", "1", b"b").status_code] == [422, 422]
    assert counted.runs == 1


@pytest.mark.parametrize("size", [10, 3_000_000])
@both_kinds
def test_files_are_left_at_their_beginning_for_the_view(
    kind: Callable[..., View], size: int, serve: Callable[..., None], sender: Sender
) -> None:
    seen = []

    def work(request: HttpRequest):
        seen.append((request.POST["a"], len(request.FILES["f"].read())))
        return create(request)

    serve(view=kind(counted := Counted(work)))
    for boundary in ("first", "second"):
        body = encode_multipart(boundary, {"a": "1", "f": upload(content=b"x" * size)})
        assert sender.send(body=body, content_type=f"multipart/form-data; boundary={boundary}").status_code == 201
    assert seen == [("1", size)]
    assert counted.runs == 1


def test_canonical_form_is_not_mistaken_for_the_bytes() -> None:
    assert of('{"a":1}', "application/json") != of('{"a":1}', "text/plain")


def test_json_values_of_python_survive() -> None:
    value = {"list": [1, 1.5, None, True, "é"], "nested": {"b": {}, "a": []}}
    assert of(json.dumps(value)) == of(json.dumps(value, indent=4, sort_keys=True, ensure_ascii=False))
