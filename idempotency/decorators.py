"""``@idempotent``: what a view may say, and the wrapper around it. A request then runs in ``idempotency.execution``."""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, get_args, overload

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponseBase

from idempotency.atomic_requests import EVERY_ALIAS, outside_of_atomic_requests
from idempotency.calls import OUTSIDE, Call, View
from idempotency.conf import ChosenIsolation, Isolation
from idempotency.execution import answer
from idempotency.header import KeyFrom, refuse_key_from
from idempotency.http import SAFE_METHODS
from idempotency.models import FINISHED, STARTED, IdempotencyKey
from idempotency.options import OnAbandon, Options, ReplayCheck

AnyView = TypeVar("AnyView", bound=View)


class ProtectedRequest(HttpRequest):
    """What a protected view is given, for its annotation: ``def pay(request: ProtectedRequest)``. It is never instantiated.

    Where a view also runs without a key (``required=False``, safe methods) ``idempotency_key`` is None, which this annotation
    does not say.
    """

    idempotency_key: IdempotencyKey


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
    key_from: KeyFrom | None = None,
    wait_seconds: float = 0,
    isolation: ChosenIsolation = "from settings",
    using: str | Callable[[HttpRequest], str] | None = None,
    redact: Sequence[str] = (),
    store_body: bool = True,
    on_abandon: OnAbandon | None = None,
    replay_check: ReplayCheck | None = None,
) -> Callable[[AnyView], AnyView]: ...
def idempotent(
    view: View | None = None,
    *,
    recovery_points: Sequence[str] | None = None,
    required: bool = True,
    validate: Callable[[HttpRequest], HttpResponseBase | None] | None = None,
    scope: Callable[[HttpRequest], str] | None = None,
    key_from: KeyFrom | None = None,
    wait_seconds: float = 0,
    isolation: ChosenIsolation = "from settings",
    using: str | Callable[[HttpRequest], str] | None = None,
    redact: Sequence[str] = (),
    store_body: bool = True,
    on_abandon: OnAbandon | None = None,
    replay_check: ReplayCheck | None = None,
) -> Any:
    """Let a view run once per idempotency key, and answer each retry with the same response.

    A plain view (no ``recovery_points``) makes local writes only: one transaction holds the claim, its writes and the stored
    response. A phased view names its recovery points and loops over ``request.idempotency_key.phases()``.

    On return of a 2xx, 3xx or definitive 4xx the response is committed together with the work. A 5xx, a status of
    NEVER_STORED_STATUSES, or an exception leaves nothing of a plain view, and a phased one at its last recovery point; the next
    request with the key goes on from there.

    ``required``: False lets a request without a key run unprotected. ``validate(request)``: a response refuses the request
    before it spends a key. ``scope(request)``: whose key it is, at most 200 characters; by default the user, else the session
    (``idempotency.scopes`` has more). ``key_from``: where the key stands when the header is absent: "body:NAME", "form:NAME" or
    a function of the request. ``wait_seconds``: how long a duplicate waits for the first request before it gets 409.
    ``isolation``: level of a plain view's transaction; PLAIN_ISOLATION by default. ``using``: alias of the key's database, or a
    function of the request that returns one.
    ``redact``: dotted paths of parameters in JSON, form or query that are not kept; ``store_body``: False keeps no body. What
    was not kept cannot be run by the completer: such a key becomes stuck.
    ``on_abandon(key)``: settles a phased request that was not finished within RETENTION_HOURS: it runs once, outside any
    transaction, and its response finishes the key.
    ``replay_check(request, key)``: its response, or an exception, refuses the stored response to this request and changes no
    key; None lets it pass. It is called before each replay, outside any transaction, but not for the completer. Arguments of
    the view are passed to its parameters of the same name. Only ``on_abandon`` and ``replay_check`` may be ``async def``.

    Apply it inside authentication decorators, so that replays stay authenticated. Decorated views are left
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
    for name, value, right, expected in (
        ("validate", validate, validate is None or callable(validate), "a function of the request"),
        ("scope", scope, scope is None or callable(scope), "a function of the request, such as idempotency.scopes.user"),
        ("on_abandon", on_abandon, on_abandon is None or callable(on_abandon), "a function of the key"),
        ("replay_check", replay_check, replay_check is None or callable(replay_check), "a function of the request and the key"),
        ("using", using, isinstance(using, str | None) or callable(using), "a database alias or a function of the request"),
        ("wait_seconds", wait_seconds, isinstance(wait_seconds, int | float) and wait_seconds >= 0, "a number, 0 or more"),
    ):
        if not right or (iscoroutinefunction(value) and name not in ("on_abandon", "replay_check")):
            raise ValueError(f"{name} must be {expected}, not {value!r}.")
    if isinstance(redact, str):
        raise ValueError(f"redact must be a list of dotted paths: [{redact!r}].")
    if key_from is not None:
        refuse_key_from(key_from)
    options = Options(
        recovery_points=points,
        required=required,
        validate=validate,
        scope=scope,
        isolation=isolation,
        using=using,
        on_abandon=on_abandon,
        replay_check=replay_check,
        key_from=key_from,
        wait_seconds=wait_seconds,
        redact=tuple(redact),
        store_body=store_body,
    )

    def decorate(view: View) -> View:
        # Django REST framework says ``cls``; login_required and its like leave what LoginRequiredMiddleware reads.
        if hasattr(view, "cls") or (hasattr(view, "login_url") and hasattr(view, "redirect_field_name")):
            raise TypeError(f"{getattr(view, '__name__', view)}" + OUTSIDE)
        if type(getattr(view, "__self__", None)).__module__.startswith("ninja."):
            raise TypeError(f"{view.__self__.view_func.__name__}{OUTSIDE} Use idempotency.contrib.ninja.idempotent.")  # type: ignore[attr-defined]

        @wraps(view)
        def protected(*args: Any, **kwargs: Any) -> Any:
            call = Call.of(view, args, kwargs)
            if getattr(call.owner, "view_is_async", False) and not iscoroutinefunction(view):
                # dispatch() of a class with async handlers: what it returns is to be awaited.
                return protected_async(*args, **kwargs)
            with outside_of_atomic_requests(call.request, options):
                return answer(call, options)

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
        made._non_atomic_requests = EVERY_ALIAS  # type: ignore[attr-defined]
        return made

    return decorate if view is None else decorate(view)
