"""Bodies that somebody else than Django parses: parsers of a view of Django REST framework, and
middleware."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import FileUploadHandler, SkipFile, StopUpload
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.test import Client
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from django.urls import path
from ninja import Form, NinjaAPI
from ninja.decorators import decorate_view
from ninja.security import django_auth
from psycopg.errors import SerializationFailure
from pytest_django import Settings
from rest_framework.parsers import BaseParser, DataAndFiles, MultiPartParser
from rest_framework.permissions import BasePermission
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency.completer import CompletePass, complete_once
from idempotency.contrib.ninja import idempotent as ninja_idempotent
from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from idempotency.phases import atomic_phase
from tests.factories import UserFactory
from tests.kit.ageing import abandon
from tests.kit.views import phased

pytestmark = pytest.mark.django_db(transaction=True)

FORM = "application/x-www-form-urlencoded"
Serve = Callable[..., None]


@pytest.fixture
def client() -> Client:
    client = Client(raise_request_exception=False, headers={"Idempotency-Key": "k"})
    client.force_login(UserFactory())
    return client


@pytest.fixture
def serve(settings: Settings) -> Serve:
    """Return a function that puts views under their names."""

    def put(**views: Any) -> None:
        settings.ROOT_URLCONF = type(
            "Urls", (), {"urlpatterns": [path(f"{name}/", views[name]) for name in views]}
        )

    return put


def second_run(request: HttpRequest, see: Callable[[], object], seen: list[Any]) -> Any:
    """Note what each run sees. The first is answered 503, the second finishes the key."""
    key = request.idempotency_key  # type: ignore[attr-defined]
    for _ in key.phases():
        seen.append(see())
        if len(seen) == 1:
            return HttpResponse(status=503)
        with atomic_phase(key) as phase:
            phase.set_response(JsonResponse({}))
    return key.response()


class PartsParser(BaseParser):
    """Minds the content type of each part, and reads text as Latin-1."""

    media_type = "multipart/form-data"

    def parse(
        self, stream: Any, media_type: str | None = None, parser_context: Any = None
    ) -> dict[str, Any]:
        data = {}
        for part in stream.read().split(b"--x")[1:-1]:
            head, _, value = part.strip(b"\r\n").partition(b"\r\n\r\n")
            name, text = re.search(rb'name="([^"]+)"', head)[1].decode(), value.decode("latin-1")
            data[name] = json.loads(text) if b"application/json" in head else text
        return data


def send_part(client: Client, value: bytes, *, is_json: bool = False) -> HttpResponse:
    head = b"\r\nContent-Type: application/json" if is_json else b""
    body = (
        b'--x\r\nContent-Disposition: form-data; name="who"'
        + head
        + b"\r\n\r\n"
        + value
        + b"\r\n--x--\r\n"
    )
    return client.generic("POST", "/view/", body, "multipart/form-data; boundary=x")


def test_bytes_that_a_parser_tells_apart_are_two_requests(client: Client, serve: Serve) -> None:
    class View(APIView):
        parser_classes = [PartsParser]

        @idempotent
        def post(self, request: Any) -> Response:
            return Response(request.data)

    serve(view=View.as_view())
    assert send_part(client, "Müller".encode("latin-1")).json() == {"who": "Müller"}
    assert send_part(client, "Möller".encode("latin-1")).status_code == 422


@pytest.mark.parametrize(
    ("value", "is_json"), [(b'{"amount": 5}', True), ("Müller".encode("latin-1"), False)]
)
def test_the_completer_gives_a_parser_what_the_client_sent(
    client: Client, serve: Serve, value: bytes, is_json: bool
) -> None:
    seen: list[Any] = []

    class View(APIView):
        parser_classes = [PartsParser]

        @idempotent(recovery_points=[])
        def post(self, request: Any) -> Any:
            return second_run(request, lambda: request.data["who"], seen)

    serve(view=View.as_view())
    assert send_part(client, value, is_json=is_json).status_code == 503
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert seen[0] == seen[1]


class DictParser(MultiPartParser):
    """Returns a dict, where those of the framework return a QueryDict."""

    def parse(
        self, stream: Any, media_type: str | None = None, parser_context: Any = None
    ) -> DataAndFiles:
        parsed = super().parse(stream, media_type, parser_context)
        return DataAndFiles(
            {name: json.loads(value) for name, value in parsed.data.items()}, parsed.files
        )


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("reader", ["view", "validate", "permission"])
def test_a_parser_may_return_a_dict(client: Client, serve: Serve, method: str, reader: str) -> None:
    class Permission(BasePermission):
        def has_permission(self, request: Any, view: Any) -> bool:
            return reader != "permission" or "a" in request.data

    def validate(request: Any) -> None:
        assert reader != "validate" or "a" in request.data

    class View(APIView):
        parser_classes, permission_classes = [DictParser], [Permission]

        @idempotent(validate=validate)
        def post(self, request: Any) -> Response:
            return Response({"data": request.data})

        put = post

    def send(value: str) -> Any:
        return client.generic(
            method, "/view/", encode_multipart(BOUNDARY, {"a": value}), MULTIPART_CONTENT
        )

    serve(view=View.as_view())
    if reader == "permission":
        assert send("[1]").status_code == 500, "the bytes are gone before they can be compared"
        return
    assert send("[1]").json() == {"data": {"a": [1]}}
    assert send("[2]").status_code == 422


class Quota(FileUploadHandler):
    """Refuses more than 1,000 bytes in one request."""

    total = 0

    def receive_data_chunk(self, raw_data: bytes, start: int) -> bytes:
        self.total += len(raw_data)
        if self.total >= 1000:
            raise StopUpload(connection_reset=True)
        return raw_data

    def file_complete(self, file_size: int) -> None:
        return None


def test_an_upload_is_counted_once(client: Client, settings: Settings, serve: Serve) -> None:
    settings.FILE_UPLOAD_HANDLERS = [
        f"{__name__}.Quota",
        "django.core.files.uploadhandler.MemoryFileUploadHandler",
    ]

    class View(APIView):
        parser_classes = [MultiPartParser]

        @idempotent
        def post(self, request: Any) -> Response:
            return Response({"files": sorted(request.FILES)})

    serve(view=View.as_view())
    assert client.post("/view/", {"a": SimpleUploadedFile("x", b"x" * 600)}).json() == {
        "files": ["a"]
    }


def test_an_upload_is_counted_once_in_each_attempt(
    client: Client, settings: Settings, serve: Serve
) -> None:
    settings.FILE_UPLOAD_HANDLERS = [
        f"{__name__}.Quota",
        "django.core.files.uploadhandler.MemoryFileUploadHandler",
    ]
    attempts: list[list[str]] = []

    class View(APIView):
        parser_classes = [MultiPartParser]

        @idempotent
        def post(self, request: Any) -> Response:
            attempts.append(sorted(request.FILES))
            if len(attempts) == 1:
                raise OperationalError from SerializationFailure()
            return Response({})

    serve(view=View.as_view())
    assert client.post("/view/", {"a": SimpleUploadedFile("x", b"x" * 600)}).status_code == 200
    assert attempts == [["a"], ["a"]]


class Scanner(FileUploadHandler):
    """Lets no file through."""

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        raise SkipFile

    def receive_data_chunk(self, raw_data: bytes, start: int) -> bytes:
        return raw_data

    def file_complete(self, file_size: int) -> None:
        return None


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("handler", [None, "Scanner"])
@pytest.mark.parametrize("name", ["scan.pdf", "M\xfcller.pdf"])
def test_a_file_is_not_stored_though_the_view_does_not_get_it(
    client: Client, settings: Settings, serve: Serve, method: str, handler: str | None, name: str
) -> None:
    """Django drops a part whose header is not UTF-8."""
    if handler is not None:
        settings.FILE_UPLOAD_HANDLERS = [f"{__name__}.{handler}"]

    class View(APIView):
        parser_classes = [MultiPartParser]

        @idempotent(recovery_points=[])
        def post(self, request: Any) -> HttpResponseBase:
            for _ in (key := request.idempotency_key).phases():
                with atomic_phase(key) as phase:
                    phase.set_response(HttpResponse())
            return key.response()

        put = post

    serve(view=View.as_view())
    head = (
        f'Content-Disposition: form-data; name="scan"; filename="{name}"\r\nContent-Type:'
        " application/pdf"
    )
    body = f"--x\r\n{head}\r\n\r\nPASSPORT\r\n--x--\r\n".encode("latin-1")
    assert (
        client.generic(method, "/view/", body, "multipart/form-data; boundary=x").status_code == 200
    )
    assert b"PASSPORT" not in bytes(IdempotencyKey.objects.get().request_body or b"")


class LooksForAMethod:
    """Looks for a field of a form, whatever the method."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        request.POST.get("_method")
        return self.get_response(request)


def test_a_large_put_whose_fields_a_middleware_has_looked_for_is_parsed(
    client: Client, settings: Settings, serve: Serve
) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.LooksForAMethod"]
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE = 0

    class View(APIView):
        parser_classes = [MultiPartParser]

        @idempotent
        def put(self, request: Any) -> Response:
            return Response({"title": request.data["title"]})

    serve(view=View.as_view())
    response = client.generic(
        "PUT", "/view/", encode_multipart(BOUNDARY, {"title": "me"}), MULTIPART_CONTENT
    )
    assert response.json() == {"title": "me"}


def test_a_view_of_django_gets_the_body_of_a_put(
    client: Client, settings: Settings, serve: Serve
) -> None:
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE = 0
    serve(view=idempotent(lambda request: JsonResponse({"bytes": len(request.body)})))
    body = encode_multipart(BOUNDARY, {"title": "me"})
    assert client.generic("PUT", "/view/", body, MULTIPART_CONTENT).json() == {"bytes": len(body)}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
def test_a_view_gets_an_upload_that_does_not_fit_in_memory(
    client: Client, serve: Serve, method: str
) -> None:
    class View(APIView):
        parser_classes = [MultiPartParser]

        @idempotent
        def post(self, request: Any) -> Response:
            return Response({"size": request.data["photo"].size, "title": request.data["title"]})

        put = patch = post

    serve(view=View.as_view())
    body = encode_multipart(
        BOUNDARY, {"title": "me", "photo": SimpleUploadedFile("me.png", b"x" * 3_000_000)}
    )
    first, second = (client.generic(method, "/view/", body, MULTIPART_CONTENT) for _ in range(2))
    assert first.json() == second.json() == {"size": 3_000_000, "title": "me"}
    assert second["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("content_type", [MULTIPART_CONTENT, FORM])
def test_a_put_of_ninja_is_completed_with_its_fields(
    client: Client, settings: Settings, serve: Serve, content_type: str
) -> None:
    settings.MIDDLEWARE = [
        *settings.MIDDLEWARE,
        "ninja.compatibility.files.fix_request_files_middleware",
    ]
    api, seen = NinjaAPI(auth=django_auth, docs_url=None, openapi_url=None), []

    @api.put("/amount")
    @decorate_view(ninja_idempotent(recovery_points=[]))
    def put(request: HttpRequest, amount: Form[int] = 100) -> Any:  # type: ignore[type-arg]
        return second_run(request, lambda: amount, seen)

    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": [path("api/", api.urls)]})
    body = (
        encode_multipart(BOUNDARY, {"amount": "5"})
        if content_type == MULTIPART_CONTENT
        else b"amount=5"
    )
    assert client.generic("PUT", "/api/amount", body, content_type).status_code == 503
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert seen == [5, 5]


class MethodOverride:
    """The usual middleware for HTML forms."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        request.method = request.POST.get("_method", request.method)
        return self.get_response(request)


@pytest.mark.parametrize("content_type", [MULTIPART_CONTENT, FORM])
def test_a_form_with_another_method_is_completed_with_its_fields(
    client: Client, settings: Settings, serve: Serve, content_type: str
) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.MethodOverride"]
    seen: list[Any] = []

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> Any:
        return second_run(request, lambda: (request.method, request.POST.get("amount")), seen)

    serve(view=view)
    fields = {"_method": "PUT", "amount": "5"}
    body = fields if content_type == MULTIPART_CONTENT else "_method=PUT&amount=5"
    assert client.post("/view/", body, content_type=content_type).status_code == 503
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert seen == [("PUT", "5")] * 2


@pytest.mark.parametrize("content_type", [MULTIPART_CONTENT, FORM])
def test_a_form_that_nobody_has_parsed_for_the_client_is_not_parsed_for_the_completer(
    client: Client, serve: Serve, content_type: str
) -> None:
    seen: list[Any] = []

    @idempotent(recovery_points=[])
    def view(request: HttpRequest) -> Any:
        return second_run(request, lambda: dict(request.POST), seen)

    serve(view=view)
    body = (
        encode_multipart(BOUNDARY, {"amount": "5"})
        if content_type == MULTIPART_CONTENT
        else b"amount=5"
    )
    assert client.generic("PUT", "/view/", body, content_type).status_code == 503
    abandon()
    assert complete_once() == CompletePass(finished=1)
    assert seen == [{}, {}], "Django parses no form of a PUT"


class Streaming:
    """Reads the body of a PUT as a stream, after another middleware has looked for fields."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        request.POST  # noqa: B018
        request.read()
        return self.get_response(request)


def test_a_body_that_a_middleware_has_streamed_is_not_taken_for_an_empty_one(
    client: Client, settings: Settings, serve: Serve
) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.Streaming"]
    serve(view=idempotent(lambda request: HttpResponse()))
    body = encode_multipart(BOUNDARY, {"a": "1"})
    assert client.generic("PUT", "/view/", body, MULTIPART_CONTENT).status_code == 500


@pytest.mark.parametrize(
    ("method", "content_type", "body"),
    [
        ("PUT", MULTIPART_CONTENT, encode_multipart(BOUNDARY, {"title": "me"})),
        ("POST", "application/json", b'{"filename": "scan.pdf"}'),
    ],
)
def test_a_body_without_files_is_stored(
    client: Client, serve: Serve, method: str, content_type: str, body: bytes
) -> None:
    serve(view=phased(lambda request: HttpResponse()))
    assert client.generic(method, "/view/", body, content_type).status_code == 200
    assert bytes(IdempotencyKey.objects.get().request_body) == body


def test_a_view_of_django_gets_the_body_of_a_multipart_post(client: Client, serve: Serve) -> None:
    serve(
        view=idempotent(
            lambda request: JsonResponse(
                {"bytes": len(request.body), "title": request.POST["title"]}
            )
        )
    )
    body = encode_multipart(BOUNDARY, {"title": "me"})
    assert client.generic("POST", "/view/", body, MULTIPART_CONTENT).json() == {
        "bytes": len(body),
        "title": "me",
    }
