"""Number 57, a part of it: a body that a middleware has decoded is a whole body. What the
connection lost is still missed."""

import json
import os
from collections.abc import Callable
from contextlib import closing
from http import HTTPStatus
from io import BytesIO, RawIOBase
from itertools import cycle, product
from typing import Any

import pytest
import rest_framework
from django.conf import settings as settings_of_django
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from django.views.decorators.csrf import csrf_exempt
from pytest_django import Settings
from rest_framework.authentication import SessionAuthentication
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency.completer import CompletePass, complete_once
from idempotency.decorators import idempotent
from tests.kit.ageing import abandon
from tests.kit.serving import Sender, View
from tests.kit.views import phased, phased_outside, plain
from tests.models import Entry

Serve = Callable[..., None]
Kind = Callable[[Callable[[Any], Any]], View]

JSON, FORM = "application/json", "application/x-www-form-urlencoded"


def encrypted(body: bytes) -> bytes:
    """Return the body as a client sends it: longer, and different each time."""
    nonce = os.urandom(16)
    return nonce + bytes(one ^ other for one, other in zip(body, cycle(nonce), strict=False))


def decrypted(sent: bytes) -> bytes:
    """Return the body that a client has encrypted."""
    return bytes(one ^ other for one, other in zip(sent[16:], cycle(sent[:16]), strict=False))


# What middlewares do with a body


def body_only(request: Any) -> None:
    """Put the body in the place of the other, and leave all else."""
    request._body = decrypted(request.body)


def body_and_length(request: Any) -> None:
    """Say its length too."""
    body_only(request)
    request.META["CONTENT_LENGTH"] = str(len(request._body))


def body_and_number(request: Any) -> None:
    """Say its length as a number, as no server does."""
    body_only(request)
    request.META["CONTENT_LENGTH"] = len(request._body)


def body_and_stream(request: Any) -> None:
    """Leave nothing of the other body but its length."""
    body_only(request)
    request._stream = BytesIO(request._body)


def body_of_a_stream(request: Any) -> None:
    """Read the request as a file."""
    request._body = decrypted(request.read())


def body_of_the_server(request: Any) -> None:
    """Read past Django."""
    request._body = decrypted(request.META["wsgi.input"].read(int(request.META["CONTENT_LENGTH"])))


def stream_only(request: Any) -> None:
    """Let Django read another file."""
    request._stream = BytesIO(decrypted(request.read()))
    request._read_started = False


class Decoding(RawIOBase):
    """A file that is decoded while it is read."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def readable(self) -> bool:
        """Be read."""
        return True

    def readall(self) -> bytes:
        """Return all that is left."""
        return decrypted(self.stream.read())

    def read(self, size: int = -1) -> bytes:
        """Return all at once."""
        return self.readall()


def stream_without_length(request: Any) -> None:
    """Let Django read a file of unknown length."""
    request._stream = Decoding(request._stream)
    del request.META["CONTENT_LENGTH"]


EVERY_WAY = [
    body_only,
    body_and_length,
    body_and_number,
    body_and_stream,
    body_of_a_stream,
    body_of_the_server,
    stream_only,
    stream_without_length,
]


class Decrypts:
    """The middleware; ``decode`` is its way."""

    decode: Callable[[Any], None]

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        type(self).decode(request)
        return self.get_response(request)


@pytest.fixture
def decode(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Any], None]], None]:
    """Return a function that puts the middleware before the view."""

    def put(way: Callable[[Any], None]) -> None:
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.Decrypts"]
        monkeypatch.setattr(Decrypts, "decode", staticmethod(way), raising=False)

    return put


class Session(SessionAuthentication):
    """Reads the session, and checks no token against CSRF: Django's test client needs none
    either."""

    def enforce_csrf(self, request: Any) -> None:
        """Accept each request."""


def rest(work: Callable[[Any], Any]) -> View:
    """Return a view of Django REST framework that does the work."""

    class Pay(APIView):
        authentication_classes = [Session]

        @idempotent
        def post(self, request: Any) -> Response:
            return Response(status=work(request).status_code)

    return Pay.as_view()


def pay(request: Any) -> HttpResponse:
    """Write what was paid."""
    fields = request.data if hasattr(request, "data") else request.POST or json.loads(request.body)
    Entry.objects.create(name=f"paid {fields['amount']}")
    return HttpResponse(status=201)


BODIES = {
    JSON: b'{"amount": "5", "to": "bob"}',
    FORM: b"amount=5&to=bob",
    MULTIPART_CONTENT: encode_multipart(BOUNDARY, {"amount": "5", "to": "bob"}),
}


def can_be_read(way: Callable[[Any], None], content_type: str, kind: Kind) -> bool:
    """Return whether Django and its framework can read a body that was decoded in this way."""
    if way is body_and_stream:
        return content_type != FORM  # Nothing tells such a form from a truncated one.
    if way is stream_without_length:
        return content_type != MULTIPART_CONTENT and kind is not rest
    if way is body_of_the_server and kind is rest:
        # Before 3.18 the parsers read the stream, which is empty, also without @idempotent.
        return content_type != MULTIPART_CONTENT and rest_framework.VERSION >= "3.18"
    return True


KINDS = [plain, phased, rest]
CASES = [case for case in product(EVERY_WAY, BODIES, KINDS) if can_be_read(*case)]


@pytest.mark.parametrize(("way", "content_type", "kind"), CASES)
def test_57_decoded_body_is_a_whole_body(
    way: Callable[[Any], None],
    content_type: str,
    kind: Kind,
    decode: Any,
    serve: Serve,
    sender: Sender,
) -> None:
    decode(way)
    serve(view=kind(pay))
    responses = [
        sender.send(body=encrypted(BODIES[content_type]), content_type=content_type)
        for _ in range(2)
    ]
    assert [response.status_code for response in responses] == [201, 201], responses[0].content
    assert responses[1]["Idempotent-Replayed"] == "true"
    assert [entry.name for entry in Entry.objects.all()] == ["paid 5"]


@pytest.mark.parametrize("way", EVERY_WAY)
def test_57_completer_runs_the_decoded_body(
    way: Callable[[Any], None], decode: Any, serve: Serve, sender: Sender
) -> None:
    seen = []

    def fail(request: HttpRequest) -> HttpResponse:
        seen.append(request.body)
        return HttpResponse(status=503)

    decode(way)
    serve(view=phased_outside(fail))
    assert sender.send(body=encrypted(BODIES[JSON])).status_code == 503
    abandon()
    assert complete_once() == CompletePass(failed=1)
    assert seen == [BODIES[JSON]] * 2


def read(request: HttpRequest) -> None:
    """Read the body, as a middleware that logs it does."""
    assert request.body


def nothing(request: HttpRequest) -> None:
    """Leave the body to the view."""


def not_encrypted(body: bytes) -> bytes:
    """Return the body as it is."""
    return body


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content_type", BODIES)
@pytest.mark.parametrize(
    ("way", "send"),
    [
        (nothing, not_encrypted),
        (read, not_encrypted),
        (body_only, encrypted),
        (body_of_a_stream, encrypted),
    ],
)
def test_57_truncated_body_is_refused_though_a_middleware_has_read_it(
    way: Callable[[Any], None],
    send: Callable[[bytes], bytes],
    content_type: str,
    kind: Kind,
    decode: Any,
    serve: Serve,
    sender: Sender,
) -> None:
    decode(way)
    serve(view=csrf_exempt(kind(pay)))
    whole = send(BODIES[content_type])
    cookie = settings_of_django.SESSION_COOKIE_NAME

    def arrive(part: bytes) -> int:
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/view/",
            "CONTENT_TYPE": content_type,
            "CONTENT_LENGTH": str(len(whole)),
            "HTTP_IDEMPOTENCY_KEY": "key-1",
            "HTTP_COOKIE": f"{cookie}={sender.client.cookies[cookie].value}",
            "SERVER_NAME": "localhost",
            "SERVER_PORT": "80",
            "wsgi.url_scheme": "http",
            "wsgi.input": BytesIO(part),
        }
        with closing(WSGIHandler()(environ, lambda status, headers: None)) as response:
            return response.status_code  # type: ignore[no-any-return]

    assert arrive(whole[:-3]) == HTTPStatus.BAD_REQUEST
    assert not Entry.objects.exists()
    assert arrive(whole) == HTTPStatus.CREATED
    assert [entry.name for entry in Entry.objects.all()] == ["paid 5"]
