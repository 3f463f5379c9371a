"""The call of a view: a function, a method or a coroutine function, of Django or of Django REST
framework."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.contrib.auth.mixins import AccessMixin
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponseBase
from django.views import View as BaseView

from idempotency._async import awaited

View = Callable[..., Any]

#: The mark of a response that the view of Django REST framework has finalized.
_FINALIZED = "idempotency_finalized"

MUST_BE_INSIDE = (
    " is decorated with @idempotent outside authentication and permissions, so anybody could get a"
    " stored response. Apply it inside them: on the function itself, or on the handler of the class"
    " (post(), create(), ...)."
)

_CURE = (
    "Return a response on each path. The last line of a phased view is `return key.response()`: a"
    " response that a phase has stored stays stored, and the next retry gets it."
)


@dataclass(frozen=True, slots=True, repr=False)
class Call:
    view: View
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    request: HttpRequest
    #: The request that the view gets: Django REST framework wraps the request of Django.
    view_request: Any
    #: The instance of a class-based view, which serves only this request, or None.
    owner: Any

    @classmethod
    def of(cls, view: View, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        """Find the request: the first argument of a function, the second of a method."""
        for seen in args[:2]:
            if isinstance(seen, HttpRequest):
                # method_decorator binds a method with partial()
                method = getattr(view, "func", view)
                owner = args[0] if args[0] is not seen else getattr(method, "__self__", None)
                if not isinstance(owner, BaseView):
                    owner = None  # another object may serve other requests too
                if hasattr(owner, "initialize_request"):
                    raise RuntimeError(
                        "dispatch() of a Django REST framework view" + MUST_BE_INSIDE
                    )
                is_dispatch = owner is not None and getattr(view, "__name__", "") == "dispatch"
                if is_dispatch and access_is_checked_inside(type(owner)):
                    name = f"dispatch() of {type(owner).__name__}"
                    raise RuntimeError(
                        f"{name}, which checks access in this method,{MUST_BE_INSIDE}"
                    )
                return cls(view, args, kwargs, seen, seen, owner)
            inner = getattr(seen, "_request", None)
            if hasattr(seen, "parser_context") and isinstance(inner, HttpRequest):
                return cls(view, args, kwargs, inner, seen, seen.parser_context["view"])
        raise TypeError(
            "The decorator @idempotent found no request in the arguments. The request must be the"
            " first argument of a function, or the second argument of a method."
        )

    @property
    def name(self) -> str:
        """Return the dotted path of the view, for messages."""
        named = self.view if hasattr(self.view, "__qualname__") else type(self.view)
        return f"{named.__module__}.{named.__qualname__}"

    def __call__(self) -> Any:
        """Call the view. A coroutine runs on the event loop; its database calls run in this thread
        and transaction."""
        return awaited(self.view(*self.args, **self.kwargs))

    def response(self) -> HttpResponseBase:
        return self.rendered(self())

    def response_to(self, error: Exception) -> HttpResponseBase | None:
        """Return the response of the view's framework to an exception, or None if the exception
        must be raised. Django REST framework handles it in the view; other frameworks set
        ``response_to(request, error)`` on the decorated view."""
        try:
            if (own := getattr(self.view, "response_to", None)) is not None:
                return self.rendered(own(self.request, error))
            if self.view_request is self.request:
                return None
            with _kept_from_rollback():
                return self.rendered(self.owner.handle_exception(error))
        except Exception as raised:
            # It raises exceptions that it does not handle, or another exception.
            if self.view_request is not self.request:
                self._replace_hook_once("handle_exception", error, partial(_raise, raised))
            return None

    def returned(self, response: HttpResponseBase) -> HttpResponseBase:
        """Return the response to the framework, which must not finalize it a second time."""
        if getattr(response, _FINALIZED, False):
            self._replace_hook_once("finalize_response", response, lambda: response)
        return response

    def _replace_hook_once(self, name: str, subject: object, result: Callable[[], Any]) -> None:
        """Replace the next call of a hook of Django REST framework, if it is about ``subject``: the
        hook has already run."""
        hook, attributes = getattr(self.owner, name), vars(self.owner)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            attributes.pop(name, None)
            is_about_it = any(argument is subject for argument in args)
            return result() if is_about_it else hook(*args, **kwargs)

        attributes[name] = replaced

    def rendered(self, response: Any) -> HttpResponseBase:
        """Return the rendered response, so that rendering errors occur before COMMIT."""
        if self.view_request is not self.request and not getattr(response, _FINALIZED, False):
            response = self.owner.finalize_response(
                self.view_request, response, *self.owner.args, **self.owner.kwargs
            )
            setattr(response, _FINALIZED, True)
        if not isinstance(response, HttpResponseBase):
            raise TypeError(
                f"The view {self.name} returned {type(response).__name__}, not a response. {_CURE}"
            )
        return rendered(response)


def atomic_aliases(view: Callable[..., Any] | None = None, but: str = "") -> list[str]:
    """Return the databases with ATOMIC_REQUESTS from which the view is not excluded, ``but`` for
    one; without a view, all of them."""
    left_out = getattr(view, "_non_atomic_requests", ())
    return [
        name
        for name, of in connections.settings.items()
        if of["ATOMIC_REQUESTS"] and name not in left_out and name != but
    ]


@contextmanager
def atomic_request(view: Callable[..., Any]) -> Iterator[None]:
    """Run the block in a transaction on each database with ATOMIC_REQUESTS, unless the view is
    ``non_atomic_requests``."""
    with ExitStack() as stack:
        for alias in atomic_aliases(view):
            stack.enter_context(transaction.atomic(using=alias))
        yield


def _raise(error: Exception) -> Any:
    raise error


@contextmanager
def _kept_from_rollback() -> Iterator[None]:
    """Open savepoints, so that DRF's exception handler does not mark the transaction of a
    ``TestCase`` for rollback."""
    with ExitStack() as savepoints:
        for alias in connections:
            if connections[alias].in_atomic_block:
                savepoints.enter_context(transaction.atomic(using=alias))
        yield


def access_is_checked_inside(view_class: type) -> bool:
    """Return whether a decorated dispatch() of this class is outside a mixin that checks access."""
    decorated = False
    for base in view_class.__mro__:
        dispatch = vars(base).get("dispatch")
        if decorated and dispatch is not None and issubclass(base, AccessMixin):
            return True
        decorated = decorated or hasattr(dispatch, "idempotency")
    return False


def rendered(response: HttpResponseBase) -> HttpResponseBase:
    """Return the response, rendered if it is a template response or one of DRF."""
    if getattr(response, "is_rendered", True) or not callable(getattr(response, "render", None)):
        return response
    complete: HttpResponseBase = response.render()  # type: ignore[attr-defined]
    return complete
