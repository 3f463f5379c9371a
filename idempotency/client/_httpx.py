"""The transports for httpx, sync and async."""

import time
from contextlib import aclosing, closing
from typing import Any

import anyio
import httpx

from idempotency.client._rules import UNSAFE_METHODS, ClientCall, Retries

#: Errors of the request itself, which a retry would repeat.
_HOPELESS = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


class IdempotentTransport(httpx.BaseTransport):
    """Send each unsafe request through ``transport`` until a response is final, with the same key
    and bytes.

    If the request has no key, the transport sets a new key in ``request.headers``. These outcomes
    are retried:

    - an incomplete exchange: no connection, a broken connection, or a truncated body
    - a problem+json with ``retryable: true``
    - a response without the member ``retryable`` and with status 408, 425, 429 or 5xx, or 409 or
      423 with ``Retry-After``

    All other responses are final. After the deadline or the last of ``max_attempts``, or if the
    next pause would end after the deadline, the transport returns the last response or raises the
    last error. It is then unknown whether the request ran. The headers of the request
    (``error.request.headers``) contain the key for a later retry. Bodies are held in memory.

    Raises httpx.TransportError if the last attempt got no complete response.
    Raises httpx.StreamConsumed, before sending, if the request body was consumed before.
    """

    def __init__(
        self, transport: httpx.BaseTransport | None = None, retries: Retries | None = None
    ) -> None:
        self._transport, self._retries = transport or httpx.HTTPTransport(), retries or Retries()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request and its retries."""
        if request.method not in UNSAFE_METHODS:
            return self._transport.handle_request(request)
        request.read()
        exchange = _Exchange(request, self._retries)
        while True:
            try:
                with closing(self._transport.handle_request(exchange.next_attempt())) as response:
                    # If the transport has read the body already (for logs or in a mock), keep it.
                    read = response.is_stream_consumed
                    answer = response if read else _over(response, b"".join(response.iter_raw()))
                if (pause := exchange.pause_after(answer)) is None:
                    return answer
            except httpx.TransportError as error:
                if (pause := exchange.pause_after(error)) is None:
                    raise
            time.sleep(pause)

    def close(self) -> None:
        self._transport.close()


class AsyncIdempotentTransport(httpx.AsyncBaseTransport):
    """The counterpart of IdempotentTransport for httpx.AsyncClient, on asyncio and trio."""

    def __init__(
        self, transport: httpx.AsyncBaseTransport | None = None, retries: Retries | None = None
    ) -> None:
        self._transport, self._retries = (
            transport or httpx.AsyncHTTPTransport(),
            retries or Retries(),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request and its retries."""
        if request.method not in UNSAFE_METHODS:
            return await self._transport.handle_async_request(request)
        await request.aread()
        exchange = _Exchange(request, self._retries)
        while True:
            try:
                async with aclosing(
                    await self._transport.handle_async_request(exchange.next_attempt())
                ) as response:
                    read = response.is_stream_consumed
                    answer = (
                        response
                        if read
                        else _over(
                            response, b"".join([part async for part in response.aiter_raw()])
                        )
                    )
                if (pause := exchange.pause_after(answer)) is None:
                    return answer
            except httpx.TransportError as error:
                if (pause := exchange.pause_after(error)) is None:
                    raise
            await anyio.sleep(pause)

    async def aclose(self) -> None:
        await self._transport.aclose()


def make_client(retries: Retries | None = None, **options: Any) -> httpx.Client:
    """Return an httpx.Client with these options, whose ``transport`` and mounts are wrapped in
    IdempotentTransport.

    Proxies from environment variables are not used.
    """
    transport = options.pop("transport", None) or httpx.HTTPTransport(**_of_transport(options))
    mounts = {
        url: mount and IdempotentTransport(mount, retries)
        for url, mount in (options.pop("mounts", None) or {}).items()
    }
    return httpx.Client(transport=IdempotentTransport(transport, retries), mounts=mounts, **options)


def make_async_client(retries: Retries | None = None, **options: Any) -> httpx.AsyncClient:
    """Return an httpx.AsyncClient as ``make_client`` does."""
    transport = options.pop("transport", None) or httpx.AsyncHTTPTransport(**_of_transport(options))
    given = options.pop("mounts", None) or {}
    mounts = {
        url: mount and AsyncIdempotentTransport(mount, retries) for url, mount in given.items()
    }
    return httpx.AsyncClient(
        transport=AsyncIdempotentTransport(transport, retries), mounts=mounts, **options
    )


def _of_transport(options: dict[str, Any]) -> dict[str, Any]:
    names = {"verify", "cert", "trust_env", "http1", "http2", "limits"} & options.keys()
    # The options of the transport. If the client had ``proxy``, its requests would bypass this
    # transport.
    return {name: options[name] for name in names} | {"proxy": options.pop("proxy", None)}


class _Exchange:
    """The attempts of one call: the request of each attempt, and the pause after it. This class
    does no I/O."""

    def __init__(self, request: httpx.Request, retries: Retries) -> None:
        self._request, self._call = request, ClientCall(retries, request.headers)
        if request.headers.pop("Transfer-Encoding", None) is not None:
            # The length is known now. It lets the server detect a truncated body.
            request.headers["Content-Length"] = str(len(request.content))

    def next_attempt(self) -> httpx.Request:
        """Return the request with timeouts that end at the deadline."""
        left = self._call.begin_attempt()
        timeouts = dict.fromkeys(
            ("connect", "read", "write", "pool")
        ) | self._request.extensions.get("timeout", {})
        timeouts = {
            name: left if given is None else min(given, left) for name, given in timeouts.items()
        }
        own, extensions = self._request, self._request.extensions | {"timeout": timeouts}
        return httpx.Request(
            own.method, own.url, headers=own.headers, stream=own.stream, extensions=extensions
        )

    def pause_after(self, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """Return the seconds to wait before the next attempt, or None if the outcome is final."""
        if isinstance(outcome, httpx.TransportError):
            return None if isinstance(outcome, _HOPELESS) else self._call.pause_after_error()
        return self._call.pause_after_answer(
            outcome.status_code, outcome.headers, lambda: _decoded(outcome)
        )


def _over(response: httpx.Response, body: bytes) -> httpx.Response:
    stream = httpx.ByteStream(body)
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        stream=stream,
        extensions=response.extensions,
    )


def _decoded(answer: httpx.Response) -> bytes:
    """Return the decoded body, and leave the stream of ``answer`` unread; b"" if the body cannot be
    decoded."""
    try:
        if not answer.is_stream_consumed:
            body = b"".join(answer.stream)  # type: ignore[arg-type]  # a ByteStream can be read again
            answer = httpx.Response(answer.status_code, headers=answer.headers, content=body)
        return answer.content
    except httpx.DecodingError:
        return b""
