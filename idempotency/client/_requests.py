"""The adapter for requests."""

import time
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from io import BytesIO
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import (
    ChunkedEncodingError,
    ConnectionError,
    ContentDecodingError,
    Timeout,
    UnrewindableBodyError,
)
from requests.utils import rewind_body
from urllib3.util import Timeout as Timeouts

from idempotency.client._rules import UNSAFE_METHODS, ClientCall, Retries

#: The errors of an incomplete exchange. All other errors are errors of the request itself, which a
#: retry would repeat.
_INCOMPLETE = (ConnectionError, Timeout, ChunkedEncodingError, ContentDecodingError)


class IdempotentAdapter(HTTPAdapter):
    """The counterpart of IdempotentTransport for a requests.Session. Mount it for each URL prefix,
    or use ``make_session``.

    ``options`` are those of HTTPAdapter. The ``timeout=`` of a request applies to each attempt.
    Without a timeout, an attempt may wait for its response until the deadline.

    Raises requests.RequestException if the last attempt got no complete response;
    ``error.request.headers`` has the key.
    Raises requests.exceptions.UnrewindableBodyError, before sending, if a part of the request body
    was read before.
    """

    __attrs__ = [*HTTPAdapter.__attrs__, "_retries"]  # what is pickled

    def __init__(self, retries: Retries | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._retries = retries or Retries()

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: dict[str, str] | None = None,
    ) -> requests.Response:
        """Send the request and its retries."""
        options: dict[str, Any] = {
            "stream": stream,
            "verify": verify,
            "cert": cert,
            "proxies": proxies,
        }
        if request.method not in UNSAFE_METHODS:
            return super().send(request, timeout=timeout, **options)
        _hold_body(request)
        call = ClientCall(self._retries, request.headers)
        while True:
            options["timeout"] = _ending_after(call.begin_attempt(), timeout)
            try:
                response = super().send(_from_its_beginning(request), **options)
                if (pause := _pause_after(call, response)) is None:
                    return response
            except _INCOMPLETE as error:
                if (pause := call.pause_after_error()) is None:
                    # An error while the response body is read has no request.
                    error.request = request
                    raise
            time.sleep(pause)


def make_session(retries: Retries | None = None, **options: Any) -> requests.Session:
    """Return a requests.Session with IdempotentAdapters for http:// and https://.

    ``options`` are those of HTTPAdapter."""
    session = requests.Session()
    for prefix in ("http://", "https://"):
        session.mount(prefix, IdempotentAdapter(retries, **options))
    return session


def _pause_after(call: ClientCall, response: requests.Response) -> float | None:
    # Read each body here, so that the error of a truncated body is retried.
    content = response.content
    return call.pause_after_answer(response.status_code, response.headers, lambda: content)


def _hold_body(request: requests.PreparedRequest) -> None:
    """Read a streamed body into memory, from the position that it had when the request was
    prepared."""
    body: Any = request.body
    if body is None or isinstance(body, str | bytes):
        return
    if isgenerator(body) and getgeneratorstate(body) != GEN_CREATED:
        raise UnrewindableBodyError(
            "A part of the request body was read before: build the request again, with a new"
            " generator as its body."
        )
    _from_its_beginning(request)
    if hasattr(body, "read"):
        content = body.read()
    elif isinstance(body, bytearray | memoryview):
        content = bytes(body)
    else:
        content = b"".join(part.encode() if isinstance(part, str) else part for part in body)
    held = BytesIO(content.encode() if isinstance(content, str) else content)
    # The body must be a file, because digest authentication and redirects rewind it.
    request.body, request._body_position = held, 0
    # The length is known now. It lets the server detect a truncated body.
    request.headers.pop("Transfer-Encoding", None)
    request.headers["Content-Length"] = str(len(held.getbuffer()))


def _from_its_beginning(request: requests.PreparedRequest) -> requests.PreparedRequest:
    if isinstance(request._body_position, int):
        rewind_body(request)
    return request


def _ending_after(left: float, timeout: Any) -> Timeouts:
    """Return ``timeout`` as a Timeout of urllib3 whose total is at most ``left`` seconds."""
    if not isinstance(timeout, Timeouts):
        connect, read = timeout if isinstance(timeout, tuple) else (timeout, timeout)
        timeout = Timeouts(connect=connect, read=read)
    ending: Timeouts = timeout.clone()
    ending.total = min(left, ending.total) if isinstance(ending.total, int | float) else left
    return ending
