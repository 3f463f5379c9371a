"""Values that no report of an error shows.

Reports of errors, such as Django's debug page and the events of an error tracker, print the local
variables of each frame. While code of the project runs, a frame of this app may hold a key, a token,
a seed, a body or arguments only in a ``Hidden``, or in another object whose ``repr()`` does not show
them and that is no collection.
"""

from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Hidden(Generic[Value]):
    """A value that no ``repr()`` shows."""

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value


#: The parameters of a statement, by name.
Parameters = Hidden[dict[str, Any]]
