"""Uploads in a protected view: the body may be read as in any view, and the handlers cannot be
changed too late."""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import FileUploadHandler, StopUpload
from django.core.handlers.asgi import ASGIRequest
from django.db import OperationalError
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    JsonResponse,
    RawPostDataException,
)
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from psycopg.errors import SerializationFailure
from pytest_django import Settings

from idempotency.decorators import idempotent
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender, View
from tests.kit.views import both_kinds, phased, plain

Kind = Callable[..., View]
Serve = Callable[..., None]


def upload(size: int = 5_000) -> bytes:
    """Return a multipart body with a field and a file."""
    return encode_multipart(
        BOUNDARY, {"title": "me", "photo": SimpleUploadedFile("me.png", b"x" * size)}
    )


@pytest.fixture(params=[1_000_000, None])
def large(request: pytest.FixtureRequest, settings: Settings) -> None:
    """Let an upload be large: Django writes its files to the disk, and permits that the view reads
    the whole body."""
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE = 1000
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = request.param


def whole(request: HttpRequest) -> HttpResponse:
    """Tell the sizes of the body and of its parts."""
    sizes = {
        "body": len(request.body),
        "title": len(request.POST["title"]),
        "photo": len(request.FILES["photo"].read()),
    }
    return JsonResponse(sizes, status=201)


def streamed(request: HttpRequest) -> HttpResponse:
    """Read the body as a file does."""
    return JsonResponse({"body": len(b"".join(request.readlines()))}, status=201)


@both_kinds
@pytest.mark.parametrize(("work", "found"), [(whole, {"title": 2, "photo": 5000}), (streamed, {})])
def test_the_body_of_a_large_upload_can_be_read(
    work: Any, found: dict[str, int], large: None, kind: Kind, serve: Serve, sender: Sender
) -> None:
    serve(view=kind(work))
    body = upload()
    first, second = (sender.send(body=body, content_type=MULTIPART_CONTENT) for _ in range(2))
    assert (first.status_code, first.json()) == (201, {"body": len(body), **found})
    assert (second.content, second["Idempotent-Replayed"]) == (first.content, "true")


def test_a_body_as_large_as_the_limit_can_be_read(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    body = upload()
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE, settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000, len(body)
    serve(view=plain(whole))
    answer = sender.send(body=body, content_type=MULTIPART_CONTENT)
    assert (answer.status_code, answer.json()["body"]) == (201, len(body))


def test_the_body_of_a_large_upload_can_be_read_under_asgi(large: None, sender: Sender) -> None:
    view, body = idempotent(whole), upload()
    for _ in range(2):
        headers = [
            (b"content-type", MULTIPART_CONTENT.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"idempotency-key", b"key-1"),
        ]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/view/",
            "query_string": b"",
            "headers": headers,
        }
        stream = BytesIO(body)
        request = ASGIRequest(scope, stream)
        request.user = sender.user
        assert view(request).status_code == 201
        request.close()
        assert stream.closed
    assert IdempotencyKey.objects.count() == 1


@both_kinds
@pytest.mark.postgres
@pytest.mark.parametrize("work", [whole, streamed])
def test_the_body_of_a_large_upload_can_be_read_in_each_attempt(
    work: Any, large: None, kind: Kind, serve: Serve, sender: Sender
) -> None:
    found = []

    def conflicting(request: HttpRequest) -> HttpResponse:
        response = work(request)
        found.append(response.content)
        if len(found) == 1:
            raise OperationalError from SerializationFailure()
        return response  # type: ignore[no-any-return]

    serve(view=kind(conflicting))
    assert sender.send(body=upload(), content_type=MULTIPART_CONTENT).status_code == 201
    assert found[0] == found[1]


def test_a_body_above_the_limit_is_refused_as_without_the_decorator(
    serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE, settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000, 2000
    serve(
        view=plain(lambda request: HttpResponse(len(request.FILES["photo"].read()))),
        reading=plain(whole),
    )
    assert sender.send(body=upload(), content_type=MULTIPART_CONTENT).content == b"5000"
    assert (
        sender.send("/reading/", "key-2", upload(), content_type=MULTIPART_CONTENT).status_code
        == 500
    )


class Quota(FileUploadHandler):
    """Stops an upload of more than 1,000 bytes."""

    def receive_data_chunk(self, raw_data: bytes, start: int) -> bytes:
        """Let nothing through."""
        raise StopUpload(connection_reset=True)

    def file_complete(self, file_size: int) -> None:
        """Make no file."""


def test_a_handler_may_still_stop_a_large_upload(
    large: None, serve: Serve, sender: Sender, settings: Settings
) -> None:
    settings.FILE_UPLOAD_HANDLERS = [f"{__name__}.Quota"]

    def view(request: HttpRequest) -> HttpResponse:
        with pytest.raises(RawPostDataException):
            request.body  # noqa: B018 - it has only the beginning of the upload
        return HttpResponse(str(len(request.FILES)))

    serve(view=plain(view))
    responses = [
        sender.send(body=upload(300_000), content_type=MULTIPART_CONTENT) for _ in range(2)
    ]
    assert [(response.status_code, response.content) for response in responses] == [(200, b"0")] * 2
    assert responses[1]["Idempotent-Replayed"] == "true"


# Handlers


def insert(request: HttpRequest) -> None:
    """Do as Django's page on uploads does."""
    request.upload_handlers.insert(0, Quota(request))


def append(request: HttpRequest) -> None:
    """Do so at the end."""
    request.upload_handlers.append(Quota(request))


@pytest.mark.parametrize("change", [insert, append])
@pytest.mark.parametrize("kind", [plain, phased])
@pytest.mark.parametrize("size", [10, 5000])
def test_a_view_that_changes_the_handlers_is_told_where_to_do_it(
    change: Any, kind: Kind, size: int, large: None, serve: Serve, sender: Sender
) -> None:
    def work(request: HttpRequest) -> HttpResponse:
        change(request)
        return HttpResponse()

    serve(view=kind(work))
    sender.client.raise_request_exception = True
    with pytest.raises(AttributeError, match="@idempotent"):
        sender.send(body=upload(size), content_type=MULTIPART_CONTENT)


def test_outside_the_decorator_the_handlers_can_be_changed(serve: Serve, sender: Sender) -> None:
    class Counting(FileUploadHandler):
        counted = 0

        def receive_data_chunk(self, raw_data: bytes, start: int) -> bytes:
            Counting.counted += len(raw_data)
            return raw_data

        def file_complete(self, file_size: int) -> None:
            return None

    protected = idempotent(lambda request: HttpResponse(len(request.FILES["photo"].read())))

    def outer(request: HttpRequest) -> HttpResponseBase:
        request.upload_handlers.insert(0, Counting(request))
        return protected(request)  # type: ignore[no-any-return]

    serve(view=outer)
    assert sender.send(body=upload(5000), content_type=MULTIPART_CONTENT).content == b"5000"
    assert Counting.counted == 5000
