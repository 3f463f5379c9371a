"""Exclude protected views from ATOMIC_REQUESTS, because they open their transactions themselves.

Django reads the mark of the callback that a URL resolves to. Class-based views, Django REST
framework and Ninja make it without copying the mark of the decorated method. Therefore callbacks
are found and marked in the URLconf.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from django.db import connections
from django.db.transaction import Atomic
from django.http import HttpRequest
from django.urls import URLResolver, get_resolver, get_urlconf

from idempotency._http.nesting import outer_run
from idempotency._http.options import Options
from idempotency._http.routes import every_view, options_of
from idempotency._http.view import atomic_aliases

_METHODS = ("POST", "PUT", "PATCH", "DELETE")


class _EveryAlias(set[str]):
    """The set of all database aliases, including ones that are configured later; see
    ``non_atomic_requests``."""

    def __contains__(self, alias: object) -> bool:
        return True


EVERY_ALIAS = _EveryAlias()


def exclude_protected_views(**kwargs: Any) -> None:
    """Exclude each protected view from ATOMIC_REQUESTS, at the first request after the URLs have
    changed. All methods of a view are excluded, also unprotected ones, because Django knows only
    the callback."""
    if atomic_aliases():
        _mark(get_resolver(get_urlconf()))


def suspend_atomic_requests(request: HttpRequest, options: Options) -> AbstractContextManager[None]:
    """Run the block outside the transactions of ATOMIC_REQUESTS, for a view that was not marked in
    time. Such a view is in a URLconf that a middleware chose, and is found after Django opened its
    transactions. These contain earlier work such as authentication. They are committed, and opened
    again for Django to end."""
    blocks = _blocks_of_django(request, options)
    return _outside(blocks) if blocks else nullcontext()


@contextmanager
def _outside(blocks: list[Atomic]) -> Iterator[None]:
    with ExitStack() as stack:
        for block in blocks:
            block.__exit__(None, None, None)
            stack.callback(block.__enter__)
        yield


def _blocks_of_django(request: HttpRequest, options: Options) -> list[Atomic]:
    """Return the blocks that Django opened around the view of a request; none if other blocks are
    open, which is refused later."""
    view = request.resolver_match.func if request.resolver_match else None
    # A view that only calls the protected one may have written in its transaction.
    if view is None or not (aliases := atomic_aliases(view)) or outer_run(request):
        return []
    if options_of(view, request.method or "") is not options:
        return []
    found: list[Atomic] = []
    for name in aliases:
        blocks = connections[name].atomic_blocks
        blocks = [block for block in blocks if not getattr(block, "_from_testcase", False)]
        if len(blocks) != 1:
            return []
        found += blocks
    return found


@lru_cache(maxsize=8)
def _mark(resolver: URLResolver) -> None:
    for _, _, view in every_view(resolver):
        if getattr(view, "_non_atomic_requests", None) is EVERY_ALIAS:
            continue  # A bound method has the mark of its function, and takes no attributes.
        if any(options_of(view, method) for method in _METHODS):
            view._non_atomic_requests = EVERY_ALIAS  # type: ignore[attr-defined]
