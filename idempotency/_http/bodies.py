"""The body of a request: read, parsed, and the part of it that is stored."""

import json
import re
from copy import copy
from functools import partial
from io import BytesIO
from tempfile import SpooledTemporaryFile
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.core.handlers.wsgi import LimitedStream
from django.http import HttpRequest, QueryDict, RawPostDataException
from django.utils.datastructures import ImmutableList

from idempotency._hidden import Hidden
from idempotency._http.fingerprint import content_length, is_multipart, is_parsed, readable
from idempotency._http.problems import Problem

FORM = "application/x-www-form-urlencoded"
_STREAM = "_idempotency_stream"
_FILE = re.compile(rb"filename", re.IGNORECASE)
_HANDLERS = (
    "@idempotent has already processed the upload, to compare it with that of a retry. Change"
    " request.upload_handlers in a function outside @idempotent, or set FILE_UPLOAD_HANDLERS."
)
_CONSUMED = (
    "The body was read as a stream before @idempotent could compare it. Code outside @idempotent"
    " must read request.body or request.POST instead. Django REST framework before 3.18 reads JSON"
    " and URL-encoded forms as a stream when a permission reads request.data."
)


def body_to_store(request: HttpRequest, *, framework: bool) -> tuple[Hidden[bytes | None], str]:
    """Return the body to store and its content type. Of a multipart request the fields are stored
    as a form, but with files nothing. For a ``framework`` the body is stored as it came, if it is
    in memory."""
    content_type: str = request.META.get("CONTENT_TYPE", "")
    if multipart := is_multipart(request):
        read_into_memory(request)
    if framework and multipart and not request._read_started:  # type: ignore[attr-defined]
        parse(request)  # A view of Django REST framework takes these fields, whatever the method.
    if not (multipart and is_parsed(request)):
        body: Hidden[bytes | None] = Hidden(_raw_body(request))
        _refuse_cut_body(request)
        if multipart and _FILE.search(request.body):
            body.value = None
        return body, content_type
    # Code of the project runs below: the upload handlers.
    whole: Hidden[bytes | None] = Hidden(getattr(request, "_body", None))
    was_read = request._read_started  # type: ignore[attr-defined]
    post = getattr(request, "_post", None)
    if whole.value is None and was_read and not isinstance(post, QueryDict):
        raise RawPostDataException(_CONSUMED)
    if not hasattr(request, "_post"):
        _parse_once(request, framework=framework)
    fields: Hidden[bytes | None] = Hidden(
        readable(lambda: urlencode(list(request.POST.lists()), doseq=True).encode())
    )
    _refuse_cut_body(request)
    if request.FILES:
        return Hidden(None), content_type
    # A handler may skip a file.
    if framework and whole.value is not None and not _FILE.search(whole.value):
        return whole, content_type
    return fields, FORM


def _parse_once(request: HttpRequest, *, framework: bool) -> None:
    """Parse the fields and files, and let the view read the body as if nobody had read it."""
    kept = None
    if not framework and not hasattr(request, "_body") and _may_be_read(request):
        kept = vars(request)["_stream"] = RereadableStream(request)
    # The parsers of the view use the upload handlers again, and these may count.
    handlers: Any = ImmutableList(map(copy, request.upload_handlers), warning=_HANDLERS)
    parse(request)
    request._upload_handlers = handlers  # type: ignore[attr-defined]
    if kept is not None and not _has_rest(kept.source):  # A handler may have stopped the upload.
        kept.rewind()
        request._read_started = False  # type: ignore[attr-defined]


class RereadableStream:
    """The stream of a request that keeps what is read, in a temporary file if it is large, to be
    read again. Under ASGI, Django has such a file already."""

    def __init__(self, request: HttpRequest) -> None:
        stream: Any = request._stream
        is_file = hasattr(stream, "seekable") and stream.seekable()
        size = settings.FILE_UPLOAD_MAX_MEMORY_SIZE or 1  # 0 is no limit.
        spooled = partial(SpooledTemporaryFile, size, dir=settings.FILE_UPLOAD_TEMP_DIR)
        self._file = stream if is_file else spooled()
        #: The stream to read from, until the first ``rewind()``.
        self.source = None if is_file else stream
        close = request.close

        def close_all() -> None:
            self._file.close()
            close()

        request.close = close_all  # type: ignore[method-assign]

    def read(self, size: int = -1, /) -> bytes:
        return self._kept("read", size)

    def readline(self, size: int = -1, /) -> bytes:
        return self._kept("readline", size)

    def _kept(self, method: str, size: int) -> bytes:
        if self.source is None:
            return getattr(self._file, method)(size)  # type: ignore[no-any-return]
        data: bytes = getattr(self.source, method)(size)
        self._file.write(data)
        return data

    def rewind(self) -> None:
        self.source = None
        self._file.seek(0)

    def close(self) -> None:
        """Do nothing: Django closes a stream that it has read, but another attempt may read it
        again."""


def _raw_body(request: HttpRequest) -> bytes:
    try:
        return request.body
    except RawPostDataException as error:
        raise RawPostDataException(_CONSUMED) from error


def read_into_memory(request: HttpRequest) -> None:
    """Read a body that Django would keep in memory. A view of Django REST framework parses it
    itself, and must not consume the stream. Of a larger multipart body, the view gets what Django
    has parsed."""
    if not request._read_started and _fits_in_memory(request):  # type: ignore[attr-defined]
        request.body  # noqa: B018


def parse(request: HttpRequest) -> None:
    """Parse the form of a request with any method. Django does it for POST only."""
    method, request.method = request.method, "POST"
    # Django leaves empty fields in a request that it does not parse.
    if not getattr(request, "_post", None):
        for name in ("_post", "_files"):
            vars(request).pop(name, None)
    try:
        readable(request._load_post_and_files)
    finally:
        request.method = method


def _may_be_read(request: HttpRequest) -> bool:
    """Return whether Django permits ``request.body``."""
    limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    return limit is None or content_length(request) <= limit


def _fits_in_memory(request: HttpRequest) -> bool:
    """Return whether Django would keep the whole body and each of its files in memory."""
    most, of_body = settings.FILE_UPLOAD_MAX_MEMORY_SIZE, settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    if of_body is not None:
        most = min(of_body, most)
    return 0 < content_length(request) <= most


def note_stream(request: HttpRequest) -> None:
    """Note the stream of a request, and whether its body was read, before this app or a function of
    its options reads it."""
    vars(request).setdefault(
        _STREAM, (getattr(request, "_stream", None), hasattr(request, "_body"))
    )


def _refuse_cut_body(request: HttpRequest) -> None:
    """Raise Problem for a truncated body, which would use the key for another request. Only the
    connection truncates a body. If the body was read before, a middleware may have replaced it by a
    shorter one."""
    stream, was_read = vars(request)[_STREAM]
    # The stream of a middleware that decodes the body, or of ASGI, in which Django refuses a
    # truncated body.
    cut = False
    if isinstance(stream, LimitedStream):
        cut = request._read_started and stream._pos < stream.limit  # type: ignore[attr-defined]
        if cut and not hasattr(request, "_body"):
            # If there is more to read, an upload handler has stopped the upload.
            cut = not stream.read(1)
    elif was_read and isinstance(stream, BytesIO):  # Django keeps the body as it came there.
        arrived = max(stream.getbuffer().nbytes, len(request.body))
        cut = arrived < content_length(request) and not _has_end(request)
    if cut:
        raise Problem("body_incomplete")


def _has_rest(stream: Any) -> bool:
    return isinstance(stream, LimitedStream) and stream._pos < stream.limit  # type: ignore[attr-defined]


def _has_end(request: HttpRequest) -> bool:
    """Return whether the body contains the end that its format requires."""
    body = request.body.rstrip()
    if is_multipart(request):
        return body.endswith(f"--{request.content_params.get('boundary', '')}--".encode())  # type: ignore[union-attr]
    try:
        return isinstance(json.loads(body), dict | list)
    except (ValueError, RecursionError):
        return False
