"""The policy of each protected view and of each operation as data, for ``describe_idempotency``,
system checks and API descriptions.

Source: draft-07, section 2.5.2 ("Idempotency Key Specification": the resource documents its
policy).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import getclosurevars, isfunction
from typing import Any

from django.conf import settings
from django.urls import get_resolver

from idempotency import conf
from idempotency._http.options import Options
from idempotency._http.routes import METHODS, class_of, every_view, options_of
from idempotency._http.view import View
from idempotency._http.wrappers import wrapped
from idempotency._operations.definition import registered

#: The methods whose options are read. GET is included to find protected views with safe methods
#: only.
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_REQUIRE_METHODS = "django.views.decorators.http"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The policy that a client of a protected view relies on. All values are JSON types (tuples
    become arrays)."""

    #: The route of the URLconf with a leading slash; a regular expression is simplified.
    path: str
    #: The name for ``reverse()`` with its namespaces; empty if it has none.
    name: str
    view: str
    methods: tuple[str, ...]
    headers: tuple[str, ...]
    #: The place of the key if there is no header: "body:NAME", "form:NAME", a dotted path, or
    #: empty.
    key_from: str
    key_format: str
    key_min_length: int
    key_max_length: int
    #: The dotted path of the validator of keys; empty if there is none.
    key_validator: str
    #: With False a request without a key runs unprotected.
    required: bool
    #: The dotted path of the function that returns whether a request is protected; empty if each
    #: one is.
    applies: str
    #: All recovery points of a phased view in order, with the first and the last; empty for a plain
    #: view.
    recovery_points: tuple[str, ...]
    #: The time for which a finished key is replayed. It starts when the response is stored.
    retention_hours: int
    #: The time for which a duplicate waits for the running request; with 0 it gets 409 at once.
    wait_seconds: float
    #: After this time without a renewal of the lock, the next request may claim the key.
    lease_seconds: int
    #: Classes of statuses that are stored and replayed, except ``never_stored_statuses``.
    stored_statuses: tuple[str, ...]
    #: Statuses that are never stored; a retry runs the view again.
    never_stored_statuses: tuple[int, ...]
    #: The status for a key that was used with a different request.
    mismatch_status: int
    replayed_header: str
    #: The dotted path of the function that returns the scope of a key.
    scope: str
    isolation: str
    #: The alias of the database or the dotted path of a function; empty if the router decides.
    using: str
    store_body: bool
    #: The names of the session values and attributes that are stored for the completer.
    keep: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """A protected view, the options of its decorator, and the unsafe methods with these options."""

    #: The route and the name of the view in the URLconf; empty in API descriptions, which publish
    #: neither.
    path: str = ""
    name: str = ""
    callback: View
    options: Options
    methods: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unprotected:
    """A view that takes unsafe methods without ``@idempotent``."""

    path: str
    name: str
    view: str
    methods: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationPolicy:
    """The policy that a caller of an operation relies on. All values are JSON types."""

    #: The name that is stored in its keys.
    operation: str
    #: The dotted path of its function.
    function: str
    #: The arguments, as Python writes them.
    parameters: str
    #: All recovery points of a phased operation in order, with the first and the last; empty for a
    #: plain operation.
    recovery_points: tuple[str, ...]
    #: Each call of a downstream service, with the hours for which the service remembers its key.
    #: None: the service does not support idempotency keys, so the call is made at most once.
    calls: dict[str, float | None]
    #: The dotted path of the function that undoes earlier transactions if the operation is
    #: rejected; empty if there is none.
    undo: str
    #: The time for which a finished key is replayed; None: forever.
    retention_hours: int | None
    #: The time for which a second call waits for the first; with 0 it raises InProgress at once.
    wait_seconds: float
    #: After this time without a renewal of the lock, the next call may claim the key.
    lease_seconds: int
    #: The alias of the database; empty if the router decides.
    using: str


def operation_policies() -> Iterator[OperationPolicy]:
    """Yield the policy of each operation that the completer can run, by name. No database is
    queried."""
    for operation in sorted(registered(), key=lambda each: each.name):
        steps = operation.steps
        calls = [step.call for step in steps.of_point.values() if step.call is not None]
        yield OperationPolicy(
            operation=operation.name,
            function=operation.path,
            parameters=str(steps.signature),
            recovery_points=steps.points if steps.is_phased else (),
            calls={call.name: call.valid_hours for call in calls},
            undo=_dotted(steps.undo),
            retention_hours=operation.hours_kept,
            wait_seconds=operation.wait_seconds,
            lease_seconds=operation.lease,
            using=operation.using or "",
        )


def policies(urlconf: Any = None) -> Iterator[Policy]:
    """Yield the policy of each protected view of the URLconf, by default ROOT_URLCONF. No database
    is queried.

    A class whose methods have different options has several policies. Operations of Django Ninja
    are found if the project uses ``idempotency.contrib.ninja``.
    """
    for view in protected_views(urlconf):
        if view.methods:
            yield policy_of(view)


def policy_of(view: Protected) -> Policy:
    """Return the policy that follows from the options of the view and the project's settings."""
    options = view.options
    limits = conf.get()
    quoted = "a quoted string (RFC 9651)"
    bare = ", or an unquoted string of visible ASCII characters other than a comma"
    isolation = options.level() if options.recovery_points is None else limits.PHASE_ISOLATION
    return Policy(
        path=view.path,
        name=view.name,
        view=_dotted(view.callback),
        methods=view.methods,
        headers=limits.HEADER_NAMES,
        key_from=_dotted(options.key_from),
        key_format=quoted if limits.STRICT_KEY_SYNTAX else quoted + bare,
        key_min_length=limits.KEY_MIN_LENGTH,
        key_max_length=limits.KEY_MAX_LENGTH,
        key_validator=_dotted(limits.KEY_VALIDATOR),
        required=options.required,
        applies=_dotted(options.applies),
        recovery_points=options.every_point(),
        retention_hours=options.hours_kept(),
        wait_seconds=options.wait_seconds,
        lease_seconds=options.lease(),
        stored_statuses=("2xx", "3xx", "4xx", *(("5xx",) if limits.STORE_5XX else ())),
        never_stored_statuses=tuple(sorted(limits.NEVER_STORED_STATUSES)),
        mismatch_status=limits.MISMATCH_STATUS,
        replayed_header=limits.REPLAYED_HEADER,
        scope=_dotted(options.scope) or "idempotency.scopes.user_or_session",
        isolation=isolation or "the connection's own",
        using=_dotted(options.using),
        store_body=bool(options.store_body),
        keep=tuple(options.keep),
    )


def protected_views(urlconf: Any = None) -> Iterator[Protected]:
    """Yield each protected view of the URLconf, once for each different set of options of its
    methods."""
    for path, name, callback in every_view(get_resolver(urlconf)):
        allowed = allowed_methods(callback)
        by_options: list[tuple[Options, list[str]]] = []
        for method in _METHODS:
            if method not in allowed or (options := options_of(callback, method)) is None:
                continue
            for known, methods in by_options:
                if known == options:
                    methods.append(method)
                    break
            else:
                by_options.append((options, [method]))
        for options, methods in by_options:
            unsafe = tuple(method for method in methods if method != "GET")
            yield Protected(
                path=path, name=name, callback=callback, options=options, methods=unsafe
            )


def unprotected(urlconf: Any = None) -> Iterator[Unprotected]:
    """Yield each view of the URLconf, by default ROOT_URLCONF, that takes unsafe methods without
    protection. No database is queried. A function without ``require_http_methods`` takes every
    method."""
    for path, name, callback in every_view(get_resolver(urlconf)):
        taken = [
            method for method in _METHODS if method != "GET" and method in allowed_methods(callback)
        ]
        if methods := tuple(method for method in taken if options_of(callback, method) is None):
            yield Unprotected(path=path, name=name, view=_dotted(callback), methods=methods)


def views_to_check() -> Iterator[Protected]:
    """Yield each protected view for a system check. Yield none if there is no URLconf, or if the
    settings are invalid."""
    if getattr(settings, "ROOT_URLCONF", None) and conf.are_valid():
        yield from protected_views()


def allowed_methods(view: View) -> set[str]:
    """Return the methods that the class of the view and ``require_http_methods`` permit."""
    allowed = set(_METHODS)
    for find in METHODS:
        if (found := find(view)) is not None:
            return found & allowed
    if (owner := class_of(view)) is not None:
        given: dict[str, Any] = (
            getattr(view, "view_initkwargs", None) or getattr(view, "initkwargs", None) or {}
        )
        names = given.get("http_method_names", owner.http_method_names)
        handlers = getattr(view, "actions", None) or {name: name for name in names}
        allowed &= {
            name.upper() for name in names if name in handlers and hasattr(owner, handlers[name])
        }
    for layer in wrapped(view):
        if isfunction(layer) and layer.__globals__.get("__name__") == _REQUIRE_METHODS:
            allowed &= set(getclosurevars(layer).nonlocals.get("request_method_list", allowed))
    return allowed


def _dotted(named: Any) -> str:
    """Return the dotted path of a function or view class. Return a string unchanged, and an empty
    string for None."""
    if named is None or isinstance(named, str):
        return named or ""
    thing = class_of(named) or named
    if not hasattr(thing, "__qualname__"):
        thing = type(thing)
    return f"{thing.__module__}.{thing.__qualname__}"
