"""Django Ninja: ``@decorate_view(idempotent(...))`` below ``@api.post(...)``.

Django Ninja applies ``decorate_view`` to an operation including its authentication. This decorator
protects only the function of the operation. The function runs after authentication, throttling and
parsing, and its rendered response is stored. After an exception its writes are rolled back, and the
exception handlers of the API respond.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from functools import wraps
from inspect import iscoroutinefunction, unwrap
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.core.checks import CheckMessage, Info, register
from django.http import HttpRequest, HttpResponseBase
from ninja.errors import AuthenticationError
from ninja.operation import Operation, PathView
from ninja.security.session import SessionAuth, SessionAuthSuperUser
from pydantic import BaseModel

from idempotency import conf, decorators
from idempotency._async import awaited
from idempotency._hidden import Hidden
from idempotency._http.options import Options
from idempotency._http.rebuilt import rebuilt_run_of
from idempotency._http.routes import FINDERS, METHODS
from idempotency.policy import views_to_check
from idempotency.scopes import set_other_sender

Run = Callable[..., Any]

#: The authenticators that read only ``request.user``; the one for staff is a subclass.
_BY_USER = (SessionAuth, SessionAuthSuperUser)


@decorators.takes(Options)
def idempotent(run: Run | None = None, **options: Any) -> Any:
    """Run an operation once per idempotency key: ``@decorate_view(idempotent)`` or
    ``@decorate_view(idempotent(...))``.

    The options are those of ``idempotency.decorators.idempotent``. If the authentication returns a
    Django user, that user becomes ``request.user`` and the scope of the key. If Ninja refuses a
    request before the operation runs, the request claims no key.

    The completer runs a request as the user who sent it; ``request.auth`` is this user unless
    PREPARE_REQUEST sets another value. If all authenticators read only ``request.user``, such as
    ``django_auth_is_staff``, they are called again. If one of them needs credentials, which are not
    stored, all are skipped.
    Raises TypeError for anything but an operation, and for an operation that streams.
    """
    protect = decorators.idempotent(**options)

    def decorate(run: Run) -> Run:
        operation = getattr(unwrap(run), "__self__", None)
        if not isinstance(operation, Operation):
            raise TypeError(
                "This decorator protects operations of Django Ninja: pass it to"
                " @decorate_view(...)."
            )
        if operation.stream_format is not None:
            raise TypeError(
                f"The operation {operation.view_func.__name__} streams its response, which cannot"
                " be stored: do not protect it."
            )
        _protect(operation, protect)
        _let_the_completer_in(operation)
        return run

    return decorate if run is None else decorate(run)


def _protect(operation: Operation, protect: Callable[[Run], Run]) -> None:
    # Ninja copies the operations of a router for each API, and decorates the copies again.
    view_func: Run = getattr(operation.view_func, "unprotected", operation.view_func)
    protected = protect(_responding(operation, view_func))

    def view_sync(request: HttpRequest, **values: Any) -> HttpResponseBase:
        given = Hidden(values)
        del values
        _set_user(request)
        with _handled_once(request, operation):
            return protected(request, **given.value)  # type: ignore[no-any-return]

    async def view_async(request: HttpRequest, **values: Any) -> HttpResponseBase:
        given = Hidden(values)
        del values
        _set_user(request)
        with _handled_once(request, operation):
            return await protected(request, **given.value)  # type: ignore[no-any-return]

    view = wraps(protected)(view_async if operation.is_async else view_sync)
    view.unprotected = view_func  # type: ignore[attr-defined]
    operation.view_func = view


def _responding(operation: Operation, view_func: Run) -> Run:
    """Return the function of an operation as one that returns a response."""

    def arguments(
        request: HttpRequest, values: Hidden[dict[str, Any]]
    ) -> tuple[Hidden[dict[str, Any]], Any]:
        # Each attempt needs its own values and response.
        response = operation.api.create_temporal_response(request)
        copies = Hidden({name: _copy(value) for name, value in values.value.items()})
        if operation.signature.response_arg:
            copies.value[operation.signature.response_arg] = response
        return copies, response

    # The values are parts of the body: no local variable has them while the function of the
    # operation runs.
    def respond(request: HttpRequest, **values: Any) -> HttpResponseBase:
        copies, response = arguments(request, Hidden(values))
        del values
        return operation._result_to_response(request, view_func(request, **copies.value), response)

    async def respond_async(request: HttpRequest, **values: Any) -> HttpResponseBase:
        copies, response = arguments(request, Hidden(values))
        del values
        return operation._result_to_response(
            request, await view_func(request, **copies.value), response
        )

    def response_to(request: HttpRequest, error: Exception) -> HttpResponseBase:
        try:
            return operation.api.on_exception(request, error)
        except Exception as raised:
            request._idempotency_raised = error, raised  # type: ignore[attr-defined]
            raise

    inner = wraps(view_func)(respond_async if operation.is_async else respond)
    inner.response_to = response_to  # type: ignore[attr-defined]
    return inner


def _set_user(request: HttpRequest) -> None:
    auth = getattr(request, "auth", None)
    if isinstance(auth, get_user_model()):
        request.user = auth


class _AlreadyHandled(Exception):
    """Its cause was raised by an exception handler of the API. The API must call no handler for
    it."""


@contextmanager
def _handled_once(request: HttpRequest, operation: Operation) -> Iterator[None]:
    """If the block raises an exception for which a handler of the API was called, let the API call
    no handler again."""
    try:
        yield
    except Exception as error:
        handled, raised = vars(request).pop("_idempotency_raised", (None, None))
        if handled is not error:
            raise
        operation.api.add_exception_handler(_AlreadyHandled, _raise_cause)
        raise _AlreadyHandled from raised


def _raise_cause(request: HttpRequest, error: Any) -> Any:
    raised = error.__cause__
    context = raised.__context__
    try:
        raise raised
    finally:
        raised.__context__ = context  # without this exception


def _copy(value: Any) -> Any:
    """Return a copy of a parsed value. Its parts are shared if one of them cannot be copied, such
    as a file."""
    if isinstance(value, BaseModel | dict | list):
        for make in (deepcopy, copy):
            with suppress(Exception):
                return make(value)
    return value


def _let_the_completer_in(operation: Operation) -> None:
    """Authenticate a request of the completer as its sender. Repeat the authenticators only if none
    needs credentials."""
    authenticate: Run = operation._run_authentication

    def is_completer(request: HttpRequest) -> bool:
        return rebuilt_run_of(request) is not None

    def let_in(request: HttpRequest) -> Any:
        found: Any = request.user
        if not _unrepeatable(operation):
            try:
                every: Any = operation.auth_callbacks
                found = next(
                    filter(None, (awaited(one.authenticate(request, None)) for one in every)), None
                )
                if found is None:
                    raise AuthenticationError
            except Exception as error:
                return operation.api.on_exception(request, error)
        vars(request).setdefault("auth", found)
        return None

    def run(request: HttpRequest) -> Any:
        if is_completer(request):
            return let_in(request)
        before = getattr(request, "user", None)
        error = authenticate(request)
        if error is None:
            _note_sender(operation, request, before)
        return error

    async def run_async(request: HttpRequest) -> Any:
        if is_completer(request):
            return await sync_to_async(let_in)(request)
        before = getattr(request, "user", None)
        error = await authenticate(request)
        if error is None:
            _note_sender(operation, request, before)
        return error

    asked: Run = run_async if iscoroutinefunction(authenticate) else run
    operation._run_authentication = asked  # type: ignore[method-assign]


def _note_sender(operation: Operation, request: HttpRequest, before: Any) -> None:
    """Tell the scopes if ``request.user`` did not send the request: an authenticator returned no
    user and left ``request.user`` unchanged, so that it may be the user of a session cookie that
    the client sends beside an API key."""
    is_user = isinstance(request.auth, get_user_model())  # type: ignore[attr-defined]
    if not is_user and getattr(request, "user", None) is before and _unrepeatable(operation):
        set_other_sender(request)


def _unrepeatable(operation: Operation) -> list[str]:
    """Return the names of the authenticators of an operation that need more than
    ``request.user``."""
    others = [one for one in operation.auth_callbacks if not isinstance(one, _BY_USER)]
    return [getattr(one, "__qualname__", type(one).__qualname__) for one in others]


@register
def check_authenticators(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """I002: a phased operation whose authenticators the completer cannot repeat."""
    return [
        Info(
            f"The operation {view.path} has authenticators that need the client's credentials"
            f" ({', '.join(names)}). The completer then skips all authenticators of the operation,"
            " and runs the request if its user is active.",
            hint=(
                "Set IDEMPOTENCY['PREPARE_REQUEST'] to a function that raises KeyStuck for a user"
                " without the permission."
            ),
            id="idempotency.I002",
        )
        for view in views_to_check()
        # PREPARE_REQUEST may check.
        if view.options.recovery_points is not None and conf.get().PREPARE_REQUEST is None
        for operation in _operations(view.callback)
        if set(view.methods) & set(operation.methods) and (names := _unrepeatable(operation))
    ]


def _operations(view: Any) -> list[Operation]:
    """Return the operations in the closure of a resolved view of Ninja; empty for other views."""
    for cell in getattr(view, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if isinstance(held, PathView):
            return held.operations
    return []


def _options_of(view: Callable[..., Any], method: str) -> Options | None:
    for operation in _operations(view):
        if method in operation.methods:
            found: Options | None = getattr(operation.view_func, "idempotency", None)
            return found
    return None


def _methods_of(view: Callable[..., Any]) -> set[str] | None:
    operations = _operations(view)
    return (
        {method for operation in operations for method in operation.methods} if operations else None
    )


FINDERS.append(_options_of)
METHODS.append(_methods_of)
