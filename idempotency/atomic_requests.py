"""ATOMIC_REQUESTS and protected views: such a view opens its transactions itself, so Django must not put one around it.

Django asks the function that a URL leads to. Of a class, of Django REST framework and of Ninja, that function is made late, and
takes no mark over from the method that is decorated. So it is marked where it is found: in the URLs.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from django.db import connections
from django.urls import URLPattern, URLResolver, get_resolver, get_urlconf

from idempotency.options import options_of

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
