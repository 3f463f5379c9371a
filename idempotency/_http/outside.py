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


def outside(view: View) -> Iterator[View]:
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
        if handler := getattr(
            class_of(callback), actions.get(method.lower(), method.lower()), None
        ):
            yield handler


def foreign_dispatches(callback: View) -> list[str]:
    """Return the dotted paths of the methods ``dispatch()`` outside ``@idempotent`` that are not of
    a framework."""
    dispatches = [
        vars(base)["dispatch"]
        for base in getattr(class_of(callback), "__mro__", ())
        if "dispatch" in vars(base)
    ]
    if hasattr(callback, "idempotency") and not any(
        hasattr(method, "idempotency") for method in dispatches
    ):
        return []  # They run inside.
    found = []
    for method in dispatches:
        path = _path(unwrap(method))
        if hasattr(method, "idempotency") or path in _LAST:
            break
        if path.partition(".")[0] not in _FRAMEWORKS:
            found.append(path)
    return found


def _is_innermost(layer: View) -> bool:
    """Return whether this layer is ``@idempotent`` itself, or a ``method_decorator`` with it."""
    return hasattr(layer, "idempotency") and not hasattr(
        getattr(layer, "__wrapped__", None), "idempotency"
    )


def _path(function: Any) -> str:
    """Return the dotted path of a function, or of the type of another object."""
    if isfunction(function):
        return f"{function.__module__}.{function.__qualname__}"
    return f"{type(function).__module__}.{type(function).__qualname__}"
