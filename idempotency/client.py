"""An httpx transport that sends each unsafe request with a key, and retries it until a response is final.

It does not import Django: ``pip install "django-idempotency[client]"`` serves any Python program.

The key is held in memory. A client that may crash before the response must make the key itself (``new_key``), commit it
together with its decision to call, and send it in the header. After a restart only that key finds the first request; a new
key would repeat it.
"""

import os
import random
import time
from contextlib import aclosing, closing
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any
from uuid import UUID

import anyio
import httpx

#: Requests with other methods get no key and no retries; their responses may stream.
UNSAFE_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})

_COME_BACK = frozenset({408, 425, 429})
#: Errors of the request itself, which a retry would repeat.
_HOPELESS = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


@dataclass(frozen=True, kw_only=True)
class Retries:
    """The limits of the retries.

    - ``deadline_seconds``: no retry begins later than this after the first attempt. Keep it below the retention of the server
      (72 hours by default): after the retention, a retry is a new request.
    - ``first_pause_seconds``: the upper bound of the first pause; it doubles with each attempt.
    - ``longest_pause_seconds``: the maximum of that bound. Each pause is random below its bound, and is added to
      ``Retry-After``.
    """

    deadline_seconds: float = 60
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 10
    key_header: str = "Idempotency-Key"


def new_key() -> str:
    """Return a new key for the header: a quoted UUIDv7. It is ordered by time, which suits a database index."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return f'"{UUID(int=value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62)}"'


class IdempotentTransport(httpx.BaseTransport):
    """Send each unsafe request through ``transport`` until a response is final, with the same key and bytes.

    The key of the request is used if it has one; otherwise a new one is set in ``request.headers``. These outcomes are
    retried:

    - an incomplete exchange: no connection, a broken connection, or a truncated body
    - a problem+json with ``retryable: true``
    - a response without the member ``retryable`` and with status 408, 425, 429 or 5xx, or 409 with ``Retry-After``

    All other responses are final. After the deadline, or if ``Retry-After`` exceeds it, the last response is returned or the
    last error raised. It is then unknown whether the request ran; ``error.request.headers`` has the key for a later retry.
    Bodies are held in memory.

    Raises httpx.TransportError if the last attempt got no complete response.
    Raises httpx.StreamConsumed, before sending, if the request body was consumed before.
    """

    def __init__(self, transport: httpx.BaseTransport | None = None, retries: Retries | None = None) -> None:
        self._transport, self._retries = transport or httpx.HTTPTransport(), retries or Retries()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request and its retries."""
        if request.method not in UNSAFE_METHODS:
            return self._transport.handle_request(request)
        request.read()
        call = _Call(request, self._retries)
        while True:
            try:
                with closing(self._transport.handle_request(call.next_try())) as response:
                    # If the transport has read the body already (for logs or in a mock), keep it.
                    read = response.is_stream_consumed
                    answer = response if read else _over(response, b"".join(response.iter_raw()))
                if (pause := call.pause_after(answer)) is None:
                    return answer
            except httpx.TransportError as error:
                if (pause := call.pause_after(error)) is None:
                    raise
            time.sleep(pause)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


class AsyncIdempotentTransport(httpx.AsyncBaseTransport):
    """Does for httpx.AsyncClient what IdempotentTransport does for httpx.Client, on asyncio and trio."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None, retries: Retries | None = None) -> None:
        self._transport, self._retries = transport or httpx.AsyncHTTPTransport(), retries or Retries()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request as often as it takes."""
        if request.method not in UNSAFE_METHODS:
            return await self._transport.handle_async_request(request)
        await request.aread()
        call = _Call(request, self._retries)
        while True:
            try:
                async with aclosing(await self._transport.handle_async_request(call.next_try())) as response:
                    read = response.is_stream_consumed
                    answer = response if read else _over(response, b"".join([part async for part in response.aiter_raw()]))
                if (pause := call.pause_after(answer)) is None:
                    return answer
            except httpx.TransportError as error:
                if (pause := call.pause_after(error)) is None:
                    raise
            await anyio.sleep(pause)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


def make_client(retries: Retries | None = None, **options: Any) -> httpx.Client:
    """Return an httpx.Client with these options, whose ``transport`` and mounts are wrapped in IdempotentTransport.

    Proxies of the environment are not used.
    """
    transport = options.pop("transport", None) or httpx.HTTPTransport(**_of_transport(options))
    mounts = {url: mount and IdempotentTransport(mount, retries) for url, mount in (options.pop("mounts", None) or {}).items()}
    return httpx.Client(transport=IdempotentTransport(transport, retries), mounts=mounts, **options)


def make_async_client(retries: Retries | None = None, **options: Any) -> httpx.AsyncClient:
    """Return an httpx.AsyncClient as ``make_client`` does."""
    transport = options.pop("transport", None) or httpx.AsyncHTTPTransport(**_of_transport(options))
    given = options.pop("mounts", None) or {}
    mounts = {url: mount and AsyncIdempotentTransport(mount, retries) for url, mount in given.items()}
    return httpx.AsyncClient(transport=AsyncIdempotentTransport(transport, retries), mounts=mounts, **options)


def _of_transport(options: dict[str, Any]) -> dict[str, Any]:
    names = {"verify", "cert", "trust_env", "http1", "http2", "limits"} & options.keys()
    # The options of the transport. If the client had ``proxy``, its requests would bypass this transport.
    return {name: options[name] for name in names} | {"proxy": options.pop("proxy", None)}


class _Call:
    """The attempts of one call: the request of each, and the pause after each. It does no I/O."""

    def __init__(self, request: httpx.Request, retries: Retries) -> None:
        self._request, self._retries, self._tries = request, retries, 0
        self._deadline = time.monotonic() + retries.deadline_seconds
        if retries.key_header not in request.headers:
            request.headers[retries.key_header] = new_key()
        if request.headers.pop("Transfer-Encoding", None) is not None:
            # The length is known now. It lets the server detect a truncated body.
            request.headers["Content-Length"] = str(len(request.content))

    def next_try(self) -> httpx.Request:
        """Return the request with timeouts that end at the deadline."""
        self._tries += 1
        left = max(self._deadline - time.monotonic(), 0.001)
        timeouts = dict.fromkeys(("connect", "read", "write", "pool")) | self._request.extensions.get("timeout", {})
        timeouts = {name: left if given is None else min(given, left) for name, given in timeouts.items()}
        own, extensions = self._request, self._request.extensions | {"timeout": timeouts}
        return httpx.Request(own.method, own.url, headers=own.headers, stream=own.stream, extensions=extensions)

    def pause_after(self, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """Return the seconds to wait before the next attempt, or None if the outcome is final."""
        if isinstance(outcome, httpx.TransportError):
            return None if isinstance(outcome, _HOPELESS) else self._pause(0)
        asked = _retry_after_seconds(outcome)
        if (retryable := _member_retryable(outcome)) is None:
            status = outcome.status_code
            retryable = status in _COME_BACK or status >= 500 or (status == 409 and asked is not None)
        return self._pause(asked or 0) if retryable else None

    def _pause(self, asked: float) -> float | None:
        doubled = self._retries.first_pause_seconds * 2 ** min(self._tries - 1, 30)
        pause = asked + random.uniform(0, min(doubled, self._retries.longest_pause_seconds))  # nosec B311  # spreads retries; no secret
        return pause if time.monotonic() + pause < self._deadline else None


def _over(response: httpx.Response, body: bytes) -> httpx.Response:
    stream = httpx.ByteStream(body)
    return httpx.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)


def _member_retryable(answer: httpx.Response) -> bool | None:
    if answer.status_code < 400 or not answer.headers.get("Content-Type", "").lower().startswith("application/problem+json"):
        return None
    try:
        if not answer.is_stream_consumed:
            body = b"".join(answer.stream)  # type: ignore[arg-type]  # a ByteStream can be read again
            answer = httpx.Response(answer.status_code, headers=answer.headers, content=body)
        problem = answer.json()
    except (ValueError, RecursionError, httpx.DecodingError):
        return None
    member = problem.get("retryable") if isinstance(problem, dict) else None
    return member if isinstance(member, bool) else None


def _retry_after_seconds(answer: httpx.Response) -> float | None:
    """Return Retry-After in seconds, also if it is a date; None if it is absent or invalid."""
    value = answer.headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        until, now = _timestamp(value), _timestamp(answer.headers.get("Date", ""))
        # Compare with the server's Date if there is one: its clock may differ.
        return max(until - (now or time.time()), 0) if until is not None else None
    return seconds if seconds >= 0 else None


def _timestamp(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).replace(tzinfo=UTC).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
