"""The decorators outside ``@idempotent``, and the methods ``dispatch()`` that run before it, for
system checks.

A decorator that does not use ``functools.wraps`` hides itself and the decorators inside it.
"""

from collections.abc import Iterator
from inspect import isfunction, unwrap
from typing import Any

from idempotency._http.routes import class_of
from idempotency._http.view import View

#: Packages whose ``dispatch()`` judges the request and its sender only.
_FRAMEWORKS = ("django", "rest_framework", "ninja", "idempotency")
#: These call the handler, and no ``dispatch()`` of another class.
_LAST = ("django.views.generic.base.View.dispatch", "rest_framework.views.APIView.dispatch")


def wrapped(view: View) -> Iterator[View]:
    """Yield a view and the functions that its decorators wrap, the outermost first."""
    layer: View | None = view
    while layer is not None:
        yield layer
        layer = getattr(layer, "__wrapped__", None)


def decorators_outside(view: View) -> Iterator[View]:
    """Yield the decorators outside ``@idempotent``, or all decorators of an unprotected view, the
    outermost first."""
    for layer in wrapped(view):
        inner = getattr(layer, "__wrapped__", None)
        if inner is None or _is_innermost(layer):
            return
        yield layer


def handlers(callback: View, *methods: str) -> Iterator[View]:
    """Yield the callback, and the handlers of its class for these methods."""
    yield callback
    actions = getattr(callback, "actions", None) or {}
    for method in methods:
        name = actions.get(method.lower(), method.lower())
        if handler := getattr(class_of(callback), name, None):
            yield handler


def dispatches_of_project(callback: View) -> list[str]:
    """Return the dotted paths of the methods ``dispatch()`` outside ``@idempotent`` that are not of
    a framework."""
    attributes = map(vars, getattr(class_of(callback), "__mro__", ()))
    dispatches = [every["dispatch"] for every in attributes if "dispatch" in every]
    if hasattr(callback, "idempotency") and not any(map(_is_protected, dispatches)):
        return []  # They run inside.
    found = []
    for method in dispatches:
        path = _path(unwrap(method))
        if _is_protected(method) or path in _LAST:
            break
        if path.partition(".")[0] not in _FRAMEWORKS:
            found.append(path)
    return found


def _is_innermost(layer: View) -> bool:
    """Return whether this layer is ``@idempotent`` itself, or a ``method_decorator`` with it."""
    return _is_protected(layer) and not _is_protected(getattr(layer, "__wrapped__", None))


def _is_protected(view: Any) -> bool:
    return hasattr(view, "idempotency")


def _path(function: Any) -> str:
    """Return the dotted path of a function, or of the type of another object."""
    named = function if isfunction(function) else type(function)
    return f"{named.__module__}.{named.__qualname__}"
