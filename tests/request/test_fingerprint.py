"""Which requests have the same fingerprint, and which do not."""

import json
import pkgutil
import re
import sys
import tracemalloc
from collections.abc import Callable
from encodings import __path__ as codecs
from io import BytesIO
from typing import Any

import pytest
from django.core.exceptions import BadRequest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.test import RequestFactory
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart

from idempotency._hidden import Hidden
from idempotency._http.bodies import note_stream
from idempotency._http.fingerprint import fingerprint, target
from idempotency._http.stored_request import capture
from idempotency._http.view import Call
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender, View
from tests.kit.views import Counted, both_kinds, create, plain

factory = RequestFactory()


def of(
    body: bytes | str = b"",
    content_type: str = "application/json",
    *,
    method: str = "POST",
    path: str = "/rides",
) -> str:
    """Return the fingerprint of a request."""
    request = factory.generic(method, path, body, content_type=content_type)
    parsed = request.content_type == "multipart/form-data" and method == "POST"
    return fingerprint(request, Hidden(None if parsed else request.body))


def test_fingerprint_is_versioned_and_fits_its_column() -> None:
    request = factory.post("/rides", b"{}", "application/json")
    longest = fingerprint(request, Hidden(request.body), keyed=True, by_host=True)
    assert of().startswith("v1:")
    assert re.fullmatch(r"v1hk[0-9a-f]{8}:[0-9a-f]{64}", longest)
    assert len(longest) <= 80


SAME = [
    ('{"a": 1, "b": 2}', '{"b":2,"a":1}'),
    ('{"a": {"b": {"c": 1, "d": 2}}}', '{"a": {"b": {"d": 2, "c": 1}}}'),
    ('{"a": 1.50, "b": [2e3]}', '{"b":[2e3],"a":1.50}'),
    ("-0", "0"),
    ("9007199254740993", " 9007199254740993"),
    (r'"\u00e9"', '"é"'),
    (r'"\/"', '"/"'),
    (r'"\ud83d\ude00"', '"😀"'),
    (" [ 1 , 2 ]\n", "[1,2]"),
    ("9" * 5000, "9" * 5000),
    ('{"a": %s, "b": 1}' % ("9" * 50), '{"b": 1, "a": %s}' % ("9" * 50)),
    ('{"a": 1e999999999, "b": 1}', '{"b": 1, "a": 1e999999999}'),
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
    ("1.0", "1"),
    ("1.0", '"1.0"'),
    ("1.0", '["1.0"]'),
    ("1.0", "1.00"),
    ("1e2", "100"),
    ("1E+2", "1e2"),
    ("-0.0", "0.0"),
    (r'"\u00001.0"', "1.0"),
    ("9007199254740993", "9007199254740992"),
    ("9007199254740993.0", "9007199254740992.0"),
    ("0.1", "0.10000000000000000555"),
    ("0.1", "0.1000000000000000055511151231257827"),
    ("1e400", "1e401"),
    ("9" * 50, "9" * 49 + "8"),
    ("1e22", "1e23"),
    ("1" + "0" * 22, "1" + "0" * 21 + "1"),
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


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe", b'{"a": "\xff"}', b"\x00", b'"\x00"', b"\xef\xbb\xbf{}", "{}".encode("utf-16")],
)
def test_body_that_is_not_utf8_has_a_fingerprint(body: bytes) -> None:
    assert of(body) == of(body)
    assert of(body) != of(body + b"\x01")


def test_bytes_that_an_asgi_client_did_not_escape_are_kept() -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/rides",
        "query_string": "name=é".encode(),
        "headers": [],
    }
    assert target(ASGIRequest(scope, BytesIO())) == "/rides?name=%C3%A9"


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
    assert of("a=1&b=2", "application/x-www-form-urlencoded") != of(
        "b=2&a=1", "application/x-www-form-urlencoded"
    )


@pytest.mark.parametrize(
    "content_type",
    ["application/json; charset=utf-8", "application/problem+json", "APPLICATION/JSON"],
)
def test_every_kind_of_json_is_compared_by_value(content_type: str) -> None:
    assert of('{"a": 1}', content_type) == of('{"a":1}', content_type)


def multipart(fields: dict[str, Any], boundary: str = "boundary", *, method: str = "POST") -> str:
    """Return the fingerprint of a multipart request."""
    body = encode_multipart(boundary, fields)
    return of(body, f"multipart/form-data; boundary={boundary}", method=method)


def upload(
    name: str = "a.txt", content: bytes = b"a", content_type: str = "text/plain"
) -> SimpleUploadedFile:
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
        return sender.send(
            method=method, body=body, content_type=f"multipart/form-data; boundary={boundary}"
        )

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
        assert (
            sender.send(
                body=body, content_type=f"multipart/form-data; boundary={boundary}"
            ).status_code
            == 201
        )
    assert seen == [("1", size)]
    assert counted.runs == 1


def test_canonical_form_is_not_mistaken_for_the_bytes() -> None:
    assert of('{"a":1}', "application/json") != of('{"a":1}', "text/plain")


def test_json_values_of_python_survive() -> None:
    value = {"list": [1, 1.5, None, True, "é"], "nested": {"b": {}, "a": []}}
    assert of(json.dumps(value)) == of(
        json.dumps(value, indent=4, sort_keys=True, ensure_ascii=False)
    )


TOKENS = ["1e309", "1e1", "12.45", "1", "9" * 400, "9" * 4400, "{}", "[]", '{"a":1}', '""', "true"]


@pytest.mark.parametrize("token", TOKENS, ids=_short)
def test_memory_is_linear_in_the_body(token: str) -> None:
    body = f"[{','.join([token] * (200_000 // (len(token) + 1)))}]"
    request = factory.generic("POST", "/rides", body, content_type="application/json")
    assert request.body
    tracemalloc.start()
    fingerprint(request, Hidden(request.body))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * len(body)


@pytest.mark.parametrize("token", TOKENS, ids=_short)
def test_work_for_a_byte_is_bounded(token: str) -> None:
    body = f"[{','.join([token] * (20_000 // (len(token) + 1)))}]"
    request = factory.generic("POST", "/rides", body, content_type="application/json")
    assert request.body
    assert functions_called(lambda: fingerprint(request, Hidden(request.body))) < 200 + 0.8 * len(
        body
    )


def functions_called(work: Callable[[], object]) -> int:
    """Return the number of calls of functions, also of those in C."""
    calls = []
    sys.setprofile(
        lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None
    )
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("by_file", [False, True])
def test_a_form_with_too_many_parts_is_refused_before_it_is_compared(
    method: str, by_file: bool, serve: Callable[..., None], sender: Sender
) -> None:
    serve(view=plain(work := Counted()))
    parts = {
        f"a{i}": SimpleUploadedFile("f", b"") if by_file else ""
        for i in range(1001 if not by_file else 101)
    }
    body, content_type = encode_multipart(BOUNDARY, parts), MULTIPART_CONTENT
    assert sender.send(method=method, body=body, content_type=content_type).status_code == 400
    assert (work.runs, IdempotencyKey.objects.count()) == (0, 0)


CSRF, FORM = "csrfmiddlewaretoken", "application/x-www-form-urlencoded"


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_fresh_csrf_token_is_the_same_request(method: str) -> None:
    assert multipart({CSRF: "one", "a": "1"}, method=method) == multipart(
        {CSRF: "two", "a": "1"}, method=method
    )
    assert multipart({CSRF: "one", "a": "1"}, method=method) != multipart(
        {CSRF: "one", "a": "2"}, method=method
    )
    forms = [
        f"{CSRF}={token}&a={value}&b=2" for token, value in (("one", 1), ("two", 1), ("one", 2))
    ]
    first, again, other = (of(form, FORM, method=method) for form in forms)
    assert first == again != other
    assert of(f"a=1&{CSRF}=one", FORM) == of(f"a=1&{CSRF}=two", FORM)
    assert of(f"a=1&x{CSRF}=one", FORM) != of(f"a=1&x{CSRF}=two", FORM)
    assert of(f'{{"{CSRF}": 1}}') != of(f'{{"{CSRF}": 2}}'), "in JSON it is a name as any other"


def test_urlconf_that_a_middleware_chose_counts() -> None:
    def of_urlconf(urlconf: Any) -> str:
        request = factory.post("/rides", b"{}", "application/json")
        if urlconf is not None:
            request.urlconf = urlconf
        return fingerprint(request, Hidden(request.body))

    urls = [None, "shop.urls", "admin.urls", type("Urls", (), {"urlpatterns": []})]
    assert len({of_urlconf(urlconf) for urlconf in urls}) == len(urls)
    assert of_urlconf("shop.urls") == of_urlconf("shop.urls")


ADDRESSES = [
    {"HTTP_HOST": "a.example"},
    {"HTTP_HOST": "b.example"},
    {"HTTP_HOST": "b.example", "SCRIPT_NAME": "/mount"},
]


def test_host_and_mount_count_where_the_site_says_so() -> None:
    requests = [
        factory.post("/rides", b"{}", "application/json", **address) for address in ADDRESSES
    ]
    for request in requests:
        request.path_info = "/rides"
    assert len({fingerprint(request, Hidden(request.body)) for request in requests}) == 1
    assert len(
        {fingerprint(request, Hidden(request.body), by_host=True) for request in requests}
    ) == len(ADDRESSES)
    upper = factory.post("/rides", b"{}", "application/json", HTTP_HOST="A.example")
    assert fingerprint(upper, Hidden(upper.body), by_host=True) == fingerprint(
        requests[0], Hidden(requests[0].body), by_host=True
    )


CHARSETS = sorted(module.name for module in pkgutil.iter_modules(codecs))
TEXTS = [rb"\ud800", b"+2AA-", b"\xff\xfe\x00\xd8"]


def part_in(charset: str, header: bytes, text: bytes) -> bytes:
    """Return a multipart body with one part that declares a charset."""
    head = b"--x\r\nContent-Disposition: form-data; %s\r\n" % header
    return head + b"Content-Type: text/plain; charset=%s\r\n\r\n%s\r\n--x--\r\n" % (
        charset.encode(),
        text,
    )


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_multipart_body_in_any_charset_is_described_or_a_bad_request(
    method: str, rf: RequestFactory
) -> None:
    view: Any = idempotent(lambda request: HttpResponse())
    refused: set[str] = set()
    for charset in CHARSETS:
        for text in TEXTS:
            for header in (
                b'name="a"',
                b"name*=" + charset.encode() + b"''" + text,
                b'name="f"; filename="f"',
            ):
                content_type = f"multipart/form-data; boundary=x; charset={charset}"
                request = rf.generic(
                    method, "/rides", part_in(charset, header, text), content_type=content_type
                )
                note_stream(request)
                try:
                    call = Call.of(view, (request,), {})
                    capture(call, "scope", Hidden("key"), view.idempotency)
                except (BadRequest, MultiPartParserError):
                    refused.add(charset)
    assert {"idna", "punycode", "undefined", "zlib_codec"} <= refused
    assert {"utf_8", "latin_1", "utf_16"}.isdisjoint(refused)


@pytest.mark.parametrize("charset", ["idna", "zlib_codec"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
@both_kinds
def test_multipart_body_in_no_charset_of_text_is_a_bad_request(
    kind: Callable[..., View], method: str, charset: str, serve: Callable[..., None], sender: Sender
) -> None:
    serve(view=kind(counted := Counted()))
    body = part_in(charset, b'name="a"', b"\xff")
    answer = sender.send(
        method=method, body=body, content_type=f"multipart/form-data; boundary=x; charset={charset}"
    )
    assert (answer.status_code, counted.runs) == (400, 0)
