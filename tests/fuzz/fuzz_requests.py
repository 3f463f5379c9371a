"""Any key, body and content type, through real views on PostgreSQL: no 500, one run, no key left
locked or stuck."""

# ruff: noqa: F811 (fixtures are imported, and named by the tests that use them)

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from rides_demo.models import Ride
from tests.fuzz import rule_27
from tests.fuzz.examples import examples
from tests.fuzz.fuzz_keys import HEADERS, KEYS, VISIBLE
from tests.kit.rides import RIDE, Phone, jane, sandbox  # noqa: F401
from tests.kit.views import phased
from tests.models import Entry

Serve = Callable[..., None]

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

NAMED_TYPES = st.sampled_from(
    [
        "application/json",
        "application/json; charset=utf-7",
        "application/x-www-form-urlencoded",
        "application/x-www-form-urlencoded; charset=nonsense",
        "multipart/form-data",
        "multipart/form-data; boundary=b",
        "multipart/form-data; boundary=b; charset=utf-16",
        "text/plain",
        "",
        ";;;",
    ]
)
# Not base64: of a codec that is none of text, with a query, Django itself fails to make a request.
CONTENT_TYPES = NAMED_TYPES | st.text(VISIBLE + " ", max_size=20).filter(
    lambda text: "base64" not in text
)
PART = b'--b\r\nContent-Disposition: form-data; name="origin_lat"; filename="'


RIDES = st.dictionaries(st.sampled_from(list(RIDE)), st.floats() | st.text(max_size=3)).map(
    lambda changes: RIDE | changes
)


@st.composite
def contents(draw: Any) -> tuple[bytes, str]:
    """A body and what it is called: something, or nearly something."""
    content_type = "application/json"
    match draw(st.integers(0, 4)):
        case 0:
            body = rule_27.write(draw(rule_27.ODD_VALUES), draw(rule_27.CHANCES)).encode()
        case 1:
            body, content_type = rule_27.write_form(draw(rule_27.FORMS), draw(rule_27.CHANCES))
        case 2:
            body = json.dumps(draw(RIDES)).encode()
        case 3:
            body = (
                PART
                + draw(st.binary(max_size=20))
                + b'"\r\n\r\n'
                + draw(st.binary(max_size=20))
                + b"\r\n--b--\r\n"
            )
            content_type = "multipart/form-data; boundary=b"
        case _:
            body, content_type = draw(st.binary(max_size=60)), "application/x-www-form-urlencoded"
    if draw(st.integers(0, 3)) == 0:
        body = body[: draw(st.integers(0, len(body)))]
    return body, draw(CONTENT_TYPES) if draw(st.booleans()) else content_type


@st.composite
def requests(draw: Any) -> dict[str, Any]:
    """What a client sends with one key, or with what it takes for one."""
    key = draw(HEADERS | KEYS | st.uuids().map(str))
    body, content_type = draw(contents())
    return {
        "data": body,
        "content_type": content_type,
        "headers": {"Idempotency-Key": key, "Authorization": "Bearer demo-jane"},
        "QUERY_STRING": draw(
            st.sampled_from(["", "a=1"])
            | st.binary(max_size=5).map(lambda query: query.decode("latin-1"))
        ),
    }


def work(request: HttpRequest) -> HttpResponse:
    Entry.objects.create(name=request.headers["X-Example"])
    answer = f"{len(request.POST)} fields, {len(request.FILES)} files, entry {uuid.uuid4()}"
    return HttpResponse(answer, status=201, headers={"Location": "/somewhere"})


def scope(request: HttpRequest) -> str:
    return request.headers["X-Example"]


def left(**scope: str) -> QuerySet[IdempotencyKey]:
    """Return the keys that nobody could use any more."""
    return IdempotencyKey.objects.filter(
        Q(finished_at=None) | Q(locked_until__isnull=False) | Q(stuck_at__isnull=False), **scope
    )


@pytest.mark.parametrize("view", ["plain", "phased"])
@given(sent=requests(), method=st.sampled_from(["POST", "PATCH", "PUT", "DELETE", "POST"]))
@examples(1200)
def test_any_request_is_run_once_and_replayed_or_refused_for_good(
    serve: Serve, view: str, sent: dict[str, Any], method: str
) -> None:
    serve(plain=idempotent(scope=scope)(work), phased=phased(work, scope=scope))
    client, example = Client(raise_request_exception=False), uuid.uuid4().hex
    sent = {**sent, "headers": {**sent["headers"], "X-Example": example}}

    first, again = (client.generic(method, f"/{view}/", **sent) for _ in range(2))
    other = client.generic(method, f"/{view}/", **{**sent, "QUERY_STRING": "something=else"})

    assert first.status_code in (201, 400)
    assert again.status_code == first.status_code
    assert Entry.objects.filter(name=example).count() == (first.status_code == 201)
    if first.status_code == 201:
        assert (again.content, again["Idempotent-Replayed"]) == (first.content, "true")
        assert other.status_code == 422
    assert not left(scope=example)


@given(sent=requests())
@examples(1000)
def test_any_booking_of_a_ride_is_answered(jane: Phone, sent: dict[str, Any]) -> None:
    client = Client(raise_request_exception=False)
    before = Ride.objects.count()

    first, again = (client.generic("POST", "/rides", **sent) for _ in range(2))

    assert first.status_code in (201, 400, 413, 422)
    assert again.status_code == first.status_code
    assert Ride.objects.count() - before == (
        first.status_code == 201 and "Idempotent-Replayed" not in first
    )
    assert not left()
