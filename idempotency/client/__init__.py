"""HTTP clients that send each unsafe request with a key, and retry the request until a response is
final. They use the library httpx or Requests.

This package does not import Django, so any Python program can use it. Install it with ``pip install
"django-idempotency[client]"`` (httpx) or ``"django-idempotency[requests]"``. Each library is
imported when one of its names is first used.

The key is held in memory. A client that may crash before the response must create the key itself
(``new_key``), commit the key together with the decision to call, and send the key in the header.
After a restart, only a request with the same key is a retry. A request with a new key would run
again.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from idempotency.client._rules import UNSAFE_METHODS, Retries, new_key

if TYPE_CHECKING:
    from idempotency.client._httpx import (
        AsyncIdempotentTransport,
        IdempotentTransport,
        make_async_client,
        make_client,
    )
    from idempotency.client._requests import IdempotentAdapter, make_session

__all__ = [
    "UNSAFE_METHODS",
    "AsyncIdempotentTransport",
    "IdempotentAdapter",
    "IdempotentTransport",
    "Retries",
    "make_async_client",
    "make_client",
    "make_session",
    "new_key",
]

_OF_REQUESTS = ("IdempotentAdapter", "make_session")


def __dir__() -> list[str]:
    """Return all public names, including those that are imported at their first use."""
    return __all__


def __getattr__(name: str) -> Any:
    """Return a public name, after an import of the library that it needs."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    library, extra = ("requests", "requests") if name in _OF_REQUESTS else ("httpx", "client")
    try:
        return getattr(import_module(f"{__name__}._{library}"), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{name} needs {library}: pip install "django-idempotency[{extra}]" ({error}).',
            name=error.name,
        ) from error
