"""ATOMIC_REQUESTS and protected views: such a view opens its transactions itself, so Django must not put one around it.

Django asks the function that a URL leads to. Of a class, of Django REST framework and of Ninja, that function is made late, and
takes no mark over from the method that is decorated. So it is marked where it is found: in the URLs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

from django.db import connections
from django.db.transaction import Atomic
from django.http import HttpRequest
from django.urls import URLPattern, URLResolver, get_resolver, get_urlconf

from idempotency.options import Options, options_of

_METHODS = ("POST", "PUT", "PATCH", "DELETE")


class _EveryAlias(set[str]):
    """The set of all database aliases, of those too that the settings do not know yet; see ``non_atomic_requests``."""

    def __contains__(self, alias: object) -> bool:
        return True


EVERY_ALIAS = _EveryAlias()


def leave_out_protected_views(**kwargs: Any) -> None:
    """Take each protected view out of ATOMIC_REQUESTS, at the first request that comes after the URLs have changed.

    All methods of a view are taken out, those that are not protected too: Django knows one view for them all.
    """
    if any(values.get("ATOMIC_REQUESTS") for values in connections.settings.values()):
        _mark(get_resolver(get_urlconf()))


@contextmanager
def outside_of_atomic_requests(request: HttpRequest, options: Options) -> Iterator[None]:
    """Run the block outside of the transactions of a request whose view was not marked in time.

    That is a view in a URLconf which a middleware has chosen: it is known only now, when Django has opened its transactions.
    They hold what came before the view, such as authentication. They are committed, and opened anew for Django to end.
    """
    with ExitStack() as stack:
        for block in _blocks_of_django(request, options):
            block.__exit__(None, None, None)
            stack.callback(block.__enter__)
        yield


def _blocks_of_django(request: HttpRequest, options: Options) -> list[Atomic]:
    """Return the blocks that Django has opened around the view of a request; none if more is open, which is refused later."""
    view = request.resolver_match.func if request.resolver_match else None
    left_out = getattr(view, "_non_atomic_requests", ())
    aliases = [name for name, of in connections.settings.items() if of.get("ATOMIC_REQUESTS") and name not in left_out]
    # A view that merely calls the protected one may have written something in its transaction.
    if view is None or not aliases or options_of(view, request.method or "") is not options:
        return []
    open_blocks = [
        [block for block in connections[name].atomic_blocks if not getattr(block, "_from_testcase", False)] for name in aliases
    ]
    return [block for (block,) in open_blocks] if all(len(blocks) == 1 for blocks in open_blocks) else []


@lru_cache(maxsize=8)
def _mark(resolver: URLResolver) -> None:
    for view in _views(resolver):
        if any(options_of(view, method) for method in _METHODS):
            view._non_atomic_requests = EVERY_ALIAS  # type: ignore[attr-defined]


def _views(resolver: URLResolver) -> Iterator[Callable[..., Any]]:
    for pattern in resolver.url_patterns:
        if isinstance(pattern, URLPattern):
            yield pattern.callback
        else:
            yield from _views(pattern)
