"""Values that no report of an error shows.

Reports of errors, such as Django's debug page and the events of an error tracker, print the local
variables of each frame. While code of the project runs, a frame of this app may hold a key, a
token, a seed, a body or arguments only in a ``Hidden``, or in another object whose ``repr()`` does
not show them and that is no collection.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
Result = TypeVar("Result")


class Hidden(Generic[Value]):
    """A value that no ``repr()`` shows."""

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value


class Arguments:
    """The arguments of a call, which no ``repr()`` shows."""

    __slots__ = ("_args", "_kwargs")

    def __init__(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs

    def passed_to(self, function: Callable[..., Result]) -> Result:
        """Call the function with the arguments, and return its result."""
        return function(*self._args, **self._kwargs)


#: The parameters of a statement, by name.
Parameters = Hidden[dict[str, Any]]
