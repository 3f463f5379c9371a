"""Context managers and calls that serve both ``def`` and ``async def``."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, copy_context
from functools import wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation

from idempotency import _hidden

Given = TypeVar("Given")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

#: The exceptions of a user's code that must not end a pass. SystemExit and CancelledError are not
#: subclasses of Exception.
FAILURES = (Exception, SystemExit, asyncio.CancelledError)

#: The asyncio tasks with an open block in each thread, the innermost last.
_tasks = threading.local()


class NeverEntered(asyncio.CancelledError):
    """The task was cancelled before the first line of the block."""


class EitherContext(Generic[Given]):
    """A context manager for ``with`` and ``async with``. It enters and exits in the thread that
    holds the connection: the thread of the caller or of the async request."""

    def __init__(self, manager: AbstractContextManager[Given], *, holds_transaction: bool) -> None:
        self._manager, self._holds_transaction = manager, holds_transaction
        self._entered = False

    def __enter__(self) -> Given:
        try:
            return self._manager.__enter__()
        except SynchronousOnlyOperation as error:
            raise SynchronousOnlyOperation(
                "In an async view, enter this block with `async with`."
            ) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._manager.__exit__(kind, error, traceback)

    async def __aenter__(self) -> Given:
        try:
            # The repr() of an asyncio task shows its result.
            return (await in_thread(self._enter_for, asyncio.current_task())).value
        except asyncio.CancelledError:
            if self._entered:  # The thread opened the block after the cancellation; close it.
                await self.__aexit__(NeverEntered, NeverEntered(), None)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await in_thread(self._exit, kind, error, traceback)

    def _enter_for(self, task: Any) -> _hidden.Hidden[Given]:
        open_blocks = vars(_tasks).setdefault("open", [])
        if self._holds_transaction and open_blocks and open_blocks[-1] is not task:
            raise RuntimeError(
                "Another asyncio task holds a transaction on the connection of this thread. The"
                " work of both tasks would be committed or rolled back together. Give each task its"
                " own thread: async with asgiref.sync.ThreadSensitiveContext()."
            )
        given = _hidden.Hidden(self.__enter__())
        self._entered = True
        if self._holds_transaction:
            open_blocks.append(task)
        return given

    def _exit(self, *error: Any) -> bool | None:
        try:
            return self.__exit__(*error)
        finally:
            if self._holds_transaction:
                _tasks.open.pop()


async def in_thread(function: Callable[..., Result], *args: Any) -> Result:
    """Call ``function`` in the thread of the connection and wait for it; raise a cancellation only
    after it returns.

    If a queued ``__aexit__`` were cancelled, its transaction would stay open and include later
    writes.
    """
    context = copy_context()
    work = asyncio.create_task(sync_to_async(function)(*args), context=context)
    cancelled = await _end_of(work, context)
    if cancelled is not None and not work.cancelled():
        raise cancelled from work.exception()
    return work.result()


async def _end_of(work: asyncio.Task[Any], context: Context) -> asyncio.CancelledError | None:
    """Wait for the end of a task in another context, and return the last cancellation of this task
    meanwhile. Copy the context variables that were set there, for example by hooks."""
    cancelled = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    here = copy_context()
    for variable, value in context.items():
        if variable not in here or here[variable] is not value:
            variable.set(value)
    return cancelled


def either_context(
    *, holds_transaction: bool
) -> Callable[[Callable[Arguments, Iterator[Given]]], Callable[Arguments, EitherContext[Given]]]:
    """Make a context manager of a generator function, like ``contextlib.contextmanager``, also for
    ``async with``. Set ``holds_transaction`` if the block is a transaction. Asyncio tasks must not
    share the transaction of a connection."""

    def decorate(
        function: Callable[Arguments, Iterator[Given]],
    ) -> Callable[Arguments, EitherContext[Given]]:
        managed = contextmanager(function)

        @wraps(function)
        def make(*args: Arguments.args, **kwargs: Arguments.kwargs) -> EitherContext[Given]:
            return EitherContext(managed(*args, **kwargs), holds_transaction=holds_transaction)

        return make

    return decorate


def awaited(result: Any, *, to_end: bool = False) -> Any:
    """Return the result of a function. Await it if it is a coroutine; its database calls stay in
    this thread. ASGI cancels it if the client hangs up, except ``to_end``: like the caller, it then
    goes on."""

    async def run() -> Any:
        return await result

    async def run_to_end() -> Any:
        work = asyncio.create_task(run(), context=(context := copy_context()))
        await _end_of(work, context)
        return work.result()

    if hasattr(type(result), "__await__"):
        return async_to_sync(run_to_end if to_end else run)()
    return result


def in_own_context(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Call the function in a copy of the context, so that a context variable that it sets is lost
    when it returns."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        given = _hidden.Arguments(args, kwargs)
        del args, kwargs
        return copy_context().run(given.passed_to, function)

    return call
