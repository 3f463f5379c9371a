"""A process that never closes connections loses the connection to a second database: only the
first call fails."""

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections, transaction
from django.http import HttpRequest, HttpResponse
from rq import Retry

from idempotency._job_run import job_run
from idempotency.contrib import rq
from idempotency.decorators import idempotent
from idempotency.exceptions import Unavailable
from idempotency.operations import Rejected, operation
from tests import operations
from tests.kit.outages import cut_this_connection
from tests.kit.serving import Sender

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.django_db(transaction=True, databases=["default", "shard_b"]),
]


def _read_shard() -> None:
    with connections["shard_b"].cursor() as cursor:
        cursor.execute("SELECT 1")


def _lose_shard() -> None:
    """Lose the connection, and meet the loss."""
    _read_shard()
    cut_this_connection("shard_b")
    with pytest.raises(DatabaseError):
        _read_shard()


@operation("tests.read_shard")
def read_shard(*, name: str) -> str:
    _read_shard()
    return name


@operation("tests.read_shard_or_wait")
def read_shard_or_wait(*, name: str) -> str:
    try:
        return read_shard.once(f"inner {name}", name=name)
    except DatabaseError:
        return "later"


@operation("tests.read_shard_or_fail")
def read_shard_or_fail(*, name: str) -> str:
    try:
        _read_shard()
    except DatabaseError:
        raise ValueError("The shard does not answer.") from None
    return name


def _made_of_the_loss() -> None:
    try:
        _read_shard()
    except DatabaseError:
        raise Rejected("unknown") from None


@operation("tests.refuse")
def refuse(*, name: str) -> str:
    raise Rejected(name)


def _inside_another(name: str, bank: operations.Bank) -> object:
    bank.before = lambda: read_shard.once(f"inner {name}", name=name) and None
    return operations.charge.once(name, name=name, cents=1) and name


def _refused_after_a_step(name: str, bank: operations.Bank) -> object:
    bank.before = _made_of_the_loss
    return operations.pay_without_undo.once(name, name=name, cents=1) and name


def _in_a_transaction(name: str, bank: operations.Bank) -> object:
    with transaction.atomic():
        return read_shard.once(name, name=name)


def _refused_in_a_transaction(name: str, bank: operations.Bank) -> object:
    with pytest.raises(Rejected), transaction.atomic():
        refuse.once(name, name=name)
    return name


def _with_another_result(name: str, bank: operations.Bank) -> object:
    return read_shard_or_wait.once(name, name=name)


def _with_an_error_of_its_own(name: str, bank: operations.Bank) -> object:
    return read_shard_or_fail.once(name, name=name)


def _in_a_job(name: str, bank: operations.Bank) -> object:
    return rq.run_once("tests.jobs.of_shard", {"name": name}, str(uuid4()))


def _in_a_job_that_calls_an_operation(name: str, bank: operations.Bank) -> object:
    return rq.run_once("tests.jobs.of_operation", {"name": name}, str(uuid4()))


def _in_a_job_that_asks_to_come_back(name: str, bank: operations.Bank) -> object:
    return rq.run_once("tests.jobs.that_comes_back", {"name": name}, str(uuid4()))


def _in_a_task(name: str, bank: operations.Bank) -> object:
    with job_run("tests.jobs.of_shard", str(uuid4()), None):
        return _call_job("tests.jobs.of_shard", {"name": name})


def _call_job(job: str, given: dict[str, Any], using: str | None = None) -> object:
    if job == "tests.jobs.of_operation":
        return read_shard.once(given["name"], name=given["name"])
    try:
        _read_shard()
    except DatabaseError:
        if job == "tests.jobs.that_comes_back":
            return Retry(max=1)
        raise
    return given["name"]


@pytest.mark.parametrize(
    "call",
    [
        _inside_another,
        _refused_after_a_step,
        _in_a_transaction,
        _refused_in_a_transaction,
        _with_another_result,
        _with_an_error_of_its_own,
        _in_a_job,
        _in_a_job_that_calls_an_operation,
        _in_a_job_that_asks_to_come_back,
        _in_a_task,
    ],
)
def test_only_the_first_call_fails(
    call: Callable[[str, operations.Bank], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = operations.Bank()
    monkeypatch.setattr(operations, "bank", bank)
    monkeypatch.setattr(rq, "call_job", _call_job)
    monkeypatch.setattr(rq.time, "sleep", lambda seconds: None)
    _lose_shard()
    try:
        first = call("one", bank)
    except (DatabaseError, Unavailable, ValueError) as error:
        first = error
    assert first != "one"
    assert call("two", bank) == "two"


def test_a_thread_of_a_view_fails_only_once(serve: Callable[..., None], sender: Sender) -> None:
    """The thread has its own connections, and the key of the view in its context."""

    @idempotent()
    async def view(request: HttpRequest) -> HttpResponse:
        call = sync_to_async(read_shard.once, thread_sensitive=False, executor=threads)
        name = request.headers["Idempotency-Key"]
        try:
            return HttpResponse(await call(name, name=name), status=201)
        except Unavailable:
            return HttpResponse(status=503)

    serve(view=view)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(_lose_shard).result()
        try:
            assert [sender.send(key=name).status_code for name in ("one", "two")] == [503, 201]
        finally:
            threads.submit(connections.close_all).result()


def test_a_task_that_a_view_has_left_behind_fails_only_once(
    serve: Callable[..., None], sender: Sender
) -> None:
    contexts: list[contextvars.Context] = []

    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        contexts.append(contextvars.copy_context())  # as asyncio.create_task() does
        return HttpResponse(status=201)

    serve(view=view)
    assert sender.send().status_code == 201
    _lose_shard()
    with pytest.raises(Unavailable):
        contexts[0].run(read_shard.once, "one", name="one")
    assert contexts[0].run(read_shard.once, "two", name="two") == "two"
