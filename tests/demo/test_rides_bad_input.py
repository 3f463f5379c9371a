"""Any bytes as key, header, path, query or body get a 4xx, never a 500, and leave no row beyond the
contract."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

import json
from urllib.parse import quote

import pytest
from django.test import Client, RequestFactory
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from idempotency.models import IdempotencyKey, StagedJob
from rides_demo.models import AuditRecord, Ride
from rides_demo.parameters import BadParameters, coordinates
from tests.kit.chance import chance
from tests.kit.rides import RIDE, jane, sandbox  # noqa: F401

pytestmark = pytest.mark.django_db

JSON = json.dumps(RIDE).encode()
FORM = "application/x-www-form-urlencoded"
PART = b'--b\r\nContent-Disposition: form-data; name="origin_lat"\r\n\r\n'

BODIES = {
    "nothing": b"",
    "white space": b" \n\t ",
    "NUL": b"\x00",
    "invalid UTF-8": b'{"origin_lat": "\xff\xfe"}',
    "UTF-16": json.dumps(RIDE).encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + JSON,
    "half": JSON[:-1],
    "twice": JSON * 2,
    "an array": b"[]",
    "null": b"null",
    "true": b"true",
    "a number": b"1",
    "a string": b'"origin_lat"',
    "10,000 brackets": b"[" * 10_000,
    "10,000 braces": b'{"a":' * 10_000,
    "balanced brackets": b"[" * 10_000 + b"]" * 10_000,
    "NaN": b"NaN",
    "a trailing comma": JSON[:-1] + b",}",
    "single quotes": JSON.replace(b'"', b"'"),
    "a number of 60,000 digits": b"9" * 60_000,
}


def nothing_was_written():
    return not any(
        model.objects.exists() for model in (IdempotencyKey, Ride, AuditRecord, StagedJob)
    )


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_ride_is_refused(jane, body):
    response = jane.book(body, key="kept")

    assert (response.status_code, response.json()["error"]["code"]) == (400, "body_invalid")
    assert nothing_was_written()
    assert jane.book(RIDE, key="kept").status_code == 201


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "application/json; charset=utf-7",
        "application/json; charset=base64",
        "x" * 3000,
        "multipart/mixed",
        ";;;",
    ],
)
def test_what_the_body_is_called_breaks_nothing(jane, content_type):
    assert jane.book(JSON, Content_Type=content_type).status_code == 201


@pytest.mark.parametrize("size", [64 * 1024 + 1, 3 * 1024 * 1024])
@pytest.mark.parametrize(
    "content_type", ["application/json", FORM, "multipart/form-data; boundary=b"]
)
def test_a_body_that_is_too_large_is_refused(jane, size, content_type):
    response = jane.book(b"x" * size, key="kept", Content_Type=content_type)

    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert nothing_was_written()
    assert jane.book(RIDE, key="kept").status_code == 201


def test_the_largest_body_that_is_allowed_is_taken(jane):
    assert jane.book(JSON + b" " * (64 * 1024 - len(JSON))).status_code == 201


@pytest.mark.parametrize(("length", "status"), [("1000", 400), ("9" * 30, 413)])
def test_a_body_that_ended_too_early_is_not_a_smaller_request(rf: RequestFactory, length, status):
    """As a form the beginning could be read, and would be another ride: the whole one could not
    come under its key any more."""
    request = rf.post("/rides", b"origin_lat=1&origin_lon=1&target_lat=1&target_lon=-12", FORM)
    request.META["CONTENT_LENGTH"] = length

    with pytest.raises(BadParameters) as problem:
        coordinates(request)

    assert problem.value.status == status


FORMS = {
    "no boundary": ("multipart/form-data", PART + b"1\r\n--b--\r\n"),
    "an empty boundary": ("multipart/form-data; boundary=", PART + b"1\r\n--b--\r\n"),
    "a wrong boundary": ("multipart/form-data; boundary=other", PART + b"1\r\n--b--\r\n"),
    "a boundary out of bytes": ("multipart/form-data; boundary=\u00fc", PART + b"1\r\n--b--\r\n"),
    "an unfinished part": ("multipart/form-data; boundary=b", PART),
    "a part in broken base64": (
        "multipart/form-data; boundary=b",
        PART.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n")
        + b"!\r\n--b--\r\n",
    ),
    "2,000 fields": (FORM, b"&".join(b"f%d=1" % n for n in range(2000))),
    "bytes": (FORM, bytes(range(256))),
    "broken escapes": (FORM, b"origin_lat=%zz&%=%&origin_lon=%00"),
    "another encoding": (FORM + "; charset=utf-16", b"origin_lat=1"),
    "an unknown encoding": (FORM + "; charset=nonsense", b"origin_lat=1"),
    "JSON that is called a form": (FORM, JSON),
    **{
        f"parts in {charset}": (
            f"multipart/form-data; boundary=b; charset={charset}",
            PART + b"\xff1\r\n--b--\r\n",
        )
        for charset in (
            "base64",
            "undefined",
            "idna",
            "rot13",
            "utf-7",
            "utf-16",
            "punycode",
            "unicode_escape",
            "nonsense",
        )
    },
}


@pytest.mark.parametrize(("content_type", "body"), FORMS.values(), ids=FORMS)
def test_a_form_that_is_no_ride_is_refused(jane, content_type, body):
    response = jane.book(body, key="kept", Content_Type=content_type)

    assert response.status_code in (400, 422)
    assert response.json()["error"]["code"] in ("body_invalid", "param_missing", "param_not_float")
    assert nothing_was_written()


@pytest.mark.parametrize(
    "text", ["1_0", "\u0663", "0x10", "1,5", "--1", "1e", "", "\x00", "one", " "]
)
def test_a_field_that_spells_no_number_is_refused(jane, text):
    body = "&".join(
        f"{name}={quote(text) if name == 'origin_lat' else value}" for name, value in RIDE.items()
    ).encode()

    response = jane.book(body, Content_Type=FORM)

    assert response.json()["error"]["code"] == "param_not_float"


@pytest.mark.parametrize("text", ["nan", "-inf", "Infinity", "1e999"])
def test_a_field_that_spells_no_place_is_refused(jane, text):
    body = "&".join(
        f"{name}={text if name == 'origin_lat' else value}" for name, value in RIDE.items()
    ).encode()

    assert jane.book(body, Content_Type=FORM).json()["error"]["code"] == "param_not_lat"


def test_a_field_of_a_multipart_form_may_be_a_file_but_not_a_number(jane):
    body = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="%s"; filename="n"\r\n\r\n%f\r\n'
        % (name.encode(), value)
        for name, value in RIDE.items()
    )

    response = jane.book(body + b"--b--\r\n", Content_Type="multipart/form-data; boundary=b")

    assert response.json()["error"]["code"] == "param_missing"


@pytest.mark.parametrize(
    "extra",
    [
        {"note": "\x00"},
        {"\x00": 1},
        {"note": "\ud800"},
        {"note": 1e308},
        {"n": [[[]]]},
        {"note": "x" * 60_000},
        {"": ""},
    ],
    ids=repr,
)
def test_members_that_nobody_asked_for_change_nothing(jane, extra):
    first = jane.book(RIDE | extra, key="k")

    assert first.status_code == 201
    assert jane.book(RIDE | extra, key="k").content == first.content


KEYS = [
    b"",
    b" ",
    b"\x00",
    b"a\x00b",
    b"\xff\xfe",
    "\u00fc".encode(),
    b"x" * 256,
    b"x" * 9000,
    b'"',
    b'"a',
    b'"a\\n"',
    b"a,b",
    b"a\tb",
    b"a\x7f",
]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: repr(key[:12]))
def test_a_key_that_is_none_is_refused(jane, key):
    response = (
        jane.book(key=key.decode("latin-1")) if key else jane.send("POST", "/rides", RIDE, key="")
    )

    assert response.status_code == 400
    assert response.json()["code"] in ("key_missing", "key_invalid")
    assert nothing_was_written()


@pytest.mark.parametrize(
    "name",
    [
        "Host",
        "Accept",
        "Accept-Language",
        "X-Forwarded-Proto",
        "Cookie",
        "Content-Encoding",
        "If-Match",
    ],
)
def test_headers_of_any_bytes_break_nothing(jane, name):
    drawn = chance(name)
    for length in (0, 1, 20, 3000):
        value = bytes(drawn.randrange(256) for _ in range(length)).decode("latin-1")

        response = jane.book(**{name.replace("-", "_"): value})

        assert response.status_code in (201, 400), response.content
        assert name == "Host" or response.status_code == 201


@pytest.mark.parametrize(
    "path",
    [
        "/rides?%00=%ff",
        "/rides?" + "a=1&" * 3000,
        "/rides?=&&=",
        "/rides?a=\u00fc",
        "/rides?%",
        "/rides?\x00",
    ],
    ids=lambda path: repr(path[:20]),
)
def test_a_query_of_any_bytes_is_part_of_the_request_and_no_more(jane, path):
    response = jane.send("POST", path, RIDE, key="k")

    assert response.status_code in (201, 400)
    assert jane.send("POST", path, RIDE, key="k").content == response.content


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"])
@pytest.mark.parametrize(
    "path",
    [
        *(
            "/rides/%00",
            "/rides/%ff%fe",
            "/rides/-1",
            "/rides/1e3",
            "/rides/" + "9" * 5000,
            "/rides/1/",
            "/rides/..%2f..",
        ),
        *(
            "/rides/by-ref/",
            "/rides/by-ref/x",
            "/rides/by-ref/00000000-0000-0000-0000-00000000000g",
            "/%c0%ae",
        ),
    ],
    ids=lambda path: repr(path[:20]),
)
def test_a_path_of_any_bytes_leads_nowhere(jane, method, path):
    response = jane.send(method, path, RIDE, key="k", If_Match="*")

    assert response.status_code in (301, 404, 405)
    assert not Ride.objects.exists()


@pytest.mark.parametrize(
    "method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW", "\u00fc"]
)
def test_another_method_is_refused(jane, method):
    assert jane.send(method, "/rides", RIDE, key="k").status_code == 405
    assert nothing_was_written()


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    body=st.binary(max_size=300)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists
    ).map(lambda value: json.dumps(RIDE | {"origin_lat": value}).encode()),
    content_type=st.sampled_from(
        ["application/json", FORM, "multipart/form-data; boundary=b", "text/plain"]
    ),
    key=st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=300),
    token=st.sampled_from(["demo-jane", "demo-jane", "demo-jane", "\x00", "\u00fc"]),
)
@pytest.mark.full
def test_nothing_that_can_be_sent_is_an_internal_error(jane, body, content_type, key, token):
    response = Client(raise_request_exception=False).generic(
        "POST",
        "/rides",
        body,
        content_type,
        headers={"Authorization": f"Bearer {token}", "Idempotency-Key": key},
    )

    assert response.status_code in (201, 400, 401, 409, 422)
    rows = Ride.objects.count()
    assert (
        rows
        == IdempotencyKey.objects.count()
        == AuditRecord.objects.count()
        == StagedJob.objects.count()
    )
    assert not IdempotencyKey.objects.unfinished().exists()
