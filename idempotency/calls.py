"""The view of a request with what it is called with: a function, a method or a coroutine function, of Django or of DRF."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from django.contrib.auth.mixins import AccessMixin
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponseBase
from django.views import View as BaseView

from idempotency.contexts import awaited

View = Callable[..., Any]

OUTSIDE = (
    " is decorated with @idempotent, outside of authentication and permissions: a stored response would be for everybody. Put "
    "it below them: on the function itself, or on the handler of the class (post(), create(), ...)."
)


@dataclass(frozen=True, slots=True)
class Call:
    """A view, its arguments, and the request among them."""

    view: View
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    request: HttpRequest
    #: The request as the view sees it: Django REST framework puts its own around Django's.
    seen_request: Any
    #: The instance of the class-based view that is at work, if it is one; it serves this request alone.
    owner: Any

    @classmethod
    def of(cls, view: View, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        """Find the request among the arguments: the first of a function, the second of a method."""
        for seen in args[:2]:
            if isinstance(seen, HttpRequest):
                method = getattr(view, "func", view)  # method_decorator binds a method with partial()
                owner = args[0] if args[0] is not seen else getattr(method, "__self__", None)
                if not isinstance(owner, BaseView):
                    owner = None  # whatever else it is may serve other requests too
                if hasattr(owner, "initialize_request"):
                    raise RuntimeError("dispatch() of a Django REST framework view" + OUTSIDE)
                if owner is not None and getattr(view, "__name__", "") == "dispatch" and access_is_checked_inside(type(owner)):
                    raise RuntimeError(f"dispatch() of {type(owner).__name__}, which checks access there" + OUTSIDE)
                return cls(view, args, kwargs, seen, seen, owner)
            if hasattr(seen, "parser_context") and isinstance(inner := getattr(seen, "_request", None), HttpRequest):
                return cls(view, args, kwargs, inner, seen, seen.parser_context["view"])
        raise TypeError("@idempotent protects views: the first argument of a function, the second of a method, is the request.")

    def __call__(self) -> Any:
        """Call the view. A coroutine runs on the event loop, and its database calls in this thread, inside its transaction."""
        return awaited(self.view(*self.args, **self.kwargs))

    def response(self) -> HttpResponseBase:
        """Call the view and return its response with its body made."""
        return self.rendered(self())

    def named_by(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the keyword arguments of the view that ``function`` has parameters for."""
        parameters = signature(function).parameters.values()
        names = {parameter.name for parameter in parameters}
        every = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
        return {name: value for name, value in self.kwargs.items() if every or name in names}

    def answer_to(self, error: Exception) -> HttpResponseBase | None:
        """Return the answer that the framework of the view makes of an exception; None if it leaves that to Django.

        DRF is asked through its view; another framework sets ``answer_to(request, error)`` on the view that it decorates.
        """
        try:
            if (own := getattr(self.view, "answer_to", None)) is not None:
                return self.rendered(own(self.request, error))
            if self.seen_request is self.request:
                return None
            with _kept_from_rollback():
                return self.rendered(self.owner.handle_exception(error))
        except Exception:
            return None  # It raises what it has no answer to.

    def rendered(self, response: Any) -> HttpResponseBase:
        """Return the response with its body made, so that its errors come before COMMIT."""
        if self.seen_request is not self.request:
            response = self.owner.finalize_response(self.seen_request, response, *self.owner.args, **self.owner.kwargs)
        if not isinstance(response, HttpResponseBase):
            raise TypeError(
                f"The view returned {type(response).__name__}, not a response. An async view is decorated itself: what "
                f"wraps it must be a coroutine function too."
            )
        return rendered(response)


@contextmanager
def _kept_from_rollback() -> Iterator[None]:
    """Keep DRF's exception handler from marking the transaction around a test, of ``TestCase``, for rollback."""
    with ExitStack() as savepoints:
        for alias in connections:
            if connections[alias].in_atomic_block:
                savepoints.enter_context(transaction.atomic(using=alias))
        yield


def access_is_checked_inside(view_class: type) -> bool:
    """Tell whether a decorated dispatch() of this class stands outside of a mixin that checks access in its own."""
    decorated = False
    for base in view_class.__mro__:
        dispatch = vars(base).get("dispatch")
        if decorated and dispatch is not None and issubclass(base, AccessMixin):
            return True
        decorated = decorated or hasattr(dispatch, "idempotency")
    return False


def rendered(response: HttpResponseBase) -> HttpResponseBase:
    """Return the response with its body made: a template response, and that of DRF, makes it late."""
    if callable(make := getattr(response, "render", None)) and not getattr(response, "is_rendered", True):
        made: HttpResponseBase = make()
        return made
    return response
