"""Django Ninja: ``@decorate_view(idempotent(...))`` below ``@api.post(...)``.

``decorate_view`` wraps an operation together with its authentication. What is protected here is the function of the operation,
after authentication, throttling and the parsing of parameters, together with the response that Ninja makes of what it returns.
What it raises becomes an answer through the exception handlers of the API, after its writes were rolled back.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from inspect import iscoroutinefunction, unwrap
from typing import Any

from django.contrib.auth import get_user_model
from django.http import HttpRequest, HttpResponseBase
from ninja.operation import Operation, PathView
from pydantic import BaseModel

from idempotency import decorators
from idempotency.execution import CLAIMED_KEY_ATTRIBUTE
from idempotency.options import FINDERS, Options

Run = Callable[..., Any]


def idempotent(run: Run | None = None, **options: Any) -> Any:
    """Let an operation run once per idempotency key: ``@decorate_view(idempotent)`` or ``@decorate_view(idempotent(...))``.

    The options are those of ``idempotency.decorators.idempotent``. A user whom the authentication of the operation returns
    becomes ``request.user``, and with it the scope of the key. What Ninja refuses before the operation, a parameter too, spends
    no key. The completer's request passes the authentication as the user who sent the first one, with ``request.auth`` that
    user unless PREPARE_REQUEST has set another.

    Raises TypeError when it decorates anything but an operation, and for one that streams.
    """
    protect = decorators.idempotent(**options)

    def decorate(run: Run) -> Run:
        operation = getattr(unwrap(run), "__self__", None)
        if not isinstance(operation, Operation):
            raise TypeError("This decorator protects operations of Django Ninja: put it into @decorate_view(...).")
        if operation.stream_format is not None:
            raise TypeError(f"{operation.view_func.__name__} streams its answer, which cannot be kept: do not protect it.")
        _protect(operation, protect)
        _let_the_completer_in(operation)
        return run

    return decorate if run is None else decorate(run)


def _protect(operation: Operation, protect: Callable[[Run], Run]) -> None:
    """Put a protected function, which returns a response, in the place of the operation's own."""
    # A router's operations are copied for each API, function and decorators, and decorated again.
    view_func: Run = getattr(operation.view_func, "unprotected", operation.view_func)

    def arguments(request: HttpRequest, values: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        # Fresh ones for each try: a serialization failure makes a second one.
        response = operation.api.create_temporal_response(request)
        values = {name: _copy(value) for name, value in values.items()}
        if operation.signature.response_arg:
            values[operation.signature.response_arg] = response
        return values, response

    def respond(request: HttpRequest, **values: Any) -> HttpResponseBase:
        values, response = arguments(request, values)
        return operation._result_to_response(request, view_func(request, **values), response)

    async def respond_async(request: HttpRequest, **values: Any) -> HttpResponseBase:
        values, response = arguments(request, values)
        return operation._result_to_response(request, await view_func(request, **values), response)

    inner = wraps(view_func)(respond_async if operation.is_async else respond)
    inner.answer_to = lambda request, error: operation.api.on_exception(request, error)  # type: ignore[attr-defined]
    protected = protect(inner)

    @wraps(protected)
    def view(request: HttpRequest, **values: Any) -> Any:  # a response, or an awaitable one
        auth = getattr(request, "auth", None)
        if isinstance(auth, get_user_model()):
            request.user = auth
        return protected(request, **values)

    view.unprotected = view_func  # type: ignore[attr-defined]
    operation.view_func = view


def _copy(value: Any) -> Any:
    """Return a copy of what Ninja has parsed; of what cannot be copied, such as a file, the thing itself."""
    if isinstance(value, BaseModel | dict | list):
        try:
            return deepcopy(value)
        except TypeError:
            pass
    return value


def _let_the_completer_in(operation: Operation) -> None:
    """Let the request that carries a claimed key pass as the user whom the completer has put there."""
    authenticate: Run = operation._run_authentication

    def known(request: Any) -> bool:
        # A Python attribute of the request: nothing that comes over the network sets one.
        if getattr(request, CLAIMED_KEY_ATTRIBUTE, None) is None:
            return False
        if not hasattr(request, "auth"):
            request.auth = request.user
        return True

    def run(request: HttpRequest) -> Any:
        return None if known(request) else authenticate(request)

    async def run_async(request: HttpRequest) -> Any:
        return None if known(request) else await authenticate(request)

    let_in: Run = run_async if iscoroutinefunction(authenticate) else run
    operation._run_authentication = let_in  # type: ignore[method-assign]


def _operations(view: Any) -> list[Operation]:
    """Return the operations behind a resolved view of Ninja, which keeps them in its closure; none for other views."""
    for cell in getattr(view, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # an empty one
            continue
        if isinstance(held, PathView):
            return held.operations
    return []


def _options_of(view: Callable[..., Any], method: str) -> Options | None:
    """Return what the operation for ``method`` behind a resolved view says in ``idempotent``."""
    for operation in _operations(view):
        if method in operation.methods:
            found: Options | None = getattr(operation.view_func, "idempotency", None)
            return found
    return None


FINDERS.append(_options_of)
