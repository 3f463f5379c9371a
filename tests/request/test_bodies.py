"""The body of a request: what is kept in memory, and what is stored of it."""

from collections.abc import Callable
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from django.utils.datastructures import MultiValueDict
from pytest_django import Settings

from idempotency._http.bodies import FORM, RereadableStream, read_into_memory
from idempotency.models import IdempotencyKey
from tests.kit.serving import Sender
from tests.kit.views import phased_outside

Serve = Callable[..., None]


def request_with(body: bytes) -> Any:
    return RequestFactory().post("/", body, content_type="application/octet-stream")


@pytest.mark.parametrize(("limit", "in_file"), [(0, True), (9, True), (10, False)])
def test_a_body_above_the_limit_is_kept_in_a_file(
    limit: int, in_file: bool, settings: Settings
) -> None:
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE = limit
    request = request_with(b"x" * 10)
    stream: Any = RereadableStream(request)
    found = stream.read(), stream._file._rolled
    request.close()
    assert found == (b"x" * 10, in_file)


def test_the_end_of_the_request_closes_the_kept_body_and_the_uploads() -> None:
    request = request_with(b"x")
    stream: Any = RereadableStream(request)
    upload = SimpleUploadedFile("me.png", b"x")
    request._files = MultiValueDict({"photo": [upload]})
    request.close()
    assert stream._file.closed
    assert upload.closed


@pytest.mark.parametrize(("size", "is_read"), [(0, False), (1, True), (5, True), (6, False)])
def test_a_body_that_fits_is_read_into_memory(size: int, is_read: bool, settings: Settings) -> None:
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE = 5
    request = request_with(b"x" * size)
    read_into_memory(request)
    assert hasattr(request, "_body") is is_read


FIELDS = encode_multipart(BOUNDARY, {"a": "1"})
UPLOAD = encode_multipart(BOUNDARY, {"photo": SimpleUploadedFile("me.png", b"x")})


@pytest.mark.parametrize(
    ("method", "content_type", "body", "stored", "marks"),
    [
        ("POST", "application/json", b'{"filename": 1}', b'{"filename": 1}', set()),
        ("PUT", "application/json", b"{}", b"{}", set()),
        ("POST", FORM, b"a=1", b"a=1", set()),
        ("POST", MULTIPART_CONTENT, FIELDS, b"a=1", {"multipart"}),
        ("POST", MULTIPART_CONTENT, UPLOAD, None, set()),
        ("PUT", MULTIPART_CONTENT, FIELDS, FIELDS, set()),
        ("PUT", MULTIPART_CONTENT, UPLOAD, None, set()),
    ],
)
@pytest.mark.parametrize("parsed", [False, True])
def test_of_a_body_is_stored_what_the_completer_can_send_again(
    parsed: bool,
    method: str,
    content_type: str,
    body: bytes,
    stored: bytes | None,
    marks: set[str],
    serve: Serve,
    sender: Sender,
) -> None:
    """``parsed``: code outside the decorator has read the fields of a POST."""
    protected = phased_outside(lambda request: HttpResponse(status=503))

    def view(request: HttpRequest) -> Any:
        if parsed:
            dict(request.POST)
        return protected(request)

    serve(view=view)
    sender.send(body=body, content_type=content_type, method=method)
    key = IdempotencyKey.objects.get()
    kept = bytes(key.request_body) if key.request_body is not None else None
    assert (kept, key.request_headers.keys() - {"Host", "scheme"}) == (stored, marks)
