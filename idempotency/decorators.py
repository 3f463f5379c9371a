"""``@idempotent``: what a view may say, and the wrapper around it. A request then runs in ``idempotency.execution``."""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, get_args, overload

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponseBase

from idempotency.calls import Call, View
from idempotency.conf import ChosenIsolation, Isolation
from idempotency.execution import answer
from idempotency.http import SAFE_METHODS
from idempotency.models import FINISHED, STARTED, IdempotencyKey
from idempotency.options import Options

AnyView = TypeVar("AnyView", bound=View)


@overload
def idempotent(view: AnyView) -> AnyView: ...
@overload
def idempotent(
    view: None = None,
    *,
    recovery_points: Sequence[str] | None = None,
    required: bool = True,
    validate: Callable[[HttpRequest], HttpResponseBase | None] | None = None,
    scope: Callable[[HttpRequest], str] | None = None,
    isolation: ChosenIsolation = "from settings",
    using: str | Callable[[HttpRequest], str] | None = None,
    on_abandon: Callable[[IdempotencyKey], HttpResponseBase] | None = None,
) -> Callable[[AnyView], AnyView]: ...
def idempotent(
    view: View | None = None,
    *,
    recovery_points: Sequence[str] | None = None,
    required: bool = True,
    validate: Callable[[HttpRequest], HttpResponseBase | None] | None = None,
    scope: Callable[[HttpRequest], str] | None = None,
    isolation: ChosenIsolation = "from settings",
    using: str | Callable[[HttpRequest], str] | None = None,
    on_abandon: Callable[[IdempotencyKey], HttpResponseBase] | None = None,
) -> Any:
    """Let a view run once per idempotency key, and answer each retry with the same response.

    A plain view (no ``recovery_points``) makes local writes only: one transaction holds the claim, its writes and the stored
    response. A phased view names its recovery points and loops over ``request.idempotency_key.phases()``.

    On return of a 2xx, 3xx or definitive 4xx the response is committed together with the work. A 5xx, a status of
    NEVER_STORED_STATUSES, or an exception leaves nothing of a plain view, and a phased one at its last recovery point; the next
    request with the key goes on from there.

    ``required``: False lets a request without a key run unprotected. ``validate(request)``: a response refuses the request
    before it spends a key. ``scope(request)``: whose key it is, at most 200 characters; by default the user, else the session.
    ``isolation``: level of a plain view's transaction; PLAIN_ISOLATION by default. ``using``: alias of the key's database.
    ``on_abandon(key)``: settles a phased request that was not finished within RETENTION_HOURS: it runs once, outside any
    transaction, and its response finishes the key.

    Stand below the decorators that authenticate: a stored response is for those only who pass them. Decorated views are left
    out of ATOMIC_REQUESTS. Raises RuntimeError at the request when a transaction is already open.
    """
    if isinstance(recovery_points, str):
        raise ValueError(f"recovery_points must be a list of names: [{recovery_points!r}].")
    if isolation not in (None, "from settings", *get_args(Isolation)):
        raise ValueError(f"isolation must be None or one of {', '.join(map(repr, get_args(Isolation)))}, not {isolation!r}.")
    points = tuple(recovery_points) if recovery_points is not None else None
    if points is not None:
        if not all(0 < len(point) <= 50 for point in points) or len({STARTED, FINISHED, *points}) != len(points) + 2:
            raise ValueError(
                f"recovery_points must be different names of 1 to 50 characters, {STARTED!r} and {FINISHED!r} not among them."
            )
        if not required:
            raise ValueError("A phased view needs a key for each request: drop required=False, or recovery_points.")
    options = Options(
        recovery_points=points,
        required=required,
        validate=validate,
        scope=scope,
        isolation=isolation,
        using=using,
        on_abandon=on_abandon,
    )

    def decorate(view: View) -> View:
        if hasattr(view, "cls"):
            raise TypeError(
                "@idempotent stands above a view of Django REST framework, outside of authentication and permissions: a stored "
                "response would be for everybody. Put it below @api_view, or on the handler: post(), create(), ..."
            )

        @wraps(view)
        def protected(*args: Any, **kwargs: Any) -> HttpResponseBase:
            return answer(Call.of(view, args, kwargs), options)

        @wraps(view)
        async def protected_async(*args: Any, **kwargs: Any) -> HttpResponseBase:
            call = Call.of(view, args, kwargs)
            if call.request.method in SAFE_METHODS:
                call.request.idempotency_key = None  # type: ignore[attr-defined]
                return await view(*args, **kwargs)  # type: ignore[no-any-return]
            # The thread of the request holds its transaction; the view is called from there, back on the event loop.
            return await sync_to_async(answer)(call, options)

        made: View = protected_async if iscoroutinefunction(view) else protected
        made.idempotency = options  # type: ignore[attr-defined]
        made._non_atomic_requests = _EveryAlias()  # type: ignore[attr-defined]
        return made

    return decorate if view is None else decorate(view)


class _EveryAlias(set[str]):
    """The set of all database aliases, of those too that the settings do not know yet; see ``non_atomic_requests``."""

    def __contains__(self, alias: object) -> bool:
        return True
