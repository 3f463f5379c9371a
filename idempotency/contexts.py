"""One context manager for ``with`` and for ``async with``."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

from asgiref.sync import sync_to_async

Given = TypeVar("Given")
Arguments = ParamSpec("Arguments")


class EitherContext(Generic[Given]):
    """A context manager whose ends run in the thread that holds the connection: the caller's, or that of the async request."""

    def __init__(self, manager: AbstractContextManager[Given]) -> None:
        self._manager = manager

    def __enter__(self) -> Given:
        return self._manager.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._manager.__exit__(kind, error, traceback)

    async def __aenter__(self) -> Given:
        return await sync_to_async(self.__enter__)()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await sync_to_async(self.__exit__)(kind, error, traceback)


def either_context(function: Callable[Arguments, Iterator[Given]]) -> Callable[Arguments, EitherContext[Given]]:
    """Make a context manager of a generator function, as ``contextlib.contextmanager`` does, for ``async with`` too."""
    managed = contextmanager(function)

    @wraps(function)
    def make(*args: Arguments.args, **kwargs: Arguments.kwargs) -> EitherContext[Given]:
        return EitherContext(managed(*args, **kwargs))

    return make
