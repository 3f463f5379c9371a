"""The completer rebuilds a multipart request as multipart, so that views that parse only multipart
can read it."""

from typing import Any
from unittest.mock import ANY

import pytest
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.test import Client
from django.test.client import BOUNDARY as DJANGOS_BOUNDARY
from django.test.client import encode_multipart
from pytest_django import Settings
from rest_framework.parsers import JSONParser, MultiPartParser
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.factories import UserFactory
from tests.kit.ageing import abandon

pytestmark = pytest.mark.django_db(transaction=True)

BOUNDARY = "of-the-client"
#: Names and values that are difficult to encode.
ODD = {
    "plain": "a",
    "quotes": 'say "no"; or \\ not',
    'na"me; x\\': "quoted",
    "nämé": "ü€🦄",
    "per%22cent": "100% & more=+",
    "=?utf-8?q?=41?=; x=1": "an encoded word",
    "lines": "one\r\ntwo\n--of-the-client\r\n\r\n",
    "ends in a line": "text\r\n",
    "empty": "",
    " and \u2028": "\x00\x1f",
}


class Form:
    """A phased view that returns 503 to its client, and records the fields of each run."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def run(self, request: Any, fields: Any) -> HttpResponseBase:
        key = request.idempotency_key
        for _ in key.phases():
            self.seen.append(
                (request.content_type, [(name, values) for name, values in fields.lists()])
            )
            if len(self.seen) == 1:
                return HttpResponse(status=503)
            with atomic_phase(key) as phase:
                phase.set_response(JsonResponse({}, status=201))
        answer: HttpResponseBase = key.response()
        return answer

    def django(self, **options: Any) -> Any:
        def view(request: HttpRequest) -> HttpResponseBase:
            return self.run(request, request.POST)

        return idempotent(recovery_points=[], **options)(view)

    def rest(self) -> Any:
        class Pay(APIView):
            parser_classes = [JSONParser, MultiPartParser]

            @idempotent(recovery_points=[])
            def post(view, request: Any) -> HttpResponseBase:
                if (answer := self.run(request._request, request.data)).status_code == 503:
                    return Response(status=503)
                return answer

        return Pay.as_view()


@pytest.fixture
def client() -> Client:
    """Return a client that is signed in."""
    client = Client(raise_request_exception=False)
    client.force_login(UserFactory())
    return client


def part(name: str, value: bytes) -> bytes:
    """Return a field as a browser encodes it, with any name."""
    escaped = "".join(f"%{byte:02X}" for byte in name.encode())
    return (
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; name*=UTF-8''{escaped}\r\n\r\n".encode()
        + value
        + b"\r\n"
    )


def post(client: Client, body: bytes, charset: str = "") -> Any:
    return client.generic(
        "POST",
        "/view/",
        body + f"--{BOUNDARY}--\r\n".encode(),
        content_type=f"multipart/form-data; boundary={BOUNDARY}{charset}",
        headers={"Idempotency-Key": "key-1"},
    )


@pytest.mark.parametrize("kind", ["django", "rest"])
def test_a_view_that_parses_only_multipart_is_completed(
    kind: str, serve: Any, client: Client
) -> None:
    form = Form()
    serve(view=getattr(form, kind)())
    assert (
        client.post("/view/", {"name": "one"}, headers={"Idempotency-Key": "key-1"}).status_code
        == 503
    )
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert form.seen == [("multipart/form-data", [("name", ["one"])])] * 2
    retry = client.post("/view/", {"name": "one"}, headers={"Idempotency-Key": "key-1"})
    assert (retry.status_code, retry["Idempotent-Replayed"]) == (
        201,
        "true",
    ), "a new boundary is the same request"


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"DATA_UPLOAD_MAX_MEMORY_SIZE": None},
        {"FILE_UPLOAD_MAX_MEMORY_SIZE": len(encode_multipart(DJANGOS_BOUNDARY, {"amount": "5"}))},
    ],
)
def test_a_view_that_parses_no_form_refuses_it_as_without_the_decorator(
    serve: Any, client: Client, settings: Settings, limits: dict[str, int | None]
) -> None:
    for name, limit in limits.items():
        setattr(settings, name, limit)

    class Refund(APIView):
        parser_classes = [JSONParser]

        @idempotent
        def post(self, request: Any) -> Response:
            return Response({"refunded": request.data.get("amount", "all")})

    serve(view=Refund.as_view())
    answer = client.post("/view/", {"amount": "5"}, headers={"Idempotency-Key": "key-1"})
    assert (answer.status_code, answer.json()) == (415, {"detail": ANY})


def test_names_and_values_come_back_as_they_were(serve: Any, client: Client) -> None:
    form = Form()
    serve(view=form.django())
    fields = [*ODD.items(), ("plain", "b"), ("lines", "again")]
    # The boundary in a value must not end the part in the request of the client, either.
    body = b"".join(
        part(name, value.replace(BOUNDARY, "another").encode()) for name, value in fields
    )
    assert post(client, body).status_code == 503
    abandon()
    assert complete_once() == CompletePass(finished=1)
    by_client, by_completer = form.seen
    assert by_completer == by_client
    assert len(by_client[1]) == len(ODD)


def test_a_charset_of_its_own_comes_back(serve: Any, client: Client) -> None:
    form = Form()
    serve(view=form.django())
    assert (
        post(client, part("name", "Grünau".encode("latin-1")), "; charset=latin-1").status_code
        == 503
    )
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert form.seen == [("multipart/form-data", [("name", ["Grünau"])])] * 2


def test_no_field_at_all_comes_back(serve: Any, client: Client) -> None:
    form = Form()
    serve(view=form.django())
    assert post(client, b"").status_code == 503
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert form.seen == [("multipart/form-data", [])] * 2


@pytest.mark.parametrize(
    ("options", "data"),
    [
        ({}, {"name": "one", "file": "upload"}),
        ({"store_body": False}, {"name": "one"}),
    ],
)
def test_what_is_not_kept_is_not_rebuilt(
    options: dict[str, Any], data: dict[str, Any], serve: Any, client: Client, tmp_path: Any
) -> None:
    form = Form()
    serve(view=form.django(**options))
    (tmp_path / "upload").write_bytes(b"content")
    with (tmp_path / "upload").open("rb") as upload:
        sent = {name: upload if value == "upload" else value for name, value in data.items()}
        assert client.post("/view/", sent, headers={"Idempotency-Key": "key-1"}).status_code == 503
    abandon()
    assert complete_once() == CompletePass(failed=1)
    assert (len(form.seen), IdempotencyKey.objects.refused().count()) == (1, 1)
