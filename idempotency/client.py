"""The other side: an httpx transport that gives each unsafe call a key, and sends it again until an answer stands.

Nothing of Django is imported: ``pip install "django-idempotency[client]"`` serves any Python program.

The key is made in memory. A client that may crash between the first try and the answer makes it itself (``new_key``), commits
it together with its decision to call, and sends it as a header: after the restart only that key finds what the first try did,
and a new one would do it twice.
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

#: The other methods are handed through: no key, no retries, and their answers may stream.
UNSAFE_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})

_COME_BACK = frozenset({408, 425, 429})
#: What no other try would change: the request itself is wrong.
_HOPELESS = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How long and how often a call is sent again.

    ``deadline_seconds``: no try begins later than this after the first. Stay below the retention of the server (72 hours by
    default): a try after it is a new request. ``first_pause_seconds``: upper end of the first pause, doubled with each try up
    to ``longest_pause_seconds``. A pause is drawn between nothing and its upper end, and comes on top of ``Retry-After``.
    """

    deadline_seconds: float = 60
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 10
    key_header: str = "Idempotency-Key"


def new_key() -> str:
    """Return a new key as the header carries it: a quoted UUIDv7, ordered by time, so that it does not scatter an index."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return f'"{UUID(int=value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62)}"'


class IdempotentTransport(httpx.BaseTransport):
    """Sends each unsafe request through ``transport`` until an answer stands, always with the same key and the same bytes.

    A key that the request brings is kept; one made here is put into ``request.headers``. Sent again is what got no whole answer
    (no connection, one that broke, a body that was cut), a problem+json with ``retryable: true``, and without that member 408,
    425, 429, 5xx, and 409 with ``Retry-After``. Everything else stands, ``retryable: false`` above all.

    After the deadline, or when ``Retry-After`` reaches beyond it, the last answer is returned, or the last httpx.TransportError
    raised: nobody knows then whether the request ran, and ``error.request.headers`` has the key to ask with later. The bodies
    are held in memory; a request body that was consumed before raises httpx.StreamConsumed, and nothing is sent.
    """

    def __init__(self, transport: httpx.BaseTransport | None = None, retries: Retries | None = None) -> None:
        self._transport, self._retries = transport or httpx.HTTPTransport(), retries or Retries()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request as often as it takes."""
        if request.method not in UNSAFE_METHODS:
            return self._transport.handle_request(request)
        request.read()
        call = _Call(request, self._retries)
        while True:
            try:
                with closing(self._transport.handle_request(call.next_try())) as response:
                    # What the transport has read already (it logs, or imitates a server) keeps its body.
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
    """Return an httpx.Client, with its own options, over IdempotentTransports: one around ``transport``, one around each mount.

    Proxies in the environment are not used.
    """
    transport = options.pop("transport", None) or httpx.HTTPTransport(**_of_transport(options))
    mounts = {url: mount and IdempotentTransport(mount, retries) for url, mount in (options.pop("mounts", None) or {}).items()}
    return httpx.Client(transport=IdempotentTransport(transport, retries), mounts=mounts, **options)


def make_async_client(retries: Retries | None = None, **options: Any) -> httpx.AsyncClient:
    """Return an httpx.AsyncClient as make_client does."""
    transport = options.pop("transport", None) or httpx.AsyncHTTPTransport(**_of_transport(options))
    given = options.pop("mounts", None) or {}
    mounts = {url: mount and AsyncIdempotentTransport(mount, retries) for url, mount in given.items()}
    return httpx.AsyncClient(transport=AsyncIdempotentTransport(transport, retries), mounts=mounts, **options)


def _of_transport(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that httpx does not take from the client once there is a transport."""
    names = {"verify", "cert", "trust_env", "http1", "http2", "limits"} & options.keys()
    # Left to the client, a proxy would get everything around the transport.
    return {name: options[name] for name in names} | {"proxy": options.pop("proxy", None)}


class _Call:
    """One call over its tries: what is sent, and when to send it again. Knows nothing of sending and sleeping."""

    def __init__(self, request: httpx.Request, retries: Retries) -> None:
        self._request, self._retries, self._tries = request, retries, 0
        self._deadline = time.monotonic() + retries.deadline_seconds
        if retries.key_header not in request.headers:
            request.headers[retries.key_header] = new_key()
        if request.headers.pop("Transfer-Encoding", None) is not None:
            # Its length is known now; with it the server notices when the body is cut.
            request.headers["Content-Length"] = str(len(request.content))

    def next_try(self) -> httpx.Request:
        """Return the request with timeouts that end with the deadline."""
        self._tries += 1
        left = max(self._deadline - time.monotonic(), 0.001)
        timeouts = dict.fromkeys(("connect", "read", "write", "pool")) | self._request.extensions.get("timeout", {})
        timeouts = {name: left if given is None else min(given, left) for name, given in timeouts.items()}
        own, extensions = self._request, self._request.extensions | {"timeout": timeouts}
        return httpx.Request(own.method, own.url, headers=own.headers, stream=own.stream, extensions=extensions)

    def pause_after(self, outcome: httpx.Response | httpx.TransportError) -> float | None:
        """Return how many seconds to wait before the next try, None if there is none: the outcome stands."""
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
    """Return the response over its body as it came, for the client to decode and stream."""
    stream = httpx.ByteStream(body)
    return httpx.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)


def _member_retryable(answer: httpx.Response) -> bool | None:
    """Return what a problem+json says of another try, None if it is silent or the answer is none."""
    if answer.status_code < 400 or not answer.headers.get("Content-Type", "").lower().startswith("application/problem+json"):
        return None
    try:
        if not answer.is_stream_consumed:
            body = b"".join(answer.stream)  # type: ignore[arg-type]  # a ByteStream, which can be read again
            answer = httpx.Response(answer.status_code, headers=answer.headers, content=body)
        problem = answer.json()
    except (ValueError, RecursionError, httpx.DecodingError):
        return None
    member = problem.get("retryable") if isinstance(problem, dict) else None
    return member if isinstance(member, bool) else None


def _retry_after_seconds(answer: httpx.Response) -> float | None:
    """Return what Retry-After asks for, in seconds or as a date; None if it says nothing that can be read."""
    value = answer.headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        until, now = _timestamp(value), _timestamp(answer.headers.get("Date", ""))
        # By the server's own clock where it tells the time: it may differ from this one.
        return max(until - (now or time.time()), 0) if until is not None else None
    return seconds if seconds >= 0 else None


def _timestamp(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).replace(tzinfo=UTC).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
