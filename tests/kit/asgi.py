"""Requests to Django's ASGI handler, like those of a server."""

import asyncio
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.db import connections

from tests.kit.threads import WAIT_SECONDS


async def begin(path: str, key: str, body: bytes) -> ApplicationCommunicator:
    """Send one request to Django's ASGI handler, like a server."""
    sent = {
        "host": "testserver",
        "idempotency-key": key,
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    headers = [(name.encode(), value.encode()) for name, value in sent.items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": headers,
        "query_string": b"",
        "http_version": "1.1",
    }
    application = ApplicationCommunicator(ASGIHandler(), scope)
    await application.send_input({"type": "http.request", "body": body})
    return application


async def ask(path: str, key: str, body: bytes = b"{}") -> tuple[int, dict[str, str], bytes]:
    """Send one request and return status, headers and body of its response."""
    application = await begin(path, key, body)
    start = await application.receive_output(WAIT_SECONDS)
    content = await application.receive_output(WAIT_SECONDS)
    await application.wait(WAIT_SECONDS)
    return (
        start["status"],
        {name.decode(): value.decode() for name, value in start["headers"]},
        content["body"],
    )


async def hang_up(path: str, reached: asyncio.Event, hung_up: asyncio.Event) -> None:
    """Send one request, and close its connection when it has ``reached`` a place of the view. Then
    set ``hung_up``, and wait for the end of the request."""
    application = await begin(path, "key-1", b"{}")
    await asyncio.wait_for(reached.wait(), WAIT_SECONDS)
    await application.send_input({"type": "http.disconnect"})
    await asyncio.sleep(0.1)  # time for a cancellation
    hung_up.set()
    await application.wait(WAIT_SECONDS)


def run(scenario: Callable[[], Any]) -> None:
    """Run a scenario on a new event loop, and close the connections that its queries opened."""

    async def whole() -> None:
        try:
            await scenario()
        finally:
            await sync_to_async(connections.close_all)()

    asyncio.run(whole())
