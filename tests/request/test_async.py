"""Async views: under ASGI each request has a thread with its connection, and no code blocks the
event loop."""

import asyncio
import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, connections
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.test import AsyncClient, RequestFactory
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from idempotency._async import awaited
from idempotency.completer import complete_once
from idempotency.decorators import idempotent
from idempotency.jobs import astage_job
from idempotency.models import IdempotencyKey, StagedJob
from idempotency.phases import atomic_phase
from tests.kit.ageing import make_older
from tests.kit.asgi import ask, begin, hang_up, run
from tests.kit.serving import Sender
from tests.models import Entry

WAIT_SECONDS = 60
Serve = Callable[..., None]


async def create(request: HttpRequest) -> JsonResponse:
    entry = await Entry.objects.acreate(name="made", idempotency_key=request.idempotency_key)
    return JsonResponse({"id": entry.pk}, status=201)


@idempotent(recovery_points=["called"])
async def phased(request: HttpRequest) -> HttpResponse:
    key = request.idempotency_key
    async for recovery_point in key.aphases():
        match recovery_point:
            case "started":
                async with key.call("sms", at_most_once=True) as call:
                    if call.due:
                        call.record("sent")
                async with atomic_phase(key) as phase:
                    phase.set_recovery_point("called")
            case "called":
                async with atomic_phase(key) as phase:
                    assert await sync_to_async(lambda: connection.in_atomic_block)()
                    await astage_job("tests.kit.jobs.anything", {"text": "hello"})
                    phase.set_response(await create(request))
    return key.response()


@pytest.mark.parametrize("view", [idempotent(create), phased], ids=["plain", "phased"])
def test_an_async_view_runs_once_and_is_replayed(view: Any, serve: Serve, sender: Sender) -> None:
    serve(view=view)
    first, second = sender.send(), sender.send()
    assert (first.status_code, second.status_code, second.content) == (201, 201, first.content)
    assert second["Idempotent-Replayed"] == "true"
    assert sender.send(body={"a": 2}).status_code == 422
    assert Entry.objects.count() == 1
    assert StagedJob.objects.count() == (view is phased)


def test_a_safe_method_of_an_async_view_needs_no_key(serve: Serve, sender: Sender) -> None:
    @idempotent
    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(f"{request.method} {request.idempotency_key}")

    serve(view=view)
    assert sender.send(method="GET", key=None).content == b"GET None"


def test_what_an_async_view_wrote_is_rolled_back_when_it_fails(
    serve: Serve, sender: Sender
) -> None:
    fails = [True]

    @idempotent
    async def view(request: HttpRequest) -> HttpResponse:
        response = await create(request)
        if fails.pop():
            raise RuntimeError("boom")
        return response

    serve(view=view)
    assert sender.send().status_code == 500
    assert (Entry.objects.count(), IdempotencyKey.objects.count()) == (0, 0)
    fails.append(False)
    assert sender.send().status_code == 201
    assert Entry.objects.count() == 1


def test_an_async_404_is_stored(serve: Serve, sender: Sender) -> None:
    runs = []

    @idempotent
    async def view(request: HttpRequest) -> HttpResponse:
        runs.append(1)
        raise Http404

    serve(view=view)
    assert [sender.send().status_code for _ in range(2)] == [404, 404]
    assert len(runs) == 1


def test_async_methods_of_a_class_based_view(serve: Serve, sender: Sender) -> None:
    class Transfers(View):
        async def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse("list")

        @idempotent
        async def post(self, request: HttpRequest) -> HttpResponse:
            return await create(request)

    serve(view=Transfers.as_view())
    assert sender.send(method="GET").content == b"list"
    first, second = sender.send(), sender.send()
    assert (first.status_code, second.content) == (201, first.content)
    assert Entry.objects.count() == 1


def test_the_completer_finishes_an_async_request(serve: Serve, sender: Sender) -> None:
    fails = [True]

    @idempotent(recovery_points=["unused"])
    async def view(request: HttpRequest) -> HttpResponse:
        key = request.idempotency_key
        async for _ in key.aphases():
            if fails.pop():
                raise RuntimeError("boom")
            async with atomic_phase(key) as phase:
                phase.set_response(await create(request))
        return key.response()

    serve(view=view)
    assert sender.send().status_code == 500
    make_older(400, "created_at", "last_run_at")
    fails.append(False)
    assert complete_once().finished == 1
    assert sender.send()["Idempotent-Replayed"] == "true"
    assert Entry.objects.count() == 1


def test_the_async_client_inside_a_transaction_of_a_test(db: None, serve: Serve) -> None:
    serve(view=idempotent(scope=lambda request: "everybody")(create))
    client = AsyncClient()
    headers = {"Idempotency-Key": "key-1"}
    first, second = (
        async_to_sync(client.post)("/view/", {"a": 1}, headers=headers) for _ in range(2)
    )
    assert (first.status_code, second.content) == (201, first.content)


@pytest.mark.postgres
def test_a_waiting_request_holds_neither_the_loop_nor_another_transaction(
    transactional_db: None, serve: Serve
) -> None:
    async def scenario() -> None:
        reached, go = asyncio.Event(), asyncio.Event()

        @csrf_exempt
        @idempotent(scope=lambda request: "everybody")
        async def view(request: HttpRequest) -> HttpResponse:
            response = await create(request)
            if json.loads(request.body) == "wait":
                reached.set()
                await asyncio.wait_for(go.wait(), WAIT_SECONDS)
            return response

        serve(view=view)
        slow = asyncio.create_task(ask("/view/", "slow", b'"wait"'))
        await asyncio.wait_for(reached.wait(), WAIT_SECONDS)
        status, _, _ = await ask("/view/", "quick")
        assert status == 201
        status, headers, _ = await ask("/view/", "slow", b'"wait"')
        assert (status, headers["Retry-After"]) == (409, "1")
        assert await Entry.objects.acount() == 1, "the quick one committed alone"
        go.set()
        assert (await slow)[0] == 201
        assert (await ask("/view/", "slow", b'"wait"'))[1]["Idempotent-Replayed"] == "true"
        assert await Entry.objects.acount() == 2

    run(scenario)


@pytest.mark.postgres
def test_a_request_whose_client_hung_up_leaves_nothing_and_can_be_sent_again(
    transactional_db: None, serve: Serve
) -> None:
    async def scenario() -> None:
        reached, never = asyncio.Event(), asyncio.Event()
        waits = [False, True]

        @csrf_exempt
        @idempotent(scope=lambda request: "everybody")
        async def view(request: HttpRequest) -> HttpResponse:
            response = await create(request)
            if waits.pop():
                reached.set()
                await never.wait()
            return response

        serve(view=view)
        application = await begin("/view/", "key-1", b"{}")
        await asyncio.wait_for(reached.wait(), WAIT_SECONDS)
        await application.send_input({"type": "http.disconnect"})
        await application.wait(WAIT_SECONDS)
        status, headers, _ = await ask("/view/", "key-1")
        assert (status, "Idempotent-Replayed" in headers) == (201, False)
        assert await Entry.objects.acount() == 1

    run(scenario)


@pytest.mark.postgres
def test_a_phased_view_goes_on_after_its_client_has_hung_up(
    transactional_db: None, serve: Any
) -> None:
    """Otherwise an at-most-once call would be in doubt each time a browser tab is closed."""

    async def scenario() -> None:
        reached, hung_up = asyncio.Event(), asyncio.Event()
        sent: list[str] = []

        @csrf_exempt
        @idempotent(recovery_points=[], scope=lambda request: "everybody")
        async def view(request: HttpRequest) -> HttpResponseBase:
            key = request.idempotency_key
            async for _ in key.aphases():
                async with key.call("sms", at_most_once=True) as call:
                    if call.due:
                        reached.set()
                        await hung_up.wait()
                        sent.append("sms")
                        call.record("sent")
                async with atomic_phase(key) as phase:
                    phase.set_response(HttpResponse(status=201))
            return key.response()

        serve(view=view)
        await hang_up("/view/", reached, hung_up)
        status, headers, _ = await ask("/view/", "key-1")
        assert (status, "Idempotent-Replayed" in headers, sent) == (201, True, ["sms"])

    run(scenario)


@pytest.mark.postgres
@pytest.mark.parametrize("at_most_once", [False, True])
def test_two_tasks_of_one_thread_share_no_transaction_but_wait_for_calls_together(
    at_most_once: Any, transactional_db: None
) -> None:
    """Each asyncio task has a key; both use the connection of the one thread in which they wait for
    the database."""
    refused: list[str] = []

    @idempotent(recovery_points=[], scope=lambda request: "everybody")
    async def view(request: HttpRequest) -> HttpResponseBase:
        key = request.idempotency_key
        async for _ in key.aphases():
            async with key.call("sms", at_most_once=at_most_once) as call:
                if key.idempotency_key == "outer":
                    await asyncio.create_task(ask("inner"))
                if at_most_once:
                    call.record()
            async with atomic_phase(key) as phase:
                if key.idempotency_key == "outer":
                    await asyncio.create_task(attempt(key))
                phase.set_response(HttpResponse(key.idempotency_key))
        return key.response()

    async def attempt(key: IdempotencyKey) -> None:
        with pytest.raises(RuntimeError, match="Another asyncio task holds a transaction") as told:
            async with atomic_phase(key):
                pass
        refused.append(str(told.value))

    async def ask(name: str) -> HttpResponseBase:
        given = RequestFactory().post("/", headers={"Idempotency-Key": name})
        return await view(given)

    async def whole() -> None:
        try:
            answer = await ask("outer")
            assert (answer.status_code, answer.content) == (200, b"outer")
        finally:
            await sync_to_async(connections.close_all)()

    asyncio.run(whole())
    assert len(refused) == 1
    assert IdempotencyKey.objects.finished().count() == 2


@pytest.mark.parametrize(
    ("block", "word"),
    [("phases", "aphases"), ("atomic_phase", "async with"), ("call", "async with")],
)
def test_an_async_view_that_uses_the_form_of_a_sync_view_reads_the_right_one(
    block: str, word: str, serve: Serve, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    @idempotent(recovery_points=[])
    async def view(request: HttpRequest) -> HttpResponse:
        key: Any = request.idempotency_key
        if block == "phases":
            async for _ in key.phases():
                pass
        with atomic_phase(key) if block == "atomic_phase" else key.call("sms"):
            pass
        return HttpResponse()

    serve(view=view)
    assert sender.send().status_code == 500
    assert word in caplog.text


@pytest.mark.parametrize("to_end", [False, True])
def test_what_a_coroutine_sets_in_the_context_reaches_its_sync_caller(to_end: bool) -> None:
    async def work() -> str:
        variable.set("set")
        return "returned"

    variable = ContextVar("variable", default="")
    assert (awaited(work(), to_end=to_end), variable.get()) == ("returned", "set")
