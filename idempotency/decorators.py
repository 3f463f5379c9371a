"""The decorator ``@idempotent``. It wraps a view; ``idempotency._http.entry`` then handles each
request."""

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature, iscoroutinefunction, signature
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponseBase

from idempotency._async import in_thread
from idempotency._engine.claimed_key import ClaimedKey
from idempotency._http.atomic_requests import EVERY_ALIAS, suspend_atomic_requests
from idempotency._http.entry import respond
from idempotency._http.options import Options
from idempotency._http.responses import SAFE_METHODS
from idempotency._http.view import MUST_BE_INSIDE, Call, View
from idempotency._text import did_you_mean

AnyView = TypeVar("AnyView", bound=View)
Given = ParamSpec("Given")


class ProtectedRequest(HttpRequest):
    """The request of a protected view, for annotations: ``def pay(request: ProtectedRequest)``. It
    has no instances.

    The attribute ``idempotency_key`` is None in a request without a key (``required=False``, safe
    methods). The annotation does not express this.
    """

    idempotency_key: ClaimedKey


class Idempotent(Protocol[Given]):
    """The type of ``idempotent``: a decorator with or without options."""

    @overload
    def __call__(self, view: AnyView, /) -> AnyView: ...
    @overload
    def __call__(
        self, *nothing: Given.args, **options: Given.kwargs
    ) -> Callable[[AnyView], AnyView]: ...


def takes(options: Callable[Given, Options]) -> Callable[[Callable[..., Any]], Idempotent[Given]]:
    """Give the decorated function the fields of ``Options`` as its signature, for type
    checkers."""

    def declare(decorator: Any) -> Any:
        view = Parameter(
            "view", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=View | None
        )
        decorator.__signature__ = Signature([view, *signature(options).parameters.values()])
        return decorator

    return declare


@takes(Options)
def idempotent(view: View | None = None, **given: Any) -> Any:
    """Run a view once per idempotency key, and answer each retry with the same response.

    A plain view has no ``recovery_points`` and writes to the database only. One transaction
    contains the claim, the writes of the view and the stored response. A phased view declares
    ``recovery_points`` and loops over ``request.idempotency_key.phases()``.

    When the view returns a 2xx, a 3xx, or a 4xx that is not in NEVER_STORED_STATUSES, the response
    and the work are committed. After a 5xx, a status of NEVER_STORED_STATUSES or an exception, a
    plain view is rolled back, and a phased view stays at its last recovery point. The next request
    with the key continues from there.

    - ``required``: False lets a request without a key run unprotected.
    - ``applies(request)``: False lets the request run unprotected. It is called neither for safe
      methods nor for a request that the completer runs.
    - ``validate(request)``: may return a response that refuses the request, before its key is
      claimed. It is also called for a request without a key, but neither for safe methods nor for a
      request that the completer runs.
    - ``scope(request)``: the owner of the key, at most 200 characters. The default is the user, or
      else the session; see ``idempotency.scopes``.
    - ``key_from``: the place of the key if there is no header: "body:NAME", "form:NAME" or a
      function of the request.
    - ``wait_seconds``: the time for which a duplicate waits for the first request before it gets
      409.
    - ``isolation``: the level of a plain view's transaction; the default is PLAIN_ISOLATION.
    - ``using``: the alias of the key's database, or a function of the request that returns it.
    - ``store_body``, in a phased view: False stores no request body. Without the body, the
      completer cannot run the request. A plain view stores no header or body of a request.
    - ``keep``, in a phased view: names of session values ("session.basket") and of attributes that
      a middleware sets ("tenant", "basket.pk"). The values are stored as JSON; the completer sets
      them on the request that it rebuilds.
    - ``retention_hours``: the hours for which a key is kept after it is finished or refused. Hours
      below RETENTION_HOURS have no effect.
    - ``lease_seconds``: the lock timeout of a key of this view; the default is
      LOCK_TIMEOUT_SECONDS. Each phase and each call renews the lock.
    - ``on_abandon(key)``: is called for a phased request that was not finished within
      RETENTION_HOURS. It runs once, outside any transaction, and its response finishes the key.

    Of these functions, only ``on_abandon`` may be ``async def``. Apply the decorator inside
    decorators that check authentication and permissions, which then run before each replay too. A
    decorated view is excluded from ATOMIC_REQUESTS. In an outer transaction, for example of a
    middleware, a plain view is a savepoint and commits with the outer one.
    Raises TypeError or ValueError for invalid options.
    A request of a phased view raises RuntimeError if a transaction is already open.
    """
    if unknown := given.keys() - {field.name for field in fields(Options)}:
        name, known = min(unknown), [field.name for field in fields(Options)]
        raise TypeError(
            f"The decorator @idempotent has no option {name!r}.{did_you_mean(name, known)} The"
            f" options are: {', '.join(known)}."
        )
    options = Options(**given)

    def decorate(view: View) -> View:
        return _protected(view, options)

    return decorate if view is None else decorate(view)


def _protected(view: View, options: Options) -> View:
    # Django REST framework sets ``cls``. Access decorators such as login_required set the other
    # two.
    if hasattr(view, "cls") or (
        hasattr(view, "login_url") and hasattr(view, "redirect_field_name")
    ):
        raise TypeError(f"{getattr(view, '__name__', view)}" + MUST_BE_INSIDE)
    owner: Any = getattr(view, "__self__", None)
    if type(owner).__module__.startswith("ninja."):
        name = owner.view_func.__name__
        raise TypeError(f"{name}{MUST_BE_INSIDE} Use idempotency.contrib.ninja.idempotent.")

    @wraps(view)
    def protected(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(view, args, kwargs)
        del args, kwargs  # They may be parts of the body; see idempotency._hidden.
        if getattr(call.owner, "view_is_async", False) and not iscoroutinefunction(view):
            # Such a dispatch() is a plain function that returns an awaitable.
            return protected_async(*call.args, **call.kwargs)
        with suspend_atomic_requests(call.request, options):
            return call.returned(respond(call, options))

    @wraps(view)
    async def protected_async(*args: Any, **kwargs: Any) -> HttpResponseBase:
        call = Call.of(view, args, kwargs)
        del args, kwargs
        if call.request.method in SAFE_METHODS:
            call.request.idempotency_key = None  # type: ignore[attr-defined]
            return await view(*call.args, **call.kwargs)  # type: ignore[no-any-return]
        # The transaction belongs to the thread of the request. That thread runs the view on the
        # event loop.
        if options.recovery_points is None:
            return call.returned(await sync_to_async(respond)(call, options))
        # A client that hangs up rolls a plain view back. A phased view may be in a call, so it goes
        # on, as under WSGI.
        return call.returned(await in_thread(respond, call, options))

    made: View = protected_async if iscoroutinefunction(view) else protected
    made.idempotency = options  # type: ignore[attr-defined]
    made._non_atomic_requests = EVERY_ALIAS  # type: ignore[attr-defined]
    return made
