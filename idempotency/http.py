"""Helpers for views that call operations: the key of a request, and error responses.

A view that only calls an operation reads the key with ``key_of`` and has the decorator
``@problems``. It does not need ``@idempotent``.
"""

import logging
from collections.abc import Callable
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections
from django.http import HttpRequest, HttpResponseBase

from idempotency._http import key_header
from idempotency._http.not_stored import not_stored
from idempotency._http.problems import REFUSALS, Problem, key_invalid, key_missing, problem_of
from idempotency._http.view import atomic_aliases
from idempotency.exceptions import Rejected, Unfinished

__all__ = ["key_of", "not_stored", "problems"]

logger = logging.getLogger("idempotency")

AnyView = TypeVar("AnyView", bound=Callable[..., Any])

_HANDLED = (Problem, Rejected, Unfinished, *REFUSALS)
#: The longest key of an operation.
_LONGEST = 255


def problems(view: AnyView) -> AnyView:
    """Decorate a view that calls an operation: return an error response for an exception of
    ``once``.

    - Rejected: a 422 with the code, the message and the data of the refusal
    - InProgress, KeyReused, InterventionRequired and Unavailable: the error responses of
      ``@idempotent``
    - Unfinished: a 503 ``unfinished``; the cause is logged

    The setting ERROR_RENDERER applies. The decorator does not catch other exceptions.

    Under ATOMIC_REQUESTS a refusal commits the transaction of the request; each other error
    response rolls it back. The view may be ``async def``, a method, or a view of Django REST
    framework or Ninja. Apply the decorator to the function itself, inside all other decorators.
    """

    @wraps(view)
    def handled(*args: Any, **kwargs: Any) -> Any:
        try:
            return view(*args, **kwargs)
        except _HANDLED as error:
            return _response(error, _request_in(args))

    @wraps(view)
    async def handled_async(*args: Any, **kwargs: Any) -> Any:
        try:
            return await view(*args, **kwargs)
        except _HANDLED as error:
            return await sync_to_async(_response)(error, _request_in(args))

    made: Any = handled_async if iscoroutinefunction(view) else handled
    return made  # type: ignore[no-any-return]


def key_of(given: Any, *, key_from: key_header.KeyFrom | None = None) -> str:
    """Return the idempotency key of a request, or of a field of a GraphQL request.

    The argument ``given`` is a request, or the ``info`` of a resolver of Strawberry or Graphene.
    The header of the request is read by the rules of ``@idempotent``. The key of a field consists
    of the key of the request and the whole path of the field, so that each mutation of a request
    has a separate key. The argument ``key_from`` names another place of the key, such as
    "form:idempotency_key", for requests without the header.
    Raises an exception for a missing or invalid key; ``@problems`` returns a 400 for it.
    """
    if not hasattr(given, "field_name"):
        return _key_in(given, key_from)
    context = given.context
    request = (
        context["request"] if isinstance(context, dict) else getattr(context, "request", context)
    )
    path = ".".join(map(str, given.path.as_list()))
    key = f"{_key_in(request, key_from)}:{path}"
    if len(key) > _LONGEST:
        raise key_invalid(f"The key and the path {path} have more than {_LONGEST} characters.")
    return key


def _key_in(request: Any, key_from: key_header.KeyFrom | None) -> str:
    found = key_header.key_of(_of_django(request), request, key_from)
    if found is None:
        raise key_missing()
    return found.value


def _request_in(args: tuple[Any, ...]) -> HttpRequest:
    """Return the request: the first argument of a function, or the second argument of a method."""
    for each in args[:2]:
        if isinstance(request := _of_django(each), HttpRequest):
            return request
    raise TypeError("The decorator @problems found no request in the arguments of the view.")


def _of_django(request: Any) -> Any:
    """Return the request of Django, which Django REST framework wraps."""
    return getattr(request, "_request", request)


def _response(error: Exception, request: HttpRequest) -> HttpResponseBase:
    if isinstance(error, Unfinished):
        logger.error("an operation of %s is not finished", request.path, exc_info=error)
    problem = error if isinstance(error, Problem) else problem_of(error)
    response = problem.with_traceback(None).response(request)
    if request.resolver_match is not None and not isinstance(error, Rejected):
        for alias in atomic_aliases(request.resolver_match.func):
            if connections[alias].in_atomic_block:
                connections[alias].set_rollback(True)
    return response
