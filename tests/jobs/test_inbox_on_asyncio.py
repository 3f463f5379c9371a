"""The inbox in a consumer on asyncio, whose database calls share one thread and so one
connection."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import connections

from idempotency.inbox import process_once
from idempotency.models import ProcessedMessage
from tests.kit.threads import background
from tests.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


class Trouble(Exception):
    """What goes wrong in these tests."""


def consume(consumer: Callable[[], Any]) -> Any:
    """Run an async consumer to its end; the connection of its thread ends with it."""

    async def run() -> Any:
        try:
            return await consumer()
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(run())


@pytest.mark.postgres
def test_a_message_is_refused_while_another_task_of_the_thread_works_on_one() -> None:
    """Else the work on a message that was taken would be lost with that on the other, which
    fails."""

    async def failing(entered: asyncio.Event, other_done: asyncio.Event) -> None:
        async with process_once("queue", "1"):
            await Entry.objects.acreate(name="1")
            entered.set()
            await asyncio.wait_for(other_done.wait(), 60)
            raise Trouble

    async def consumer() -> None:
        entered, other_done = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(failing(entered, other_done))
        await entered.wait()
        with pytest.raises(RuntimeError):
            async with process_once("queue", "2"):
                pytest.fail("its work would be in the transaction of the other message")
        other_done.set()
        with pytest.raises(Trouble):
            await first

    consume(consumer)
    assert not Entry.objects.exists()
    assert not ProcessedMessage.objects.exists()


@pytest.mark.postgres
def test_messages_in_threads_of_their_own_know_nothing_of_each_other() -> None:
    """What a consumer that takes several messages at once must do."""

    async def take(name: str, fails: bool, all_entered: asyncio.Barrier) -> None:
        async with ThreadSensitiveContext():
            try:
                async with process_once("queue", name):
                    await Entry.objects.acreate(name=name)
                    await asyncio.wait_for(all_entered.wait(), 60)
                    if fails:
                        raise Trouble
            finally:
                await sync_to_async(connections.close_all)()

    async def consumer() -> list[Any]:
        all_entered = asyncio.Barrier(4)
        return await asyncio.gather(
            *(take(f"{n}", n % 2 == 1, all_entered) for n in range(4)), return_exceptions=True
        )

    assert [type(end) for end in asyncio.run(consumer())] == [type(None), Trouble] * 2
    assert sorted(Entry.objects.values_list("name", flat=True)) == ["0", "2"]


@pytest.mark.postgres
@pytest.mark.processes
def test_a_wait_for_a_message_that_was_cancelled_takes_no_other_message_with_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    def first_delivery() -> None:
        with suppress(Trouble), process_once("queue", "1"):
            entered.set()
            assert leave.wait(60)
            raise Trouble

    async def consumer() -> None:
        # The error is held, as a log or a monitor holds it, and with it the frames it went through.
        with pytest.raises(TimeoutError) as held:
            async with asyncio.timeout(0.3), process_once("queue", "1"):
                pytest.fail("the first delivery holds the message")
        leave.set()
        async with process_once("queue", "2"):
            await Entry.objects.acreate(name="2")
        assert held.value

    with background(first_delivery):
        assert entered.wait(60)
        consume(consumer)
    assert Entry.objects.filter(name="2").exists()


@pytest.mark.postgres
def test_an_end_that_was_cancelled_while_it_waited_for_the_thread_is_still_an_end() -> None:
    """Else the transaction stays open, and what others write after it is never committed."""

    async def consumer() -> None:
        begun, leave, at_its_end = threading.Event(), threading.Event(), asyncio.Event()

        def keep_the_thread() -> None:
            begun.set()
            assert leave.wait(60)

        async def take() -> None:
            async with process_once("queue", "1"):
                await Entry.objects.acreate(name="1")
                busy.append(asyncio.create_task(sync_to_async(keep_the_thread)()))
                while not begun.is_set():
                    await asyncio.sleep(0.01)
                at_its_end.set()

        busy: list[Any] = []
        taking = asyncio.create_task(take())
        await at_its_end.wait()
        for _ in range(3):  # Once is not enough to be impatient.
            taking.cancel()
            await asyncio.sleep(0.01)
        leave.set()
        with pytest.raises(asyncio.CancelledError) as held:
            await taking
        await busy[0]
        await Entry.objects.acreate(name="other work")
        async with process_once("queue", "2"):
            await Entry.objects.acreate(name="2")
        assert held.value

    consume(consumer)
    assert sorted(Entry.objects.values_list("name", flat=True)) == ["1", "2", "other work"]
