"""What each protected view promises about keys, as values: to be printed, checked, and put into an API's description.

Source: draft-07, section 2.5.2 ("Idempotency Key Specification": the resource documents its policy).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import getclosurevars, isfunction
from typing import Any

from django.contrib.admindocs import utils as admindocs
from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.resolvers import RegexPattern

from idempotency import conf
from idempotency.options import Options, class_of, options_of

View = Callable[..., Any]

#: Methods that are asked for their options; the first one is safe, so that a view without any other can be told.
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_REQUIRE_METHODS = "django.views.decorators.http"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a protected view promises to a client who sends a key. All values are those of JSON (tuples are arrays)."""

    #: The route as in the URLconf, with a slash before it; a regular expression is simplified.
    path: str
    #: The name for ``reverse()``, with its namespaces; empty without one.
    name: str
    #: The dotted path of the view.
    view: str
    methods: tuple[str, ...]
    headers: tuple[str, ...]
    #: "body:NAME", "form:NAME" or the dotted path of a function, for clients that send no header; empty without one.
    key_from: str
    key_format: str
    key_min_length: int
    key_max_length: int
    #: The dotted path of a further rule for keys; empty without one.
    key_validator: str
    required: bool
    #: Of a phased view, in their order, the first and the last included; of a plain view, none.
    recovery_points: tuple[str, ...]
    retention_hours: int
    #: How long a duplicate of a request in flight waits; 0 answers 409 at once.
    wait_seconds: float
    lock_timeout_seconds: int
    #: Classes of statuses whose answers are stored and replayed ...
    stored_statuses: tuple[str, ...]
    #: ... but for these, after which the same key runs again.
    never_stored_statuses: tuple[int, ...]
    #: The status for a key that comes with another request.
    mismatch_status: int
    replayed_header: str
    #: Whose key it is: the dotted path of a function.
    scope: str
    isolation: str
    #: The alias of the database, or the dotted path of a function; empty for the router's choice.
    using: str
    redact: tuple[str, ...]
    store_body: bool
    #: The dotted path of the function that may refuse a stored answer; empty without one.
    replay_check: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """A view in the URLs with what it says in ``@idempotent``, and the methods for which that counts: none if all are safe."""

    path: str
    name: str
    callback: View
    options: Options
    methods: tuple[str, ...]


def policies(urlconf: Any = None) -> Iterator[Policy]:
    """Yield the policy of each protected view of the URLconf, ROOT_URLCONF by default; nothing is asked of a database.

    A class whose methods differ in their options has a policy for each of them. Operations of Django Ninja are found when the
    project uses ``idempotency.contrib.ninja``.
    """
    for found in protected_views(urlconf):
        if found.methods:
            yield policy_of(found.options, found.methods, path=found.path, name=found.name, view=_dotted(found.callback))


def policy_of(options: Options, methods: tuple[str, ...], *, path: str = "", name: str = "", view: str = "") -> Policy:
    """Return what these options and the project's settings promise together."""
    limits = conf.get()
    quoted = "a quoted string (RFC 9651)"
    bare = ", or the same without quotes in visible ASCII characters without a comma"
    isolation = options.level() if options.recovery_points is None else limits.PHASE_ISOLATION
    return Policy(
        path=path,
        name=name,
        view=view,
        methods=methods,
        headers=limits.HEADER_NAMES,
        key_from=_dotted(options.key_from),
        key_format=quoted if limits.STRICT_KEY_SYNTAX else quoted + bare,
        key_min_length=limits.KEY_MIN_LENGTH,
        key_max_length=limits.KEY_MAX_LENGTH,
        key_validator=_dotted(limits.KEY_VALIDATOR),
        required=options.required,
        recovery_points=options.every_point(),
        retention_hours=limits.RETENTION_HOURS,
        wait_seconds=options.wait_seconds,
        lock_timeout_seconds=limits.LOCK_TIMEOUT_SECONDS,
        stored_statuses=("2xx", "3xx", "4xx", *(("5xx",) if limits.STORE_5XX else ())),
        never_stored_statuses=tuple(sorted(limits.NEVER_STORED_STATUSES)),
        mismatch_status=limits.MISMATCH_STATUS,
        replayed_header=limits.REPLAYED_HEADER,
        scope=_dotted(options.scope) or "idempotency.scopes.user_or_session",
        isolation=isolation or "the connection's own",
        using=_dotted(options.using),
        redact=options.redact,
        store_body=options.store_body,
        replay_check=_dotted(options.replay_check),
    )


def protected_views(urlconf: Any = None) -> Iterator[Protected]:
    """Yield each protected view of the URLconf, once for each set of options that its methods have."""
    for path, name, callback in _views(get_resolver(urlconf), "/", ""):
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
            yield Protected(path=path, name=name, callback=callback, options=options, methods=unsafe)


def wrapped(view: View) -> Iterator[View]:
    """Yield a view and what its decorators stand around, from the outermost inwards."""
    layer: View | None = view
    while layer is not None:
        yield layer
        layer = getattr(layer, "__wrapped__", None)


def _views(resolver: URLResolver, prefix: str, namespace: str) -> Iterator[tuple[str, str, View]]:
    for found in resolver.url_patterns:
        pattern = str(found.pattern)
        path = prefix + (_simplified(pattern) if isinstance(found.pattern, RegexPattern) else pattern)
        if isinstance(found, URLPattern):
            yield path, f"{namespace}{found.name}" if found.name else "", found.callback
        else:
            yield from _views(found, path, f"{namespace}{found.namespace}:" if found.namespace else namespace)


def _simplified(regex: str) -> str:
    """Return a route that reads like the regular expression: ``^rides/(?P<pk>[0-9]+)$`` becomes ``rides/<pk>``."""
    named = admindocs.replace_named_groups(admindocs.remove_non_capturing_groups(regex))
    simplified: str = admindocs.replace_metacharacters(admindocs.replace_unnamed_groups(named))
    return simplified


def allowed_methods(view: View) -> set[str]:
    """Return the methods that reach a view, as far as its class and Django's ``require_http_methods`` say."""
    allowed = set(_METHODS)
    if (owner := class_of(view)) is not None:
        given: dict[str, Any] = getattr(view, "view_initkwargs", None) or getattr(view, "initkwargs", None) or {}
        names = given.get("http_method_names", owner.http_method_names)
        handlers = getattr(view, "actions", None) or {name: name for name in names}
        allowed &= {name.upper() for name in names if name in handlers and hasattr(owner, handlers[name])}
    for layer in wrapped(view):
        if isfunction(layer) and layer.__globals__.get("__name__") == _REQUIRE_METHODS:
            allowed &= set(getclosurevars(layer).nonlocals.get("request_method_list", allowed))
    return allowed


def _dotted(named: Any) -> str:
    """Return the dotted path of a function or of the class behind a view; a string as it is, nothing for None."""
    if named is None or isinstance(named, str):
        return named or ""
    thing = class_of(named) or named
    if not hasattr(thing, "__qualname__"):
        thing = type(thing)
    return f"{thing.__module__}.{thing.__qualname__}"
