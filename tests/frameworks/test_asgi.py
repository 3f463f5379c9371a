"""All kinds of view behind Django's ASGI handler: many requests at once on one event loop."""

import asyncio
from typing import Any

import httpx
import pytest
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest

from tests.frameworks.service import Service
from tests.frameworks.work import Reply, Work, crash, create
from tests.kit.waiting import eventually
from tests.models import Entry

pytestmark = [pytest.mark.postgres, pytest.mark.styles(False, True)]

CSRF_TOKEN = "c" * 32


def send_at_once(service: Service, *keys: str) -> list[httpx.Response]:
    """Send a request for each key, all at once, and return the answers in the same order."""

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(ASGIHandler(), raise_app_exceptions=False)
        cookies = {name: morsel.value for name, morsel in service.caller.client.cookies.items()} | {
            "csrftoken": CSRF_TOKEN
        }
        headers = service.caller.headers | {"X-CSRFToken": CSRF_TOKEN}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://testserver", cookies=cookies, headers=headers
        ) as client:
            return await asyncio.gather(
                *(client.post("/view/", **parts(service, key), timeout=60) for key in keys)
            )

    # Not async_to_sync: below it all requests would share this thread.
    return asyncio.run(send())


def parts(service: Service, key: str) -> dict[str, Any]:
    """Return what a request consists of, the key where this kind of view looks for it."""
    if service.kind.by_form:
        return {"data": {"idempotency_key": key}}
    return {"json": {}, "headers": {"Idempotency-Key": key}}


def test_12_identical_requests_on_one_loop_run_the_view_once(service: Service) -> None:
    work = service.serve()
    answers = send_at_once(service, *["key-1"] * 6)
    created = [answer for answer in answers if answer.status_code == 201]
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len({answer.content for answer in created}) == 1
    assert (work.runs, Entry.objects.count()) == (1, 1)


def test_16_failing_requests_take_nothing_from_those_beside_them(service: Service) -> None:
    under_way = set()

    def do(request: HttpRequest) -> Reply:
        reply, key = create(request), request.idempotency_key.idempotency_key
        under_way.add(key)
        eventually(lambda: len(under_way) == 4, seconds=20)
        return crash() if key.startswith("bad") else reply

    service.serve(Work(do))
    answers = send_at_once(service, "good-1", "bad-1", "good-2", "bad-2")
    assert [answer.status_code for answer in answers] == [201, 500, 201, 500]
    assert set(Entry.objects.values_list("idempotency_key__idempotency_key", flat=True)) == {
        "good-1",
        "good-2",
    }
