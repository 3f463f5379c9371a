"""What runs before ``@idempotent``: the decorators outside it, and the methods of a class that lead to its handler.

A decorator is named by its function. One that does not use ``functools.wraps`` hides itself and the decorators inside it.
"""

from collections.abc import Iterator
from inspect import getclosurevars, isfunction, unwrap
from typing import Any

from idempotency._request.lookup import class_of
from idempotency._request.view_call import View

#: Packages whose ``dispatch()`` judges the request and its sender only.
_FRAMEWORKS = ("django", "rest_framework", "ninja", "idempotency")
#: The methods of a class that run before its handler, in order; the last is of Django REST framework.
_BEFORE_HANDLER = ("setup", "dispatch", "initial")
#: These call the handler, and no ``dispatch()`` of another class.
_LAST = ("django.views.generic.base.View.dispatch", "rest_framework.views.APIView.dispatch")


def wrapped(view: View) -> Iterator[View]:
    """Yield a view and the functions that its decorators wrap, the outermost first."""
    layer: View | None = view
    while layer is not None:
        yield layer
        layer = getattr(layer, "__wrapped__", None)


def outside(view: View) -> Iterator[View]:
    """Yield the decorators outside ``@idempotent``, or all decorators of an unprotected view, the outermost first."""
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
        if handler := getattr(class_of(callback), actions.get(method.lower(), method.lower()), None):
            yield handler


def runs_before(callback: View, *methods: str) -> tuple[str, ...]:
    """Return the dotted paths of what runs before ``@idempotent``, the outermost first. Methods of a class are named if they
    are a project's, or a ``dispatch()`` that may refuse a request."""
    found = list(_decorators(callback))
    for name in _BEFORE_HANDLER:
        for method in _methods_before(callback, name):
            found += _decorators(method)
            path = _path(unwrap(method))
            if not hasattr(method, "idempotency") and path not in _LAST[:1] and (name == "dispatch" or _is_foreign(path)):
                found.append(path)
    for handler in handlers(callback, *methods):
        if handler is not callback and hasattr(handler, "idempotency"):
            found += _decorators(handler)
    return tuple(dict.fromkeys(found))


def foreign_dispatches(callback: View) -> list[str]:
    """Return the dotted paths of the methods ``dispatch()`` outside ``@idempotent`` that are of no framework."""
    found = [_path(unwrap(method)) for method in _methods_before(callback, "dispatch") if not hasattr(method, "idempotency")]
    return [path for path in dict.fromkeys(found) if _is_foreign(path)]


def _methods_before(callback: View, name: str) -> Iterator[Any]:
    """Yield the definitions of a method that run before ``@idempotent``, the outermost first. If one is decorated itself, it
    is the last."""
    owner = class_of(callback)
    bases = owner.__mro__ if owner is not None else ()
    whole = any(hasattr(vars(base).get("dispatch"), "idempotency") for base in bases)
    if (hasattr(callback, "idempotency") and not whole) or (whole and name == "initial"):
        return  # They run inside.
    for base in bases:
        if callable(method := vars(base).get(name)):  # ``initial`` of a form is a dict.
            yield method
            if hasattr(method, "idempotency") or _path(unwrap(method)) in _LAST:
                return


def _decorators(view: View) -> Iterator[str]:
    """Yield the dotted paths of the decorators outside ``@idempotent``, or of all if the view itself has none."""
    for layer in wrapped(view):
        code = getattr(layer, "__code__", None)
        if not hasattr(layer, "__wrapped__") or (code is not None and code.co_qualname.endswith(".as_view.<locals>.view")):
            return  # as_view() copies the attributes of dispatch().
        given = _given_to_method_decorator(layer)
        for decorator in given:
            if (path := _path(decorator)).startswith("idempotency."):
                return
            yield path
        if _is_innermost(layer):
            return
        if not given:
            yield _path(layer)


def _is_innermost(layer: View) -> bool:
    """Return whether this layer is ``@idempotent`` itself, or a ``method_decorator`` with it."""
    return hasattr(layer, "idempotency") and not hasattr(getattr(layer, "__wrapped__", None), "idempotency")


def _given_to_method_decorator(layer: View) -> list[Any]:
    """Return the decorators of a method that ``method_decorator`` made, the outermost first; empty for another function."""
    if not isfunction(layer) or layer.__globals__["__name__"] != "django.utils.decorators":
        return []
    return list(reversed(getclosurevars(layer).nonlocals.get("decorators", ())))


def _path(function: Any) -> str:
    """Return the dotted path of a function, of the decorator that made it, or of the type of an object."""
    if isfunction(function):
        return f"{function.__globals__['__name__']}.{function.__code__.co_qualname.partition('.<locals>')[0]}"
    return f"{type(function).__module__}.{type(function).__qualname__}"


def _is_foreign(path: str) -> bool:
    return path.partition(".")[0] not in _FRAMEWORKS
