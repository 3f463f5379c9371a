"""Find views in a URLconf, the view of a stored request, and the options of a view."""

import logging
from collections.abc import Callable, Iterator
from inspect import getclosurevars, isfunction
from typing import Any
from urllib.parse import unquote

from django.conf import settings
from django.contrib.admindocs import utils as admindocs
from django.db import Error
from django.http import Http404
from django.urls import Resolver404, ResolverMatch, URLPattern, URLResolver, resolve
from django.urls.resolvers import RegexPattern
from django.utils import translation

from idempotency._engine.errors import accepts_writes, serialization_failed
from idempotency._engine.events import about
from idempotency._http.options import OnAbandon, Options
from idempotency._http.stored_request import urlconf_of
from idempotency._http.view import View
from idempotency._text import error_text
from idempotency.models import IdempotencyKey

logger = logging.getLogger("idempotency")

#: Functions that find the options of views of other frameworks; ``contrib`` adds them.
FINDERS: list[Callable[[View, str], Options | None]] = []
#: Functions that find the methods of views of other frameworks; ``contrib`` adds them.
METHODS: list[Callable[[View], set[str] | None]] = []
#: The handlers that the methods of generic views of Django REST framework call.
_GENERIC = {"post": "create", "put": "update", "patch": "partial_update", "delete": "destroy"}


def every_view(
    resolver: URLResolver, prefix: str = "/", namespace: str = ""
) -> Iterator[tuple[str, str, View]]:
    """Yield the route, the name for ``reverse()`` and the callback of each view; a regular
    expression is simplified."""
    for found in resolver.url_patterns:
        pattern = str(found.pattern)
        is_regex = isinstance(found.pattern, RegexPattern)
        path = prefix + (_simplified(pattern) if is_regex else pattern)
        if isinstance(found, URLPattern):
            yield path, f"{namespace}{found.name}" if found.name else "", found.callback
        else:
            inner = f"{namespace}{found.namespace}:" if found.namespace else namespace
            yield from every_view(found, path, inner)


def match_of(key: IdempotencyKey) -> ResolverMatch:
    """Return the match of a stored request's path in its URLconf. Raises Resolver404."""
    path, urlconf = unquote(key.request_path.partition("?")[0]), urlconf_of(key)
    try:
        # Under i18n_patterns a path resolves only in its language.
        language = translation.get_language_from_path(path) or settings.LANGUAGE_CODE
        with translation.override(language):
            return resolve(path, urlconf)
    except ImportError as error:
        raise Resolver404({"path": path, "tried": [urlconf]}) from error


def options_of(view: View, method: str) -> Options | None:
    """Return the options of a resolved view for a method, or None."""
    if found := getattr(view, "idempotency", None):
        return found  # type: ignore[no-any-return]
    # A view set of Django REST framework maps methods to handlers in ``actions``.
    actions, name, owner = getattr(view, "actions", None) or {}, method.lower(), class_of(view)
    handler = getattr(owner, actions.get(name, name), None)
    inner = getclosurevars(handler).nonlocals.get("func") if isfunction(handler) else None
    is_generic = hasattr(view, "cls") and not actions
    generic = getattr(owner, _GENERIC.get(name, ""), None) if is_generic else None
    # as_view() copies the attributes of the outermost dispatch(), which a subclass may have
    # overridden.
    called = [vars(base).get("dispatch") for base in getattr(owner, "__mro__", ())]
    called += [handler, inner, generic]
    candidates = [getattr(method, "idempotency", None) for method in called]
    candidates += [find(view, method) for find in FINDERS]
    return next((candidate for candidate in candidates if candidate is not None), None)


def options_for(key: IdempotencyKey) -> Options | None:
    """Return the options of a stored request's view; None if its path does not resolve. Raises
    errors of the database."""
    try:
        return _options_for(key)
    except Exception as error:
        # A path converter may raise anything, also errors of another database.
        if isinstance(error, Error) and (
            serialization_failed(error) or not accepts_writes(str(key._state.db))
        ):
            raise
        text = "the path of key %s does not resolve: %s"
        logger.warning(text, key.key_hash, error_text(error), extra=about(key))
        return None


def has_on_abandon(key: IdempotencyKey) -> bool:
    options = options_for(key)
    return options is not None and options.on_abandon is not None


def on_abandon_of(key: IdempotencyKey) -> OnAbandon | None:
    """Return the view's ``on_abandon``. Raises what a path converter raises: the view is unknown
    then, not missing."""
    options = _options_for(key)
    return options.on_abandon if options else None


def _options_for(key: IdempotencyKey) -> Options | None:
    try:
        return options_of(match_of(key).func, key.request_method)
    except Http404:  # of the resolver, or of a path converter
        return None


def class_of(view: View) -> Any:
    # of Django, of Django REST framework
    return getattr(view, "view_class", None) or getattr(view, "cls", None)


def _simplified(regex: str) -> str:
    """Return a readable route: ``^rides/(?P<pk>[0-9]+)$`` becomes ``rides/<pk>``."""
    named = admindocs.replace_named_groups(admindocs.remove_non_capturing_groups(regex))
    simplified: str = admindocs.replace_metacharacters(admindocs.replace_unnamed_groups(named))
    return simplified
