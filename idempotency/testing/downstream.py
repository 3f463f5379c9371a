"""A fake of a downstream service, which records its effects; and a context manager that reports the
calls of your own fake."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakSet

from idempotency.testing.observing import reach
from idempotency.testing.places import users_line


@contextmanager
def downstream_call(name: str) -> Iterator[None]:
    """Mark the block as a call to a downstream service. The kit simulates a crash before the block,
    and after it.

    Wrap the effect of your own fake in this block. The kit detects calls over Python's sockets
    without it.
    """
    reach("before", "downstream call", name)
    yield
    reach("after", "downstream call", name)


class KeyReused(Exception):
    """The fake refuses a call, because an earlier call with the same idempotency key had other
    arguments."""


class Downstream:
    """A fake of a downstream service. Use it in place of the function that makes the call. It
    records each effect.

    ``answer`` is the return value of a call, or a function that computes it from the arguments of
    the call. ``key`` names the argument with the idempotency key, for a service that supports such
    keys: a second call with the same key has no effect and gets the first answer. If the other
    arguments of that call differ from those of the first call, the fake raises an exception, and
    the kit reports a failure. Without ``key``, each call takes effect. The kit finds the instances
    itself.
    """

    _all: "WeakSet[Downstream]" = WeakSet()
    _numbers = count()

    def __init__(self, name: str, answer: Any = None, *, key: str | None = None) -> None:
        self.name = name
        self.key = key
        self._answer = answer if callable(answer) else lambda *args, **kwargs: answer
        self._lock = threading.Lock()
        self.number = next(self._numbers)
        self.reset()
        self._all.add(self)

    def reset(self) -> None:
        """Delete the recorded effects, the refusals and the answers to known keys."""
        #: The effects: the arguments of each call that took effect.
        self.effects: list[dict[str, Any]] = []
        #: The keys and lines of those calls, in the same order.
        self.origins: list[tuple[Any, str]] = []
        #: A sentence about each call that was refused.
        self.refused: list[str] = []
        #: The arguments and the answer of the first call with each key.
        self._first: dict[Any, tuple[dict[str, Any], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with downstream_call(self.name), self._lock:
            given = kwargs.get(self.key) if self.key else None
            named = {name: value for name, value in kwargs.items() if name != self.key}
            arguments = {
                f"argument {number}": value for number, value in enumerate(args, 1)
            } | named
            if given is not None and given in self._first:
                first, answer = self._first[given]
                self._refuse_others(first, arguments)
                return answer
            answer = self._answer(*args, **kwargs)
            self.effects.append({"args": list(args), **named})
            self.origins.append((given, users_line()))
            self._first[given] = arguments, answer
            return answer

    def _refuse_others(self, first: dict[str, Any], arguments: dict[str, Any]) -> None:
        differing = [
            name for name in first | arguments if not _same(first.get(name), arguments.get(name))
        ]
        if differing:
            told = ", ".join(differing)
            self.refused.append(
                f"{self.name} got the same key with another value of {told}, at {users_line()}."
            )
            raise KeyReused(self.refused[-1])


def _same(one: Any, other: Any) -> bool:
    """Return whether two arguments are equal. If a class compares its objects by identity, two of
    its objects are equal here."""
    by_identity = type(one).__eq__ is object.__eq__  # type: ignore[comparison-overlap]
    return bool(one == other) or (by_identity and type(one) is type(other))


def refusals() -> list[str]:
    """Return a sentence about each call that was refused."""
    return [sentence for fake in living() for sentence in fake.refused]


def living() -> list[Downstream]:
    """Return the existing fakes by name; fakes with the same name are in the order of their
    creation."""
    return sorted(Downstream._all, key=lambda fake: (fake.name, fake.number))


def effects_of(call: Callable[[], Any] | list[Any] | None) -> dict[str, Any]:
    """Return the effects in downstream services: those that ``effects=`` of the user reports, and
    those of the ``Downstream`` fakes by name."""
    own = {} if call is None else {"effects=": call() if callable(call) else list(call)}
    found: dict[str, list[Any]] = {}
    for fake in living():
        if fake.effects:
            found.setdefault(fake.name, []).extend(fake.effects)
    return own | found
